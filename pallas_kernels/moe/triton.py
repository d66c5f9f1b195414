"""Two launches: rows through w13 and SwiGLU, then through w2, weighted; a sum over each row's experts follows.

A row and one of its experts make a pair. Pairs are sorted by expert and cut into blocks of `Tiles.rows` that share one
(`blocks.py`); a program multiplies one block with some rows of its expert's weights. So an expert that is hit is read
once by as many rows as a tile holds, one that is not hit is not read, and nothing is larger than rows x experts a row.
The shared experts' rows are blocks of the same launches. Few rows (decode) differ from many (prefill) in the tiles
alone. The rows of a tile do not meet, and the order of K is that of the tiles: a row's result is bitwise the same
whatever else is in the batch.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _dispatch as dispatch
from pallas_kernels._flash import divide, dot_transposed, every, remainder
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
    blocks: int  # the shared experts', then the routed ones'

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
    def columns(self) -> int:
        """Tiles of outputs."""
        return pl.cdiv(self.outputs, self.tiles.outputs)

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


class Block(NamedTuple):
    """What the pairs of a program share: their expert, where they begin in the order of pairs, how many there are."""

    expert: jax.Array
    first: jax.Array
    count: jax.Array


class Lanes(NamedTuple):
    """A block's pairs: which of them are real, their rows of x, and where those have the pairs' weights."""

    pair: jax.Array
    live: jax.Array
    row: jax.Array
    column: jax.Array


def routed_block(plan: Plan, block: jax.Array, experts: int, block_refs: list) -> Block:
    if not plan.direct:
        expert, first, end = (block_refs[0][i, block] for i in range(3))
        return Block(expert, first, end - first)
    expert = block_refs[0][0, block]
    return Block(expert, block, ((expert >= 0) & (expert < experts)).astype(jnp.int32))


def shared_block(plan: Plan, block: jax.Array) -> Block:
    expert = divide(block, plan.row_blocks)
    row = remainder(block, plan.row_blocks) * plan.shared_tiles.rows
    return Block(expert, plan.pairs + expert * plan.rows + row, plan.rows - row)


def routed_lanes(plan: Plan, own: Block, block_refs: list) -> Lanes:
    lane = jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    live, pair = lane < own.count, own.first + lane
    if not plan.direct:
        pair = plt.load(block_refs[1].at[pair], mask=live, other=0)
    pair = past_all(plan, pair, live, lane)
    return Lanes(pair, live, divide(pair, plan.per_row), remainder(pair, plan.per_row))


def shared_lanes(plan: Plan, own: Block) -> Lanes:
    lane = jnp.arange(plan.shared_tiles.rows, dtype=jnp.int32)
    live, pair = lane < own.count, own.first + lane
    row = remainder(pair - plan.pairs, plan.rows)
    return Lanes(past_all(plan, pair, live, lane), live, row, plan.per_row + own.expert)


def past_all(plan: Plan, pair: jax.Array, live: jax.Array, lane: jax.Array) -> jax.Array:
    """Pairs, past all others where they are not real: a masked store may write the old value back."""
    return jnp.where(live, pair, plan.all_pairs + lane)


def inside(index: jax.Array, size: int, tile: int) -> jax.Array | None:
    """The mask of an index; None where the tiles divide the size."""
    return None if size % tile == 0 else index < size


def load(ref, at: tuple, *masks: jax.Array | None) -> jax.Array:
    """The tile at indices that broadcast to it, with zeros where a mask, which broadcasts too, says no."""
    mask = every([m for m in masks if m is not None], jnp.broadcast_shapes(*map(jnp.shape, at)))
    return plt.load(ref.at[at]) if mask is None else plt.load(ref.at[at], mask=mask, other=0)


def dot(tiles: Tiles, x: jax.Array, w: jax.Array) -> jax.Array:
    return dot_transposed(w, x) if tiles.weights_first else dot_transposed(x, w)


def start(plan: Plan, tiles: Tiles) -> jax.Array:
    outputs = plan.parts * tiles.outputs
    return jnp.zeros((outputs, tiles.rows) if tiles.weights_first else (tiles.rows, outputs), jnp.float32)


def source(plan: Plan, own: Lanes) -> jax.Array:
    """Rows of the input: those of x, or of h, which has one for each pair."""
    return own.row if plan.up else own.pair


def weight_rows(plan: Plan, tiles: Tiles, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of the weights that a program multiplies by, (gate or up, output): an output's gate and up are neighbours.

    So both are one product, as wide as the widest that Hopper has, and lie in one thread when it is over.
    """
    row = jnp.arange(plan.parts * tiles.outputs, dtype=jnp.int32)
    return remainder(row, plan.parts)[:, None], first + divide(row, plan.parts)[:, None]


