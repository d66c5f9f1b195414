"""Two launches: rows through w13 and SwiGLU, then through w2, weighted; a sum over each row's experts follows.

A row and one of its experts make a pair. Pairs are sorted by expert and cut into blocks of `Tiles.rows` that share one;
a program multiplies one block with some rows of its expert's weights. So an expert that is hit is read once by as many
rows as a tile holds, one that is not hit is not read, and nothing is larger than rows x experts per row. Few rows
(decode) differ from many (prefill) in the tiles alone. A tile's rows do not meet in a dot, and the order of K is that of
the tiles, so a row's result does not depend on the rows beside it.
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

from pallas_kernels import _dispatch as dispatch
from pallas_kernels.fp4 import FP4, VALUES_A_WORD
from pallas_kernels.moe import unpack


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of x, rows of the weights, and columns of both that a program holds at a time."""

    rows: int
    outputs: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3
    flip: bool = False
    shared_depth: int = 64  # of the arrays beside packed weights


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a kernel knows before it runs; `packing` is None where the routed experts are arrays."""

    tiles: Tiles
    rows: int
    per_row: int
    inputs: int
    outputs: int
    shared: int
    direct: bool
    packing: unpack.Packing | None
    split_out: bool

    @property
    def pairs(self) -> int:
        return self.rows * self.per_row

    @property
    def nowhere(self) -> int:
        """Past all pairs: where lanes without one point, which masks keep from being read or written."""
        return self.pairs + self.shared * self.rows

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.tiles.rows)


class Blocks(NamedTuple):
    """The routed pairs by expert: pair `order[i]` for i in first[b] .. end[b] is in block b, of expert[b]."""

    table: jax.Array  # int32 [3, blocks]: expert, first, end
    order: jax.Array  # int32 [pairs]


def make_blocks(ids: jax.Array, experts: int, valid: jax.Array | None, size: int) -> Blocks:
    """Sort the pairs by expert and cut them. Blocks past the last have first = end."""
    pairs = ids.size
    hit = (ids >= 0) & (ids < experts)
    if valid is not None:
        hit &= valid[:, None]
    flat = jnp.where(hit, ids, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert = jnp.arange(experts, dtype=jnp.int32)
    count = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    start = jnp.cumsum(count) - count
    blocks = (count + (size - 1)) // size
    last = jnp.cumsum(blocks)
    most = min(pairs, min(experts, pairs) + pairs // size)
    b = jnp.arange(most, dtype=jnp.int32)
    mine = (b[:, None] >= (last - blocks)) & (b[:, None] < last)
    pick = lambda per_expert: jnp.sum(jnp.where(mine, per_expert, 0), axis=1)  # noqa: E731
    first = pick(start - (last - blocks) * size) + b * size
    end = jnp.minimum(first + size, pick(start + count))
    live = b < last[-1]
    table = jnp.stack([pick(expert), jnp.where(live, first, 0), jnp.where(live, end, 0)])
    return Blocks(table, order)


class Rows(NamedTuple):
    """The pairs of a program's tile: their numbers, which of the lanes are real, and whether any is."""

    pair: jax.Array
    live: jax.Array
    some: jax.Array
    expert: jax.Array


def routed_rows(plan: Plan, block: jax.Array, experts: int, block_refs) -> Rows:
    lane = jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    if plan.direct:  # one row: its pairs are the blocks
        expert = block_refs[0][0, block]
        hit = (expert >= 0) & (expert < experts)
        live = lane < hit.astype(jnp.int32)
        return Rows(jnp.where(live, block, plan.nowhere + lane), live, hit, expert)
    table_ref, order_ref = block_refs
    first, end = table_ref[1, block], table_ref[2, block]
    live = first + lane < end
    pair = plt.load(order_ref.at[first + lane], mask=live, other=0)
    return Rows(jnp.where(live, pair, plan.nowhere + lane), live, first < end, table_ref[0, block])


def shared_rows(plan: Plan, block: jax.Array) -> Rows:
    expert = lax.div(block, jnp.int32(plan.row_blocks))
    lane = jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    row = lax.rem(block, jnp.int32(plan.row_blocks)) * plan.tiles.rows + lane
    pair = jnp.where(row < plan.rows, plan.pairs + expert * plan.rows + row, plan.nowhere + lane)
    return Rows(pair, row < plan.rows, jnp.bool_(True), expert)


