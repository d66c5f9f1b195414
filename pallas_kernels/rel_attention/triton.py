"""rel_attention on Pallas' Triton backend: flash attention over cached pages and new rows, with a skewed bias.

A program holds one KV head and a tile of query rows, the heads of the group side by side for each new row, so that a
tile covers few positions and wastes little at the edges of a window. It walks the cached keys before `start` and then
the new ones; for each, blocks wholly beyond the extent run in a loop of their own without bias and causal mask.

The bias of a tile lies on diagonals of the relative logits, which a kernel cannot gather in registers, and reading it
two bytes at a time costs twice the matrix products. So a first, small kernel writes it out as the attention will read
it: for each tile of rows, its `near_blocks` blocks of keys, each [tile rows, block] numbers side by side, in powers of
two (times tau and log2 e). What a row may not see, the future and what lies beyond the window, is -inf in them, so that
those blocks need no mask. That is rows x heads x (extent + 2 blocks) numbers, never rows x context; float16 for 16-bit
inputs, three bits finer than bfloat16.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _dispatch as dispatch
from pallas_kernels import _flash as flash
from pallas_kernels._flash import divide, divide_up, remainder

MOST_UNROLLED = 6  # blocks of one program of `bias_kernel`
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows (times heads) and keys a tile, and Triton's warps and pipeline stages."""

    rows: int
    block: int
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the kernels know before they run."""

    rows: int
    heads: int
    group: int
    head_dim: int
    page: int  # 0 without pages
    extent: int
    window: int | None
    scale: float
    tau: bool
    tile_rows: int
    block: int

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows * self.group, self.tile_rows)

    @property
    def span(self) -> int:
        """How many new rows one tile can touch."""
        whole = self.tile_rows % self.group == 0
        return self.tile_rows // self.group if whole else (self.tile_rows - 2) // self.group + 2

    @property
    def near_blocks(self) -> int:
        """How many blocks of keys the extents of a tile's rows can touch."""
        return (self.extent + self.span - 2) // self.block + 2

    @property
    def touched_blocks(self) -> int:
        """How many blocks of keys one row's program writes: those of every tile that holds some of its heads."""
        whole = self.tile_rows % self.group == 0
        return self.near_blocks + (0 if whole else pl.cdiv(self.span, self.block))

    @property
    def unrolled(self) -> int:
        """Blocks of one program of `bias_kernel`: evenly spread over as few programs as may be."""
        return pl.cdiv(self.touched_blocks, pl.cdiv(self.touched_blocks, MOST_UNROLLED))


def choose_tiles(head_dim: int, itemsize: int, where: dispatch.Target) -> Tiles:
    """The largest key block whose pipeline fits the card's shared memory beside the queries.

    Where the matrix units read shared memory (sm_90, sm_100) blocks of 64 keys; elsewhere they would spill registers.
    """
    rows, block, stages = (128, 64, 3) if where.arch in ("sm_90", "sm_100", "sm_103") else (128, 32, 2)
    row_bytes = dispatch.next_power_of_2(head_dim) * itemsize
    if where.platform == "rocm":
        rows, stages = 64, 1
    if itemsize > 2 or head_dim > 128:
        rows, block, stages = rows // 2, 32, min(stages, 2)
    while block > 16 and (2 * block * stages + rows) * row_bytes > where.shared_memory * 0.8 > 0:
        block //= 2
    return Tiles(rows, block, 4 if where.platform == "rocm" else 8, stages)


def oldest_row(plan: Plan, tile):
    """The first of the new rows that a tile holds."""
    return divide(tile * plan.tile_rows, plan.group)


def first_block(plan: Plan, tile):
    """The first block of keys, counted from the first new row, in the extent of the tile's rows."""
    lift = pl.cdiv(plan.extent, plan.block)  # keeps the division on positive numbers
    return divide(oldest_row(plan, tile) + (lift * plan.block - plan.extent + 1), plan.block) - lift


def bias_kernel(start_ref, count_ref, *refs, plan: Plan, project: bool):
    """The bias of all heads of one row against some blocks of keys, each head's in the tile that holds it."""
    sequence, t, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tau_ref, out_ref = refs[0] if plan.tau else None, refs[-1]
    sources = refs[plan.tau : -1]
    head = jnp.arange(max(16, dispatch.next_power_of_2(plan.heads)), dtype=jnp.int32)
    real = (head < plan.heads)[:, None]
    flat = t * plan.group + remainder(head, plan.group)
    tile = divide(flat, plan.tile_rows)
    place = sequence, divide(head, plan.group)[:, None], tile[:, None]
    first = first_block(plan, tile)[:, None]
    column = jnp.arange(plan.block, dtype=jnp.int32)

    @pl.when(t < count_ref[sequence])
    def _():
        factor = flash.LOG2E
        if tau_ref is not None:
            factor *= tau_ref[sequence, t].astype(jnp.float32)
        load = load_logits(plan, sources, sequence, t, head, project)
        for i in range(plan.unrolled):
            block = first_block(plan, divide(t * plan.group, plan.tile_rows)) + (part * plan.unrolled + i)
            key = block * plan.block + column
            distance = t - key
            visible = (distance >= 0) & (key + start_ref[sequence] >= 0)
            if plan.window is not None:
                visible &= distance < plan.window
            logits = load(distance) * factor
            if out_ref.dtype == jnp.float16:
                logits = jnp.minimum(logits, FLOAT16_MAX)  # below, -inf is as good
            logits = jnp.where(visible[None, :], logits, -jnp.inf).astype(out_ref.dtype)
            mask = real & (block >= first) & (block < first + plan.near_blocks)
            at = out_ref.at[(*place, block - first, remainder(flat, plan.tile_rows)[:, None], column[None, :])]
            plt.store(at, logits, mask=jnp.broadcast_to(mask, logits.shape))