def array_product(plan: Plan, tiles: Tiles, x_ref, own: Lanes, w_ref, expert, first) -> jax.Array:
    """Rows of x times `weight_rows` of the expert's w13 or w2: float32 [rows, parts x outputs]."""
    part, out = weight_rows(plan, tiles, first)
    row, live, real = source(plan, own)[:, None], own.live[:, None], inside(out, plan.outputs, tiles.outputs)

    def body(i, sums):
        k = i * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)[None]
        cut = inside(k, plan.inputs, tiles.depth)
        return sums + dot(tiles, load(x_ref, (row, k), live, cut), load(w_ref, (expert, part, out, k), real, cut))

    sums = lax.fori_loop(0, pl.cdiv(plan.inputs, tiles.depth), body, start(plan, tiles))
    return sums.T if tiles.weights_first else sums


def packed_product(plan: Plan, packing: Packing, x_ref, own: Lanes, w_refs, expert, first) -> jax.Array:
    """The same with packed weights; x as `split_columns` gives it.

    Each step loads the next one's scales and hands them on. Loaded in their own step, one-byte arrays would make Triton
    lay out both operands four columns to a thread, for which x has to be moved about in registers.
    """
    codes_ref, scales_ref = w_refs[:2]
    tiles, (part, out) = plan.tiles, weight_rows(plan, plan.tiles, first)
    row, live, real = source(plan, own)[:, None], own.live[:, None], inside(out, plan.outputs, tiles.outputs)
    words, blocks = tiles.depth // VALUES_A_WORD, tiles.depth // packing.block
    dtype = jnp.bfloat16 if x_ref.dtype == jnp.bfloat16 else jnp.float32

    def load_scales(i):
        k = i * blocks + jnp.arange(blocks, dtype=jnp.int32)[None]
        return load(scales_ref, (expert, part, out, k), real, k < plan.inputs // packing.block)

    def body(i, state):
        sums, bits = state
        word = i * words + jnp.arange(words, dtype=jnp.int32)[None]
        cut = inside(word, plan.inputs // VALUES_A_WORD, words)
        codes, scales = load(codes_ref, (expert, part, out, word), real, cut), packing.spread(bits, words, dtype)
        bits = load_scales(i + 1)
        for t in range(VALUES_A_WORD):
            x = load(x_ref, (row, t, word), live, cut).astype(dtype)
            sums += dot(tiles, x, packing.value(codes, scales, t))
        return sums, bits

    state = start(plan, tiles), load_scales(0)
    sums, _ = lax.fori_loop(0, pl.cdiv(plan.inputs, tiles.depth), body, state)
    sums *= packing.factor * (w_refs[2][expert] if packing.format == "nvfp4" else 1.0)
    return sums.T if tiles.weights_first else sums


def expert_kernel(*refs, plan: Plan):
    """refs: as `Plan.operands` counts them, then the output [all pairs, outputs]."""
    taken, groups = 0, []
    for count in plan.operands():
        groups.append(list(refs[taken : taken + count]))
        taken += count
    plain, words, block_refs, w_refs, shared, weights = groups
    column, block = place(plan)
    first, shared_blocks = column * plan.tiles.outputs, plan.shared * plan.row_blocks

    def routed():
        own = routed_block(plan, block - shared_blocks, w_refs[0].shape[0], block_refs)

        @pl.when(own.count > 0)
        def _():
            lanes = routed_lanes(plan, own, block_refs)
            if plan.packing is None:
                sums = array_product(plan, plan.tiles, plain[0], lanes, w_refs[0], own.expert, first)
            else:
                sums = packed_product(plan, plan.packing, words[0], lanes, w_refs, own.expert, first)
            store(plan, first, weights, refs[-1], lanes, sums, plan.split)

    if not plan.shared:
        routed()
        return

    @pl.when(block < shared_blocks)
    def _():
        own = shared_block(plan, block)
        lanes = shared_lanes(plan, own)
        sums = array_product(plan, plan.shared_tiles, plain[0], lanes, shared[0], own.expert, first)
        store(plan, first, weights, refs[-1], lanes, sums, False)

    pl.when(block >= shared_blocks)(routed)


def place(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """A program's tile of outputs and its block: `Tiles.group` blocks after one another have the same outputs."""
    group, columns, index = plan.tiles.group, plan.columns, pl.program_id(0)
    first = divide(index, group * columns) * group
    size, within = jnp.minimum(plan.blocks - first, group), remainder(index, group * columns)
    return lax.div(within, size), first + lax.rem(within, size)


def activate(sums: jax.Array) -> jax.Array:
    """SwiGLU of gate and up, which are neighbours: [rows, outputs]."""
    pairs = sums.reshape(sums.shape[0], -1, 2)
    is_gate = lax.broadcasted_iota(jnp.int32, pairs.shape, 2) == 0
    gate, up = (jnp.sum(jnp.where(own, pairs, 0.0), axis=2) for own in (is_gate, ~is_gate))
    return gate * jax.nn.sigmoid(gate) * up


def store(plan: Plan, first, weights: list, out_ref, own: Lanes, sums: jax.Array, split: bool) -> None:
    """SwiGLU of gate and up; or the output times the weight of its row's expert."""
    if plan.up:
        y = activate(sums)
    else:
        y = sums * plt.load(weights[0].at[own.row, own.column], mask=own.live, other=0)[:, None]
    out = first + jnp.arange(plan.tiles.outputs, dtype=jnp.int32)
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
    plan = replace(plan, blocks=plan.shared * plan.row_blocks + blocks[0].shape[1])
    call = dispatch.pallas_call(
        functools.partial(expert_kernel, plan=plan),
        op="moe",
        implementation=implementation,
        grid=(plan.columns * plan.blocks,),
        out_shape=jax.ShapeDtypeStruct((plan.all_pairs, plan.outputs), x.dtype if plan.up else jnp.float32),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    return call(*inputs, *blocks, *experts, *rest)


def make_plan(
    up: bool, x, ids, w, w2, shared: int, elsewhere: int, implementation: dispatch.Implementation, tiles: Tiles | None
) -> Plan:
    where, packed = dispatch.target(), isinstance(w, FP4)
    capability = where.capability if implementation == "triton" and x.dtype == jnp.bfloat16 else 0
    itemsize = 4 if packed and x.dtype == jnp.float16 else x.dtype.itemsize
    tiles = tiles or choose_tiles(up, x.shape[0], ids.size, w.shape[0] + elsewhere, packed, itemsize, where)
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
        blocks=0,
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
    elsewhere: int,
    implementation: dispatch.Implementation,
    tiles: tuple[Tiles | None, Tiles | None] = (None, None),
) -> jax.Array:
    """The kernels' calls; shapes as in the reference. `tiles` of the two launches; None chooses for the card."""
    experts, shared = w13.shape[0], 0 if shared_w13 is None else shared_w13.shape[0]
    up = make_plan(True, x, ids, w13, w2, shared, elsewhere, implementation, tiles[0])
    down = make_plan(False, x, ids, w2, w2, shared, elsewhere, implementation, tiles[1])
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
