"""Pairs of a row and one of its experts, sorted by expert and cut into blocks that share one.

A counting sort. A program counts, for each of its pairs, those of its chunk that come before it: with a smaller expert,
or with the same one and a smaller number. Up to `ALONE` pairs are one chunk, and one launch does everything; of more,
a first launch counts each chunk's pairs by expert. One more program writes the table of blocks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int32

from pallas_kernels._dispatch import Implementation, next_power_of_2, pallas_call
from pallas_kernels._flash import divide, divide_up

ALONE = 1024  # pairs that one launch sorts
CHUNK = 512  # pairs of a program where there are more
OWN = 32  # pairs that a program of one launch places
SUMMED = 16  # chunks, and experts, whose counts are added up at a time
THREADS = 512


class Blocks(NamedTuple):
    """Block b holds the pairs order[first] .. order[end - 1], of one expert; pair p is row p // A with its p % A."""

    table: Int32[Array, "3 blocks"]  # expert, first, end; first = end where there is no block
    order: Int32[Array, " pairs"]


def is_hit(ids: jax.Array, experts: int, valid: Bool[Array, " M"] | None) -> Bool[Array, "M A"]:
    """Which pairs are computed: of real rows, with experts that exist."""
    hit = (ids >= 0) & (ids < experts)
    return hit if valid is None else hit & valid[:, None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a call: pairs, A of them a row; experts; the most pairs of a block, and how many blocks there are.

    A program places `own` pairs, which it compares with the `chunk` that they lie in.
    """

    pairs: int
    per_row: int
    experts: int
    size: int
    blocks: int
    masked: bool
    chunk: int
    own: int

    @classmethod
    def of(cls, ids: jax.Array, experts: int, size: int, masked: bool) -> "Plan":
        pairs = ids.size
        alone = pairs <= ALONE
        chunk = next_power_of_2(pairs) if alone else CHUNK
        blocks = min(pairs, min(experts, pairs) + pairs // size)
        return cls(pairs, ids.shape[1], experts, size, blocks, masked, chunk, min(OWN, chunk) if alone else chunk)

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.pairs, self.chunk)

    @property
    def compared(self) -> int:
        """Pairs of the chunk that others are compared with at a time, as many as fit in registers."""
        return min(self.chunk, 64 if self.chunks == 1 else 32)


def experts_of(plan: Plan, refs: list, pair: jax.Array) -> jax.Array:
    """Each pair's expert; the number of experts where there is none to visit. refs: ids [pairs], [valid rows]."""
    real = pair < plan.pairs
    expert = plt.load(refs[0].at[pair], mask=real, other=-1)
    hit = (expert >= 0) & (expert < plan.experts)
    if plan.masked:
        hit &= plt.load(refs[1].at[divide(pair, plan.per_row)], mask=real, other=False)
    return jnp.where(hit, expert, plan.experts)


def compare(plan: Plan, inputs: list, first: jax.Array | int, size: int, which: Callable) -> jax.Array:
    """For each of `size` things, how many pairs of the chunk at `first` are `which(their numbers, their experts)`."""
    step = plan.compared

    def add(i, sums):
        other = first + i * step + jnp.arange(step, dtype=jnp.int32)
        return sums + which(other[None], experts_of(plan, inputs, other)[None]).astype(jnp.int32)

    return jnp.sum(lax.fori_loop(0, plan.chunk // step, add, jnp.zeros((size, step), jnp.int32)), axis=1)


def count(plan: Plan, inputs: list, first: jax.Array | int, expert: jax.Array) -> jax.Array:
    """How many pairs of a chunk each expert has."""
    return compare(plan, inputs, first, expert.size, lambda _, of: of == expert[:, None])


def count_kernel(*refs, plan: Plan):
    """refs: ids, [valid], then the counts [chunks, experts] that it writes."""
    *inputs, counts_ref = refs
    c, expert = pl.program_id(0), jnp.arange(next_power_of_2(plan.experts), dtype=jnp.int32)
    counts = count(plan, inputs, c * plan.chunk, expert)
    plt.store(counts_ref.at[c, expert], counts, mask=expert < plan.experts)


def place_kernel(*refs, plan: Plan):
    """refs: ids, [valid], [counts], then the table and the order that it writes."""
    *inputs, table_ref, order_ref = refs
    counts_ref = inputs.pop() if plan.chunks > 1 else None
    program = pl.program_id(0)

    @pl.when(program == 0)
    def _():
        write_table(plan, inputs, counts_ref, table_ref)

    @pl.when(program > 0)
    def _():
        write_order(plan, inputs, counts_ref, order_ref, program - 1)


def sum_counts(plan: Plan, counts_ref, expert: jax.Array, program: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Pairs by expert: of all chunks, and of those before a program's own."""

    def add(i, sums):
        chunk = i * SUMMED + jnp.arange(SUMMED)
        there = (chunk < plan.chunks)[:, None] & (expert < plan.experts)[None]
        counts = plt.load(counts_ref.at[chunk[:, None], expert[None]], mask=there, other=0)
        before = jnp.where((chunk < program)[:, None], counts, 0)
        return sums[0] + jnp.sum(counts, axis=0), sums[1] + jnp.sum(before, axis=0)

    return lax.fori_loop(0, pl.cdiv(plan.chunks, SUMMED), add, (jnp.zeros_like(expert),) * 2)


def write_table(plan: Plan, inputs: list, counts_ref, table_ref) -> None:
    expert = jnp.arange(next_power_of_2(plan.experts), dtype=jnp.int32)
    if counts_ref is None:
        total = jnp.where(expert < plan.experts, count(plan, inputs, 0, expert), 0)
    else:
        total, _ = sum_counts(plan, counts_ref, expert, 0)
    blocks, start = divide_up(total, plan.size), jnp.cumsum(total) - total
    before = jnp.cumsum(blocks) - blocks

    def write(i, _):
        first, own = start + i * plan.size, i < blocks
        at = jnp.where(own, before + i, plan.blocks + expert)  # a masked store may write the old value back
        for r, value in enumerate((expert, first, jnp.minimum(first + plan.size, start + total))):
            plt.store(table_ref.at[r, at], value, mask=own)

    lax.fori_loop(0, jnp.max(blocks), write, None)
    block = jnp.arange(next_power_of_2(plan.blocks), dtype=jnp.int32)
    empty = (block >= jnp.sum(blocks)) & (block < plan.blocks)
    for r in range(3):
        plt.store(table_ref.at[r, block], jnp.zeros_like(block), mask=empty)


def first_places(plan: Plan, counts_ref, own: jax.Array, program: jax.Array) -> jax.Array:
    """Where the pairs of a chunk that visit the expert `own` begin."""
    step = min(next_power_of_2(plan.experts), SUMMED)

    def add(i, state):
        place, done = state
        expert = i * step + jnp.arange(step, dtype=jnp.int32)
        total, before = sum_counts(plan, counts_ref, expert, program)
        first = done + jnp.cumsum(total) - total + before
        place += jnp.sum(jnp.where(own[:, None] == expert[None], first[None], 0), axis=1)
        return place, done + jnp.sum(total)

    return lax.fori_loop(0, pl.cdiv(plan.experts, step), add, (jnp.zeros_like(own), jnp.int32(0)))[0]


def write_order(plan: Plan, inputs: list, counts_ref, order_ref, program: jax.Array) -> None:
    """A pair's place: behind the pairs of smaller experts, and those of its own that have smaller numbers."""
    pair = program * plan.own + jnp.arange(plan.own, dtype=jnp.int32)
    own = experts_of(plan, inputs, pair)
    alone = counts_ref is None

    def earlier(other, of):
        before = (of == own[:, None]) & (other < pair[:, None])
        return before | (of < own[:, None]) if alone else before

    place = compare(plan, inputs, 0 if alone else program * plan.chunk, plan.own, earlier)
    if not alone:
        place += first_places(plan, counts_ref, own, program)
    hit = own < plan.experts  # other lanes go past the end: a masked store may write the old value back
    plt.store(order_ref.at[jnp.where(hit, place, plan.pairs + pair)], pair, mask=hit)


def make_blocks(
    ids: Int32[Array, "M A"],
    valid: Bool[Array, " M"] | None,
    experts: int,
    size: int,
    implementation: Implementation,
) -> Blocks:
    """Blocks of at most `size` pairs, by expert, as many as there can be. Pairs that visit none are in no block.

    `order` has the others first, sorted by expert and stable; what follows them is undefined.
    """
    plan = Plan.of(ids, experts, size, valid is not None)
    inputs = [ids.reshape(-1)] if valid is None else [ids.reshape(-1), valid]
    call = functools.partial(pallas_call, op="moe", implementation=implementation, threads=THREADS, num_stages=1)
    if plan.chunks > 1:
        shape = jax.ShapeDtypeStruct((plan.chunks, experts), jnp.int32)
        counts = call(functools.partial(count_kernel, plan=plan), grid=(plan.chunks,), out_shape=shape)(*inputs)
        inputs.append(counts)
    place = call(
        functools.partial(place_kernel, plan=plan),
        grid=(1 + pl.cdiv(plan.pairs, plan.own),),
        out_shape=(
            jax.ShapeDtypeStruct((3, plan.blocks), jnp.int32),
            jax.ShapeDtypeStruct((plan.pairs,), jnp.int32),
        ),
    )
    return Blocks(*place(*inputs))
