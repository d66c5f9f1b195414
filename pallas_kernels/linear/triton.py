"""One program multiplies some rows of a weight, read once, with all rows of x.

The weights are the left operand (w x^T), so that x takes the narrow side of the matrix instructions, whose size may
follow the number of rows. K runs in one order whatever that number is: a row of the result is bitwise the same alone
and among up to `ROWS` others.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels import _dispatch as dispatch
from pallas_kernels._flash import dot_transposed, every
from pallas_kernels.linear.tiles import Tiles, choose_tiles


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a kernel knows before it runs.

    `sizes` are the rows of each weight that are multiplied; a weight has `parts`, whose products share a program: one,
    or gate and up, which SwiGLU joins.
    """

    tiles: Tiles
    rows: int
    inputs: int
    sizes: tuple[int, ...]
    parts: int
    scaled: bool = False

    @property
    def counts(self) -> list[int]:
        """Programs of each weight."""
        return [pl.cdiv(size, self.tiles.outputs) for size in self.sizes]

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of rows run side by side, so that the second finds the weights in L2."""
        return pl.cdiv(self.rows, self.tiles.rows), sum(self.counts)


def load(ref, at: tuple, shape: tuple[int, int], *masks: jax.Array | None) -> jax.Array:
    """The tile at indices that broadcast to it, with zeros where a mask says no."""
    mask = every([m for m in masks if m is not None], shape)
    return plt.load(ref.at[at], mask=mask, other=None if mask is None else 0.0)


def inside(index: jax.Array, size: int, tile: int) -> jax.Array | None:
    """The mask of an index; None where the tiles divide the size."""
    return None if size % tile == 0 else index < size


def column(mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else mask[:, None]


def multiply(plan: Plan, x_ref, w_ref, row: jax.Array, out: jax.Array, size: int) -> list[jax.Array]:
    """The tile [outputs, rows] of each part's w x^T, in float32."""
    tiles = plan.tiles
    live, real = column(inside(row, plan.rows, tiles.rows)), column(inside(out, size, tiles.outputs))

    def body(i, sums):
        k = i * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
        cut = inside(k, plan.inputs, tiles.depth)
        x = load(x_ref, (row[:, None], k[None]), (tiles.rows, tiles.depth), live, cut)
        at, shape = (out[:, None], k[None]), (tiles.outputs, tiles.depth)
        ws = [load(w_ref, (p, *at), shape, real, cut) for p in range(plan.parts)]
        return [s + dot_transposed(w, x) for s, w in zip(sums, ws, strict=True)]

    zeros = [jnp.zeros((tiles.outputs, tiles.rows), jnp.float32)] * plan.parts
    return lax.fori_loop(0, pl.cdiv(plan.inputs, tiles.depth), body, zeros)


def linear_kernel(x_ref, *refs, plan: Plan):
    """refs: the weights [parts, outputs, inputs], a scale [1] if there is one, then the output [rows, all outputs]."""
    *w_refs, out_ref = refs
    scale = w_refs.pop()[0].astype(jnp.float32) if plan.scaled else None
    tiles, tile = plan.tiles, pl.program_id(1)
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)

    def one(w_ref, size: int, first_tile: int, first: int):
        out = (tile - first_tile) * tiles.outputs + jnp.arange(tiles.outputs, dtype=jnp.int32)
        sums = multiply(plan, x_ref, w_ref, row, out, size)
        y = sums[0] if plan.parts == 1 else sums[0] * jax.nn.sigmoid(sums[0]) * sums[1]
        y = y if scale is None else y * scale
        live, real = inside(row, plan.rows, tiles.rows), inside(out, size, tiles.outputs)
        mask = every([m for m in (column(live), real) if m is not None], (tiles.rows, tiles.outputs))
        plt.store(out_ref.at[row[:, None], (first + out)[None]], y.T.astype(out_ref.dtype), mask=mask)

    first_tile = first = 0
    for w_ref, size, count in zip(w_refs, plan.sizes, plan.counts, strict=True):
        run = functools.partial(one, w_ref, size, first_tile, first)
        if len(w_refs) == 1:
            run()
        else:
            pl.when((tile >= first_tile) & (tile < first_tile + count))(run)
        first_tile, first = first_tile + count, first + size


def launch(
    plan: Plan,
    x: jax.Array,
    operands: Sequence[jax.Array],
    out_dtype: DTypeLike,
    implementation: dispatch.Implementation,
) -> jax.Array:
    """The operands: weights [parts, outputs, inputs] and the scale; the result [rows, all outputs]."""
    call = dispatch.pallas_call(
        functools.partial(linear_kernel, plan=plan),
        op="linear",
        implementation=implementation,
        grid=plan.grid,
        out_shape=jax.ShapeDtypeStruct((plan.rows, sum(plan.sizes)), out_dtype),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    return call(x, *operands)


def make_plan(x: jax.Array, sizes: Sequence[int], parts: int, scaled: bool, tiles: Tiles | None) -> Plan:
    rows, inputs = x.shape
    tiles = tiles or choose_tiles(rows, parts * sum(sizes), parts, x.dtype.itemsize, dispatch.target())
    return Plan(tiles, rows, inputs, tuple(sizes), parts, scaled)


def linear_triton(
    x: jax.Array,
    weights: Sequence[jax.Array],
    scale: jax.Array | None,
    outputs: int,
    out_dtype: DTypeLike,
    implementation: dispatch.Implementation,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The kernel's call; shapes as in the reference. `tiles` None chooses for the card."""
    sizes, left = [], outputs
    for w in weights:
        sizes.append(min(w.shape[0], left))
        left -= sizes[-1]
    operands = [w[None] for w, size in zip(weights, sizes, strict=True) if size > 0]
    operands += [] if scale is None else [scale.reshape(1)]
    plan = make_plan(x, [s for s in sizes if s > 0], 1, scale is not None, tiles)
    return launch(plan, x, operands, out_dtype, implementation)


def swiglu_triton(
    x: jax.Array, w13: jax.Array, implementation: dispatch.Implementation, tiles: Tiles | None = None
) -> jax.Array:
    """The kernel's call; shapes as in the reference. `tiles` None chooses for the card."""
    return launch(make_plan(x, [w13.shape[1]], 2, False, tiles), x, [w13], x.dtype, implementation)