def load_logits(plan: Plan, sources, sequence, t, head, project: bool):
    """The function that gives the relative logits [heads, distances] of one row, 0 outside the extent."""
    real = (head < plan.heads)[:, None]
    if not project:

        def given(distance):
            inside = real & ((distance >= 0) & (distance < plan.extent))[None, :]
            at = sources[0].at[sequence, t, head[:, None], distance[None, :]]
            return plt.load(at, mask=inside, other=0).astype(jnp.float32)

        return given

    r_ref, proj_ref = sources  # proj_ref is rel_proj transposed: a distance's numbers lie side by side
    rel_dim = r_ref.shape[3]
    wide = jnp.arange(max(16, dispatch.next_power_of_2(rel_dim)), dtype=jnp.int32)
    whole = (wide < rel_dim)[None, :]
    r = plt.load(r_ref.at[sequence, t, head[:, None], wide[None, :]], mask=real & whole, other=0)

    def product(distance):
        inside = ((distance >= 0) & (distance < plan.extent))[:, None] & whole
        return flash.dot_transposed(r, plt.load(proj_ref.at[distance[:, None], wide[None, :]], mask=inside, other=0))

    return product


def attention_kernel(start_ref, count_ref, q_ref, k_ref, v_ref, *refs, plan: Plan):
    """One tile of query rows of one KV head over all its keys. Positions count from the first new row."""
    # The last tiles see the most keys: they start first, so that the card does not wait for them at the end.
    tile, head, sequence = plan.tiles - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
    extra = list(refs[:-1])
    pages = [extra.pop(0) for _ in range(3)] if plan.page else None
    tau_ref = extra.pop(0) if plan.tau else None
    bias_ref = extra.pop(0) if plan.extent else None
    start, count = start_ref[sequence], jnp.minimum(count_ref[sequence], plan.rows)

    flat = tile * plan.tile_rows + jnp.arange(plan.tile_rows, dtype=jnp.int32)
    t = divide(flat, plan.group)
    query_head = head * plan.group + remainder(flat, plan.group)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    real = t < count
    oldest = oldest_row(plan, tile)
    newest = jnp.minimum(divide(tile * plan.tile_rows + (plan.tile_rows - 1), plan.group), count - 1)

    place = (sequence, t[:, None], query_head[:, None], columns[None, :])
    q = plt.load(q_ref.at[place], mask=real[:, None] & (columns < plan.head_dim)[None, :], other=0)
    factor = flash.LOG2E
    if tau_ref is not None:
        factor *= plt.load(tau_ref.at[sequence, t], mask=real, other=1).astype(jnp.float32)[:, None]

    def body(keys, near: bool, i, state):
        block, key, live, k, v = keys(i)
        scores = flash.dot_transposed(q, k) * (plan.scale * factor)
        if near and bias_ref is not None:
            return flash.step(state, scores + load_bias(plan, bias_ref, sequence, head, tile, block), v)
        distance = t[:, None] - key[None, :]
        masks = [distance >= 0] if near else []
        if live is not None:
            masks.append(live[None, :])
        if plan.window is not None:
            masks.append(distance < plan.window)
        visible = flash.every(masks, scores.shape)
        return flash.step(state, scores if visible is None else jnp.where(visible, scores, -jnp.inf), v)

    def both(keys, near_keys, begin, far, end, state):
        """Blocks begin .. far lie beyond the extent of every row, blocks far .. end need bias and masks."""
        if plan.window is None or plan.window > plan.extent:
            state = jax.lax.fori_loop(begin, far, functools.partial(body, keys, False), state)
            begin = far
        return jax.lax.fori_loop(begin, end, functools.partial(body, near_keys, True), state)

    state = flash.start(plan.tile_rows, columns.size)
    alive = oldest <= newest
    if pages is not None:
        reach = start if plan.window is None else jnp.minimum(start, jnp.maximum(plan.window - 1 - oldest, 0))
        end = jnp.where(alive, divide_up(reach, plan.block), 0)
        far = jnp.maximum(end - divide_up(jnp.maximum(plan.extent - 1 - oldest, 0), plan.block), 0)
        keys = functools.partial(cached_block, plan, *pages, sequence, head, start, oldest, end)
        state = both(keys, keys, jnp.int32(0), far, end, state)
    end = jnp.where(alive, divide(jnp.maximum(newest, 0), plan.block) + 1, 0)
    begin = jnp.int32(0)
    if plan.window is not None:
        begin = jnp.minimum(divide(jnp.maximum(oldest - plan.window + 1, 0), plan.block), end)
    far = jnp.clip(divide(jnp.maximum(oldest - plan.extent + 1, 0), plan.block), begin, end)
    keys = functools.partial(new_block, plan, k_ref, v_ref, sequence, head)
    out = flash.finish(both(functools.partial(keys, None), functools.partial(keys, count), begin, far, end, state))
    inside = (t < plan.rows)[:, None] & (columns < plan.head_dim)[None, :]
    out = jnp.where(real[:, None], out, 0.0).astype(refs[-1].dtype)  # a row past the count, read as q = 0, sees keys
    plt.store(refs[-1].at[place], out, mask=inside)


