"""Two launches: rows through w13 and SwiGLU, then through w2, weighted; a sum over each row's experts follows.

A row and one of its experts make a pair. Pairs are sorted by expert and cut into blocks of `Tiles.rows` that share one
(`blocks.py`); a program multiplies one block with some rows of its expert's weights. So an expert that is hit is read
once by as many rows as a tile holds, one that is not hit is not read, and nothing is larger than rows x experts a row.
The shared experts' rows are blocks of the same launches. Few rows (decode) differ from many (prefill) in the tiles
alone. The rows of a tile do not meet, and the order of K is that of the tiles: a row's result is bitwise the same
whatever else is in the batch.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _dispatch as dispatch
from pallas_kernels._flash import divide, dot_transposed, remainder
from pallas_kernels.fp4 import FP4, VALUES_A_WORD
from pallas_kernels.moe.blocks import is_hit, make_blocks
from pallas_kernels.moe.tiles import Tiles, choose_tiles, shared_tiles
from pallas_kernels.moe.unpack import Packing, split_columns


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a kernel knows before it runs.

    The pairs of the shared experts follow the routed ones: pair `pairs + s * rows + m` is row m with shared expert s.
    """

    tiles: Tiles
    shared_tiles: Tiles  # the same outputs, warps and stages
    up: bool  # x through w13 and SwiGLU; otherwise that through w2, weighted
    rows: int
    per_row: int
    shared: int
    inputs: int
    outputs: int
    packing: Packing | None  # of the routed experts; None where they are arrays
    split: bool  # routed outputs in the order in which packed weights multiply them

    @property
    def pairs(self) -> int:
        return self.rows * self.per_row

    @property
    def all_pairs(self) -> int:
        return self.pairs + self.shared * self.rows

    @property
    def direct(self) -> bool:
        """One row: its pairs are the blocks."""
        return self.rows == 1

    @property
    def parts(self) -> int:
        return 2 if self.up else 1

    @property
    def row_blocks(self) -> int:
        """Blocks of one shared expert, whose rows are all."""
        return pl.cdiv(self.rows, self.shared_tiles.rows)

    def operands(self) -> tuple[int, ...]:
        """How many refs each of these has: plain inputs, split inputs, blocks, experts, shared experts, weights."""
        packed = self.packing is not None
        experts = 1 if self.packing is None else 3 if self.packing.format == "nvfp4" else 2
        shared = int(self.shared > 0)
        return int(not packed or shared), int(packed), 1 if self.direct else 2, experts, shared, int(not self.up)


class Lanes(NamedTuple):
    """The pairs of a program's tile, which of them are real, their expert, and whether there is any."""

    pair: jax.Array
    live: jax.Array
    expert: jax.Array
    some: jax.Array | bool

    @classmethod
    def of(cls, plan: Plan, pair, live, expert, some) -> "Lanes":
        """Where a lane is not real its pair is past all others: a masked store may write the old value back."""
        lane = jnp.arange(live.shape[0], dtype=jnp.int32)
        return cls(jnp.where(live, pair, plan.all_pairs + lane), live, expert, some)


def routed_lanes(plan: Plan, block: jax.Array, experts: int, block_refs: list) -> Lanes:
    lane = jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    if plan.direct:
        expert = block_refs[0][0, block]
        some = (expert >= 0) & (expert < experts)
        return Lanes.of(plan, block, lane < some.astype(jnp.int32), expert, some)
    table_ref, order_ref = block_refs
    first, end = table_ref[1, block], table_ref[2, block]
    live = first + lane < end
    pair = plt.load(order_ref.at[first + lane], mask=live, other=0)
    return Lanes.of(plan, pair, live, table_ref[0, block], first < end)


def shared_lanes(plan: Plan, block: jax.Array) -> Lanes:
    expert = divide(block, plan.row_blocks)
    lane = jnp.arange(plan.shared_tiles.rows, dtype=jnp.int32)
    row = remainder(block, plan.row_blocks) * plan.shared_tiles.rows + lane
    return Lanes.of(plan, plan.pairs + expert * plan.rows + row, row < plan.rows, expert, True)


def inside(index: jax.Array, size: int, tile: int) -> jax.Array | None:
    """The mask of an index; None where the tiles divide the size."""
    return None if size % tile == 0 else index < size