def dot(x: jax.Array, w: jax.Array, flip: bool) -> jax.Array:
    """x w^T in float32, without TF32."""
    if flip:
        x, w = w, x
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def inside(index: jax.Array, size: int, tile: int) -> jax.Array | None:
    """The mask of an index, None where the tiles divide the size."""
    return None if size % tile == 0 else index < size


def load(ref, at: tuple, shape: tuple[int, int], rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A tile of zeros where a mask says no."""
    masks = [m for m in (rows if rows is None else rows[:, None], columns if columns is None else columns[None]) if m is not None]
    if not masks:
        return plt.load(ref.at[at])
    mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape)
    return plt.load(ref.at[at], mask=mask, other=0)


def accumulate(steps: int, parts: int, shape: tuple[int, int], body: Callable, flip) -> tuple[jax.Array, ...]:
    sums = lax.fori_loop(0, steps, body, (jnp.zeros(shape[::-1] if flip else shape, jnp.float32),) * parts)
    return tuple(s.T for s in sums) if flip else sums


def array_product(plan: Plan, depth: int, x_ref, row, live, w_ref, expert, out, parts: int) -> tuple[jax.Array, ...]:
    """x[row] times rows `out` of the expert's weights, for each of the parts (gate, up): float32 [rows, outputs]."""
    shape, real = (plan.tiles.rows, plan.tiles.outputs), inside(out, plan.outputs, plan.tiles.outputs)

    def body(i, sums):
        k = i * depth + jnp.arange(depth, dtype=jnp.int32)
        cut = inside(k, plan.inputs, depth)
        x = load(x_ref, (row[:, None], k[None]), (shape[0], depth), live, cut)
        weights = lambda p: (expert, p, out[:, None], k[None]) if parts == 2 else (expert, out[:, None], k[None])  # noqa: E731
        return tuple(s + dot(x, load(w_ref, weights(p), (shape[1], depth), real, cut), plan.tiles.flip) for p, s in enumerate(sums))

    return accumulate(pl.cdiv(plan.inputs, depth), parts, shape, body, plan.tiles.flip)


def packed_product(plan: Plan, x_ref, row, live, w_refs, expert, out, parts: int) -> tuple[jax.Array, ...]:
    """The same with packed weights; x in the order of `split_columns`."""
    codes_ref, scales_ref = w_refs[:2]
    packing = plan.packing
    words, blocks = plan.tiles.depth // VALUES_A_WORD, plan.tiles.depth // packing.block
    all_words = plan.inputs // VALUES_A_WORD
    shape, real = (plan.tiles.rows, plan.tiles.outputs), inside(out, plan.outputs, plan.tiles.outputs)
    dtype = jnp.bfloat16 if x_ref.dtype == jnp.bfloat16 else jnp.float32

    at = lambda p, k: (expert, p, out[:, None], k[None]) if parts == 2 else (expert, out[:, None], k[None])  # noqa: E731

    def load_scales(i):
        k = i * blocks + jnp.arange(blocks, dtype=jnp.int32)
        cut = k < plan.inputs // packing.block
        return tuple(load(scales_ref, at(p, k), (shape[1], blocks), real, cut) for p in range(parts))

    def body(i, state):
        sums, bits = state
        word = i * words + jnp.arange(words, dtype=jnp.int32)
        cut = inside(word, all_words, words)
        codes = [load(codes_ref, at(p, word), (shape[1], words), real, cut) for p in range(parts)]
        scales = [packing.spread(b, words, dtype) for b in bits]
        bits = load_scales(i + 1)
        for t in range(VALUES_A_WORD):
            x = load(x_ref, (row[:, None], t, word[None]), (shape[0], words), live, cut).astype(dtype)
            sums = tuple(
                s + dot(x, packing.value(codes[p], scales[p], t), plan.tiles.flip) for p, s in enumerate(sums)
            )
        return sums, bits

    zero = jnp.zeros(shape[::-1] if plan.tiles.flip else shape, jnp.float32)
    steps = pl.cdiv(plan.inputs, plan.tiles.depth)
    sums, _ = lax.fori_loop(0, steps, body, ((zero,) * parts, load_scales(0)))
    if plan.tiles.flip:
        sums = tuple(s.T for s in sums)
    factor = packing.factor if packing.format == "mxfp4" else packing.factor * w_refs[2][expert]
    return tuple(s * factor for s in sums)


def up_kernel(*refs, plan: Plan):
    """refs: rows [, rows in the order of words], blocks, routed w13, [shared w13], out h [pairs, F]."""
    run(plan, refs, 2, swiglu_store)


def down_kernel(*refs, plan: Plan):
    """refs as in `up_kernel`, with h and w2, then the weights, out y [pairs, H]."""
    run(plan, refs[:-2] + refs[-1:], 1, functools.partial(weighted_store, refs[-2]))


def swiglu_store(plan: Plan, rows: Rows, out, sums, out_ref, split: bool) -> None:
    gate, up = sums
    column = out
    if split:
        column = lax.rem(out, jnp.full_like(out, 8)) * (plan.outputs // 8) + lax.div(out, jnp.full_like(out, 8))
    store(plan, rows, out, (gate * jax.nn.sigmoid(gate) * up), out_ref, column)


def weighted_store(weights_ref, plan: Plan, rows: Rows, out, sums, out_ref, split: bool) -> None:
    del split
    of = jnp.where(rows.pair < plan.pairs, rows.pair, 0)
    width = plan.per_row + plan.shared
    shared = rows.pair - plan.pairs
    here = lax.div(of, jnp.full_like(of, plan.per_row)) * width + lax.rem(of, jnp.full_like(of, plan.per_row))
    there = lax.rem(shared, jnp.full_like(of, plan.rows)) * width + plan.per_row + lax.div(shared, jnp.full_like(of, plan.rows))
    at = jnp.where(rows.pair < plan.pairs, here, there)
    weight = plt.load(weights_ref.at[at], mask=rows.live, other=0)
    store(plan, rows, out, sums[0] * weight[:, None], out_ref, out)


def store(plan: Plan, rows: Rows, out, y, out_ref, column) -> None:
    mask = rows.live[:, None]
    real = inside(out, plan.outputs, plan.tiles.outputs)
    mask = jnp.broadcast_to(mask if real is None else mask & real[None], y.shape)
    plt.store(out_ref.at[rows.pair[:, None], column[None]], y.astype(out_ref.dtype), mask=mask)


def run(plan: Plan, refs, parts: int, finish: Callable) -> None:
    refs, out_ref = list(refs[:-1]), refs[-1]
    x_ref = refs.pop(0) if plan.packing is None or plan.shared else None
    words_ref = refs.pop(0) if plan.packing is not None else None
    block_refs = [refs.pop(0) for _ in range(1 if plan.direct else 2)]
    w_refs = [refs.pop(0) for _ in range(1 if plan.packing is None else 3 if plan.packing.format == "nvfp4" else 2)]
    out = pl.program_id(0) * plan.tiles.outputs + jnp.arange(plan.tiles.outputs, dtype=jnp.int32)
    block = pl.program_id(1)

    def row_of(pair):
        """Where a pair's input is: x has one for all of a row's pairs, h one for each."""
        if parts == 1:
            return pair
        return lax.div(pair, jnp.full_like(pair, plan.per_row))

    def routed(block):
        rows = routed_rows(plan, block, w_refs[0].shape[0], block_refs)

        @pl.when(rows.some)
        def _():
            row = row_of(rows.pair)
            if plan.packing is None:
                sums = array_product(plan, plan.tiles.depth, x_ref, row, rows.live, w_refs[0], rows.expert, out, parts)
            else:
                sums = packed_product(plan, words_ref, row, rows.live, w_refs, rows.expert, out, parts)
            finish(plan, rows, out, sums, out_ref, plan.split_out)

    if not plan.shared:
        routed(block)
        return
    shared_blocks = plan.shared * plan.row_blocks

    @pl.when(block < shared_blocks)
    def _():
        rows = shared_rows(plan, block)
        row = rows.pair
        if parts == 2:
            row = lax.rem(row - plan.pairs, jnp.full_like(row, plan.rows))
        depth = plan.tiles.depth if plan.packing is None else plan.tiles.shared_depth
        sums = array_product(plan, depth, x_ref, row, rows.live, refs[0], rows.expert, out, parts)
        finish(plan, rows, out, sums, out_ref, False)

    @pl.when(block >= shared_blocks)
    def _():
        routed(block - shared_blocks)


def launch(kernel, plan: Plan, rows, blocks, w, shared_w, weights, implementation, dtype) -> jax.Array:
    """One kernel over the shared blocks and the routed ones: [pairs and shared pairs, outputs]."""
    packed = [] if not isinstance(w, FP4) else [a for a in (w.codes, w.scales, w.expert_scale) if a is not None]
    operands = [*rows, *blocks, *(packed or [w]), *(a for a in (shared_w, weights) if a is not None)]
    count = plan.pairs if plan.direct else blocks[0].shape[1]
    call = dispatch.pallas_call(
        functools.partial(kernel, plan=plan),
        op="moe",
        implementation=implementation,
        grid=(pl.cdiv(plan.outputs, plan.tiles.outputs), plan.shared * plan.row_blocks + count),
        out_shape=jax.ShapeDtypeStruct((plan.pairs + plan.shared * plan.rows, plan.outputs), dtype),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    return call(*operands)


def choose_tiles(up: bool, rows: int, pairs: int, experts: int, packed: bool, itemsize: int, where: dispatch.Target) -> Tiles:
    if packed:
        return Tiles(16, 64, 256, 4, 3)
    return Tiles(16, 32, 256, 4, 3)


def moe_triton(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w13: jax.Array | FP4,
    w2: jax.Array | FP4,
    shared_w13: jax.Array | None,
    shared_w2: jax.Array | None,
    valid: jax.Array | None,
    implementation: dispatch.Implementation,
) -> jax.Array:
    """The kernels' calls; shapes as in the reference."""
    (rows, hidden), per_row, (experts, _, width, _) = x.shape, ids.shape[1], w13.shape
    shared = 0 if shared_w13 is None else shared_w13.shape[0]
    where = dispatch.target()
    ptx = implementation == "triton" and where.platform == "cuda" and x.dtype == jnp.bfloat16
    capability = where.capability if ptx else 0
    pick = functools.partial(choose_tiles, rows=rows, pairs=rows * per_row, experts=experts, itemsize=x.dtype.itemsize, where=where)

    def plan(up: bool, w) -> Plan:
        packed = isinstance(w, FP4)
        return Plan(
            tiles=pick(up, packed=packed),
            rows=rows,
            per_row=per_row,
            inputs=hidden if up else width,
            outputs=width if up else hidden,
            shared=shared,
            direct=rows == 1,
            packing=unpack.Packing(w.format, capability) if packed else None,
            split_out=up and isinstance(w2, FP4),
        )

    up, down = plan(True, w13), plan(False, w2)
    blocks = (ids,) if up.direct else make_blocks(ids, experts, valid, up.tiles.rows)
    inputs = [*([x] if up.packing is None or shared else []), *([unpack.split_columns(x)] if up.packing else [])]
    h = launch(up_kernel, up, inputs, blocks, w13, shared_w13, None, implementation, x.dtype)
    split = h.reshape(h.shape[0], VALUES_A_WORD, -1) if down.packing else None
    inputs = [*([h] if down.packing is None or shared else []), *([split] if down.packing else [])]
    y = launch(down_kernel, down, inputs, blocks, w2, shared_w2, weights.reshape(-1), implementation, jnp.float32)
    return add_up(y, ids, experts, shared, valid).astype(x.dtype)


def add_up(y: jax.Array, ids: jax.Array, experts: int, shared: int, valid: jax.Array | None) -> jax.Array:
    """The sum of each row's weighted pairs, in order. What no program wrote is left out."""
    rows, per_row = ids.shape
    each = y[: rows * per_row].reshape(rows, per_row, -1)
    hit = (ids >= 0) & (ids < experts)
    total = jnp.zeros(each[:, 0].shape, jnp.float32)
    for a in range(per_row):
        total = total + jnp.where(hit[:, a, None], each[:, a], 0.0)
    for s in range(shared):
        total = total + y[rows * per_row + s * rows :][:rows]
    return total if valid is None else jnp.where(valid[:, None], total, 0.0)