def load_bias(plan: Plan, bias_ref, sequence, head, tile, block):
    """The bias [tile rows, block] of a near block, -inf where a key is invisible."""
    row, column = jnp.arange(plan.tile_rows, dtype=jnp.int32), jnp.arange(plan.block, dtype=jnp.int32)
    at = bias_ref.at[sequence, head, tile, block - first_block(plan, tile), row[:, None], column[None, :]]
    return plt.load(at).astype(jnp.float32)


def new_block(plan: Plan, k_ref, v_ref, sequence, head, count, i):
    """Block, positions, keys and values of a block of new rows; those past `count` are zeros, whatever they hold."""
    key = i * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    masks = [(columns < plan.head_dim)[None, :]] if columns.size != plan.head_dim else []
    if count is not None:
        masks.append((key < count)[:, None])
    mask = flash.every(masks, (plan.block, columns.size))
    at = (sequence, key[:, None], head, columns[None, :])
    other = None if mask is None else 0
    return i, key, None, plt.load(k_ref.at[at], mask=mask, other=other), plt.load(v_ref.at[at], mask=mask, other=other)


def cached_block(plan: Plan, k_ref, v_ref, table_ref, sequence, head, start, oldest, blocks, i):
    """The same for block i of `blocks` that end where the new rows begin, of what row `oldest` sees and later ones."""
    key = (i - blocks) * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    position = key + start
    live = position >= 0
    if plan.window is not None:
        live &= key > oldest - plan.window
    position = jnp.maximum(position, 0)
    page = plt.load(table_ref.at[sequence, divide(position, plan.page)], mask=live, other=0)
    mask = jnp.broadcast_to(live[:, None] & (columns < plan.head_dim)[None, :], (plan.block, columns.size))
    at = (page[:, None], head, remainder(position, plan.page)[:, None], columns[None, :])
    return i - blocks, key, live, plt.load(k_ref.at[at], mask=mask, other=0), plt.load(v_ref.at[at], mask=mask, other=0)


def run(
    q, k, v, *, k_pages, v_pages, page_table, start, count, rel_logits, r, rel_proj, tau, scale, extent, window,
    implementation, tiles: Tiles | None = None,
):  # fmt: skip
    """The arguments of the public function, checked; `tiles` None chooses for the card."""
    batch, rows, heads, head_dim = q.shape
    tiles = tiles or choose_tiles(head_dim, q.dtype.itemsize, dispatch.target())
    biased = extent > 0 and (rel_logits is not None or r is not None)
    plan = Plan(
        rows, heads, heads // k.shape[2], head_dim, 0 if k_pages is None else k_pages.shape[2],
        extent if biased else 0, window, scale, tau is not None, tiles.rows, tiles.block,
    )  # fmt: skip
    call = functools.partial(dispatch.pallas_call, op="rel_attention", implementation=implementation)
    bias = None
    if biased:
        sources = [start, count, tau, *((rel_logits,) if r is None else (r, rel_proj.T))]
        bias = call(
            functools.partial(bias_kernel, plan=plan, project=r is not None),
            grid=(batch, rows, pl.cdiv(plan.touched_blocks, plan.unrolled)),
            out_shape=jax.ShapeDtypeStruct(
                (batch, heads // plan.group, plan.tiles, plan.near_blocks, plan.tile_rows, plan.block),
                jnp.float32 if q.dtype == jnp.float32 else jnp.float16,
            ),
            threads=128,
        )(*(x for x in sources if x is not None))
    operands = [start, count, q, k, v, k_pages, v_pages, page_table, tau, bias]
    return call(
        functools.partial(attention_kernel, plan=plan),
        grid=(plan.tiles, k.shape[2], batch),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(*(x for x in operands if x is not None))
