"""Two launches a pass: programs of one warp sum some columns of a row by block, one a row reads off where to look next.

How a row is cut into programs follows from its length alone, so that its sums have the same bits in any batch.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Implementation, next_power_of_2, pallas_call
from pallas_kernels.cutoff.reference import BLOCKS, PASSES, Sum, block_of, depth_of, narrow

COLUMNS = 1024  # of a program
TILE = 64  # of them at a time; where none lies in a block they are passed over


@dataclass(frozen=True, slots=True)
class Plan:
    columns: int
    weighted: bool


def sum_kernel(x_ref, last_ref, first_ref, shift_ref, sums_ref, *, plan: Plan):
    """sums [rows, parts, BLOCKS] of the blocks of 2^shift depths from a row's first one on."""
    row, part = pl.program_id(0), pl.program_id(1)
    first, last, shift = first_ref[row], last_ref[row], shift_ref[0]

    def load(i):
        column = part * COLUMNS + i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        mask = None if plan.columns % COLUMNS == 0 else column < plan.columns
        return plt.load(x_ref.at[row, column], mask=mask, other=None if mask is None else 0.0), mask

    totals = [jnp.zeros(TILE, jnp.float32)] * BLOCKS
    for x, mask in [load(i) for i in range(COLUMNS // TILE)]:
        block = block_of(depth_of(x), first, last, shift)
        block = block if mask is None else jnp.where(mask, block, BLOCKS)

        def add(totals, x=x, block=block):
            weights = jnp.exp(x) if plan.weighted else jnp.ones_like(x)
            return [total + jnp.where(block == b, weights, 0.0) for b, total in enumerate(totals)]

        totals = lax.cond(jnp.min(block) < BLOCKS, add, lambda totals: totals, totals)
    for b, total in enumerate(totals):
        sums_ref[row, part, b] = jnp.sum(total)


def narrow_kernel(sums_ref, wanted_ref, first_ref, before_ref, pass_ref, next_ref, sum_ref, *, parts: int):
    """From a pass's sums, where its blocks begin and the sum before them: the same of the block that is looked for."""
    row = pl.program_id(0)
    part, block = jnp.arange(next_power_of_2(parts), dtype=jnp.int32), jnp.arange(BLOCKS, dtype=jnp.int32)
    mask = jnp.broadcast_to((part < parts)[:, None], (part.size, BLOCKS))
    sums = jnp.sum(plt.load(sums_ref.at[row, part[:, None], block[None]], mask=mask, other=0.0), axis=0)
    found, before = narrow(sums, before_ref[row], wanted_ref[row], pass_ref[1])
    next_ref[row] = first_ref[row] + (found << pass_ref[0])
    sum_ref[row] = before


def cutoff_triton(
    x: jax.Array, wanted: jax.Array, last: jax.Array, weighted: bool, add_up: Sum | None, implementation: Implementation
) -> jax.Array:
    """The kernels' calls; as the reference."""
    rows, columns = x.shape
    parts = pl.cdiv(columns, COLUMNS)
    call = functools.partial(pallas_call, op="cutoff", implementation=implementation, num_stages=1)
    sum_up = call(
        functools.partial(sum_kernel, plan=Plan(columns, weighted)),
        grid=(rows, parts),
        out_shape=jax.ShapeDtypeStruct((rows, parts, BLOCKS), jnp.float32),
        num_warps=1,
    )
    look = call(
        functools.partial(narrow_kernel, parts=parts if add_up is None else 1),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)],
        num_warps=4,
    )
    first, before = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    for shift, most in PASSES:
        step = jnp.array([shift, most], jnp.int32)
        sums = sum_up(x, last, first, step)
        sums = sums if add_up is None else add_up(sums.sum(axis=1))[:, None]
        first, before = look(sums, wanted, first, before, step)
    return first