def load(ref, at: tuple, rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """The tile [R, C] at indices that broadcast to it, with zeros where a mask of its rows or columns says no."""
    if rows is None and columns is None:
        return plt.load(ref.at[at])
    rows = jnp.bool_(True) if rows is None else rows[:, None]
    columns = jnp.bool_(True) if columns is None else columns[None]
    mask = jnp.broadcast_to(rows & columns, jnp.broadcast_shapes(*map(jnp.shape, at)))
    return plt.load(ref.at[at], mask=mask, other=0)


def dot(tiles: Tiles, x: jax.Array, w: jax.Array) -> jax.Array:
    return dot_transposed(w, x) if tiles.weights_first else dot_transposed(x, w)


def start(plan: Plan, tiles: Tiles) -> tuple[jax.Array, ...]:
    shape = (tiles.outputs, tiles.rows) if tiles.weights_first else (tiles.rows, tiles.outputs)
    return (jnp.zeros(shape, jnp.float32),) * plan.parts


def finish(tiles: Tiles, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(s.T for s in sums) if tiles.weights_first else sums


def array_product(plan: Plan, tiles: Tiles, x_ref, row, live, w_ref, expert, out) -> tuple[jax.Array, ...]:
    """x[row] times rows `out` of the expert's gate and up, or of its w2: float32 [rows, outputs]."""
    depth, real = tiles.depth, inside(out, plan.outputs, tiles.outputs)

    def body(i, sums):
        k = i * depth + jnp.arange(depth, dtype=jnp.int32)
        cut = inside(k, plan.inputs, depth)
        x = load(x_ref, (row[:, None], k[None]), live, cut)
        weights = [load(w_ref, (expert, p, out[:, None], k[None]), real, cut) for p in range(plan.parts)]
        return tuple(s + dot(tiles, x, w) for s, w in zip(sums, weights, strict=True))

    return finish(tiles, lax.fori_loop(0, pl.cdiv(plan.inputs, depth), body, start(plan, tiles)))


def packed_product(plan: Plan, packing: Packing, x_ref, row, live, w_refs, expert, out) -> tuple[jax.Array, ...]:
    """The same with packed weights; x as `split_columns` gives it.

    Each step loads the next one's scales and hands them on. Loaded in their own step, one-byte arrays would make Triton
    lay out both operands four columns to a thread, for which x has to be moved about in registers.
    """
    codes_ref, scales_ref = w_refs[:2]
    tiles, real = plan.tiles, inside(out, plan.outputs, plan.tiles.outputs)
    words, blocks = tiles.depth // VALUES_A_WORD, tiles.depth // packing.block
    dtype = jnp.bfloat16 if x_ref.dtype == jnp.bfloat16 else jnp.float32

    def by_part(ref, k, cut):
        return tuple(load(ref, (expert, p, out[:, None], k[None]), real, cut) for p in range(plan.parts))

    def load_scales(i):
        k = i * blocks + jnp.arange(blocks, dtype=jnp.int32)
        return by_part(scales_ref, k, k < plan.inputs // packing.block)

    def body(i, state):
        sums, bits = state
        word = i * words + jnp.arange(words, dtype=jnp.int32)
        cut = inside(word, plan.inputs // VALUES_A_WORD, words)
        codes, scales = by_part(codes_ref, word, cut), [packing.spread(b, words, dtype) for b in bits]
        bits = load_scales(i + 1)
        for t in range(VALUES_A_WORD):
            x = load(x_ref, (row[:, None], t, word[None]), live, cut).astype(dtype)
            sums = tuple(s + dot(tiles, x, packing.value(codes[p], scales[p], t)) for p, s in enumerate(sums))
        return sums, bits

    state = start(plan, tiles), load_scales(0)
    sums, _ = lax.fori_loop(0, pl.cdiv(plan.inputs, tiles.depth), body, state)
    factor = packing.factor * (w_refs[2][expert] if packing.format == "nvfp4" else 1.0)
    return tuple(s * factor for s in finish(tiles, sums))


def expert_kernel(*refs, plan: Plan):
    """refs: as `Plan.operands` counts them, then the output [all pairs, outputs]."""
    taken, groups = 0, []
    for count in plan.operands():
        groups.append(list(refs[taken : taken + count]))
        taken += count
    plain, words, block_refs, w_refs, shared, weights = groups
    out = pl.program_id(0) * plan.tiles.outputs + jnp.arange(plan.tiles.outputs, dtype=jnp.int32)
    block, shared_blocks = pl.program_id(1), plan.shared * plan.row_blocks

    def routed():
        own = routed_lanes(plan, block - shared_blocks, w_refs[0].shape[0], block_refs)
        row, column = divide(own.pair, plan.per_row), remainder(own.pair, plan.per_row)
        source = row if plan.up else own.pair

        @pl.when(own.some)
        def _():
            if plan.packing is None:
                sums = array_product(plan, plan.tiles, plain[0], source, own.live, w_refs[0], own.expert, out)
            else:
                sums = packed_product(plan, plan.packing, words[0], source, own.live, w_refs, own.expert, out)
            store(plan, own, out, activate(plan, own, sums, weights, row, column), refs[-1], plan.split)

    if not plan.shared:
        routed()
        return

    @pl.when(block < shared_blocks)
    def _():
        own = shared_lanes(plan, block)
        row, column = remainder(own.pair - plan.pairs, plan.rows), plan.per_row + own.expert
        source = row if plan.up else own.pair
        sums = array_product(plan, plan.shared_tiles, plain[0], source, own.live, shared[0], own.expert, out)
        store(plan, own, out, activate(plan, own, sums, weights, row, column), refs[-1], False)

    pl.when(block >= shared_blocks)(routed)


def activate(plan: Plan, own: Lanes, sums: tuple[jax.Array, ...], weights: list, row, column) -> jax.Array:
    """SwiGLU of gate and up; or the output times the weight of its row's expert."""
    if plan.up:
        gate, up = sums
        return gate * jax.nn.sigmoid(gate) * up
    return sums[0] * plt.load(weights[0].at[row, column], mask=own.live, other=0)[:, None]


def store(plan: Plan, own: Lanes, out, y, out_ref, split: bool) -> None:
    real = inside(out, plan.outputs, plan.tiles.outputs)
    mask = own.live[:, None] if real is None else own.live[:, None] & real[None]
    place = remainder(out, VALUES_A_WORD) * (plan.outputs // VALUES_A_WORD) + divide(out, VALUES_A_WORD)
    at = own.pair[:, None], (place if split else out)[None]
    plt.store(out_ref.at[at], y.astype(out_ref.dtype), mask=jnp.broadcast_to(mask, y.shape))


def launch(plan: Plan, x, blocks: tuple, w, shared_w, weights, implementation: dispatch.Implementation) -> jax.Array:
    """One kernel over the shared experts' blocks and the routed ones: [all pairs, outputs]."""
    by_part = lambda a: a.reshape(a.shape[0], plan.parts, *a.shape[-2:])  # noqa: E731
    if isinstance(w, FP4):
        experts = [by_part(w.codes), by_part(w.scales), *([] if w.expert_scale is None else [w.expert_scale])]
    else:
        experts = [by_part(w)]
    inputs = [x] if plan.packing is None or plan.shared else []
    if plan.packing is not None:  # a row of x is in the order of its columns, a row of h has been stored split
        inputs.append(split_columns(x) if plan.up else x.reshape(x.shape[0], VALUES_A_WORD, -1))
    rest = ([by_part(shared_w)] if plan.shared else []) + ([] if plan.up else [weights])
    call = dispatch.pallas_call(
        functools.partial(expert_kernel, plan=plan),
        op="moe",
        implementation=implementation,
        grid=(pl.cdiv(plan.outputs, plan.tiles.outputs), plan.shared * plan.row_blocks + blocks[0].shape[1]),
        out_shape=jax.ShapeDtypeStruct((plan.all_pairs, plan.outputs), x.dtype if plan.up else jnp.float32),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    return call(*inputs, *blocks, *experts, *rest)


def make_plan(up: bool, x, ids, w, w2, shared: int, implementation: dispatch.Implementation) -> Plan:
    where, packed = dispatch.target(), isinstance(w, FP4)
    capability = where.capability if implementation == "triton" and x.dtype == jnp.bfloat16 else 0
    itemsize = 4 if packed and x.dtype == jnp.float16 else x.dtype.itemsize
    tiles = choose_tiles(up, ids.size, w.shape[0], packed, itemsize, where)
    return Plan(
        tiles=tiles,
        shared_tiles=shared_tiles(tiles, x.shape[0], packed),
        up=up,
        rows=x.shape[0],
        per_row=ids.shape[1],
        shared=shared,
        inputs=w.shape[-1],
        outputs=w.shape[-2],
        packing=Packing(w.format, capability) if packed else None,
        split=up and isinstance(w2, FP4),
    )


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
    experts, shared = w13.shape[0], 0 if shared_w13 is None else shared_w13.shape[0]
    up, down = (make_plan(u, x, ids, w, w2, shared, implementation) for u, w in ((True, w13), (False, w2)))
    hit = is_hit(ids, experts, valid)

    def blocks(plan: Plan) -> tuple[jax.Array, ...]:
        return (ids,) if plan.direct else make_blocks(ids, valid, experts, plan.tiles.rows, implementation)

    by_expert = blocks(up)
    h = launch(up, x, by_expert, w13, shared_w13, None, implementation)
    by_expert = by_expert if down.tiles.rows == up.tiles.rows else blocks(down)
    y = launch(down, h, by_expert, w2, shared_w2, weights, implementation)
    return add_up(y, hit, shared, valid).astype(x.dtype)


def add_up(y: jax.Array, hit: jax.Array, shared: int, valid: jax.Array | None) -> jax.Array:
    """The sum of each row's weighted pairs, in order. What no program wrote is left out."""
    (rows, per_row), hidden = hit.shape, y.shape[1]
    routed = y[: hit.size].reshape(rows, per_row, hidden)
    beside = y[hit.size :].reshape(shared, rows, hidden)
    total = jnp.zeros((rows, hidden), jnp.float32)
    for a in range(per_row):
        total = total + jnp.where(hit[:, a, None], routed[:, a], 0.0)
    for s in range(shared):
        total = total + beside[s]
    return total if valid is None else jnp.where(valid[:, None], total, 0.0)
