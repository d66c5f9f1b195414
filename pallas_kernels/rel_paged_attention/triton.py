"""rel_paged_attention on Pallas' Triton backend: one program a chunk of a sequence's context, then a combine.

A program holds the query rows of one KV head (heads of the group times new rows, padded to 16 for the matrix units) and
walks its chunk block by block. Blocks beyond the extent need neither bias nor causal mask: a loop of their own.

The bias is one more matrix product. With rel_proj transposed and flattened, the logits of key p for the query rows at
positions b, b+1, ... lie at `flat[(b - p) * R + j]`, j = 0 .. rows * R: a contiguous run, loaded 16 bytes at a time
like the key itself, and multiplied by r laid out block-diagonally by row. Its bounds are the extent's: what falls
outside the array is the bias 0.

The chunks begin at multiples of a size that depends on the table's capacity, the window and the heads, never on the
batch, on other sequences' lengths or on how many rows are new, and the combine takes them in order; products are the
matrix units' narrow ones whatever the tile, and sums over keys run in one order. So a row's result is bitwise the same
alone, in a batch, and verified among others. Where sequences are many and their context is short, one program walks all
chunks and merges them itself, by the arithmetic of the combine.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _dispatch as dispatch
from pallas_kernels import _flash as flash
from pallas_kernels._flash import divide, divide_up, remainder

# By bytes a number. From 64 rows on products would be Hopper's wide ones, which add in another order; float32 products
# take more registers.
MAX_TILE_ROWS = {2: 32, 4: 16}
COMBINE_CHUNKS = 16
MIN_CHUNK = 512
MAX_CHUNKS = 64
# A context of at most so many chunks and keys may be walked by one program, where there are many sequences.
SERIAL_CHUNKS = 16
SERIAL_REACH = 8192
# Keys, and from how many programs on one walks the chunks of up to so many: what is short takes one little longer.
SERIAL_PROGRAMS = ((1024, 128), (SERIAL_REACH, 256))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Keys a block, keys a chunk (a multiple of the block), and Triton's warps and pipeline stages."""

    block: int
    chunk: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a kernel knows before it runs. bias: "none", "logits" (given by distance), "project" (r, rel_proj)."""

    rows: int
    group: int
    head_dim: int
    page: int
    capacity: int
    extent: int
    window: int | None
    scale: float
    bias: str
    rel_dim: int
    tau: bool
    block: int
    chunk: int
    chunks: int
    max_tile_rows: int
    serial: bool = False

    @property
    def tile_rows(self) -> int:
        return min(max(16, dispatch.next_power_of_2(self.rows * self.group)), self.max_tile_rows)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows * self.group, self.tile_rows)

    @property
    def span(self) -> int:
        """How many of the new rows one tile can touch."""
        return min(self.rows, span(self.tile_rows, self.group))


def span(tile_rows: int, group: int) -> int:
    """How many new rows, of `group` heads each, a tile can touch."""
    return tile_rows // group if tile_rows % group == 0 else (tile_rows - 2) // group + 2


def choose_tiles(
    capacity: int, window: int | None, rows: int, kv_heads: int, key_bytes: int, where: dispatch.Target
) -> Tiles:
    """Blocks that fit the card's shared memory; chunks by the capacity, so that few sequences still fill the card.

    `key_bytes` is what one key of one head loads: its key, its value and its part of the bias. A short window has
    chunks of its own.
    """
    stages = 1 if where.platform == "rocm" else 3
    block = 64
    while block > 16 and block * key_bytes * stages > where.shared_memory * 0.65 > 0:
        block //= 2
    if window is not None and window <= 2048:
        return Tiles(block, 128, num_stages=stages)
    capacity = dispatch.next_power_of_2(capacity)
    chunks = min(max((128 if capacity <= 16384 else 256) // kv_heads, 1), MAX_CHUNKS)
    num_warps = 2 if capacity > 16384 and rows == 1 else 4
    return Tiles(block, max(capacity // chunks, MIN_CHUNK), num_warps, stages)


def first_key(plan: Plan, length: jax.Array) -> jax.Array:
    """The beginning of the first block that a new row sees: 0, or the window's of the oldest."""
    if plan.window is None:
        return jnp.int32(0)
    return divide(jnp.maximum(length - plan.rows - plan.window + 1, 0), plan.block) * plan.block


def chunk_kernel(q_ref, k_ref, v_ref, table_ref, length_ref, count_ref, *refs, plan: Plan):
    """Attention of one tile of query rows over one chunk of the context."""
    sequence, pair, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head, tile = divide(pair, plan.tiles), remainder(pair, plan.tiles)
    extra = list(refs)
    tau_ref = extra.pop(0) if plan.tau else None
    length, count = length_ref[sequence], count_ref[sequence]
    first = first_key(plan, length)
    low = (divide(first, plan.chunk) + chunk) * plan.chunk

    flat = tile * plan.tile_rows + jnp.arange(plan.tile_rows, dtype=jnp.int32)
    row = divide(flat, plan.group)
    stored, real = flat < plan.rows * plan.group, row < jnp.minimum(count, plan.rows)
    query_head = head * plan.group + remainder(flat, plan.group)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    place = (sequence, row[:, None], query_head[:, None], columns[None, :])
    whole = (columns < plan.head_dim)[None, :]

    pages = functools.partial(load_pages, plan, table_ref, sequence)
    first_page = pages(jnp.maximum(low, first))

    def run() -> flash.Softmax:
        q = plt.load(q_ref.at[place], mask=real[:, None] & whole, other=0)
        factor = flash.LOG2E
        if tau_ref is not None:
            factor *= plt.load(tau_ref.at[sequence, row], mask=real, other=1).astype(jnp.float32)[:, None]
        bias = make_bias(plan, extra, sequence, tile, row, query_head, real, length - count)
        keys = functools.partial(load_block, plan, k_ref, v_ref, head, length)
        return walk(plan, q, row, length, length - count, low, first, factor, first_page, pages, keys, bias)

    if plan.serial or plan.chunks == 1:
        out = jnp.where(real[:, None], flash.finish(run()), 0.0)  # a row past the count, read as q = 0, sees keys
        plt.store(refs[-1].at[place], out.astype(refs[-1].dtype), mask=stored[:, None] & whole)
        return
    out_ref, top_ref, total_ref = refs[-3:]
    sums = sequence, chunk, row, query_head

    @pl.when(low < length)
    def _():
        state = run()
        out = jnp.where(real[:, None], state.out, 0.0)
        plt.store(out_ref.at[(sequence, chunk, *place[1:])], out, mask=stored[:, None] & whole)
        plt.store(top_ref.at[sums], state.top, mask=stored)
        plt.store(total_ref.at[sums], jnp.sum(state.total, axis=1), mask=stored)

    @pl.when(low >= length)
    def _():
        plt.store(top_ref.at[sums], jnp.full(row.shape, flash.FLOOR, jnp.float32), mask=stored)
        plt.store(total_ref.at[sums], jnp.zeros(row.shape, jnp.float32), mask=stored)


def walk(plan: Plan, q, row, length, oldest, low, first, factor, first_page, pages, keys, bias) -> flash.Softmax:
    """The softmax over one chunk from the first block seen on, far blocks (no bias, no future), then near ones.

    Each step looks up the next block's page and hands it on. Looked up in its own step, the page would take up a stage
    of Triton's pipeline, and with it a buffer of keys and values: at 4 stages one block would be in flight, not three.

    A serial program walks on to the length, and merges a chunk into those before it where that ends: a loop of its own
    for each would empty the pipeline between two of them.
    """
    high = length if plan.serial else jnp.minimum(low + plan.chunk, length)
    begin = divide(jnp.maximum(low, first), plan.block)
    end = jnp.maximum(divide_up(jnp.maximum(high, 0), plan.block), begin)
    far = divide(jnp.maximum(oldest - plan.extent + 1, 0), plan.block)
    far = jnp.minimum(jnp.maximum(far, begin), end)

    fresh = flash.start(q.shape[0], q.shape[1], plan.block)

    def body(near: bool, i, carry):
        page, state, *before = carry
        key, k, v = keys(i * plan.block, page, near)
        scores = flash.dot_transposed(q, k) * (plan.scale * factor)
        distance = (oldest + row)[:, None] - key[None, :]
        if near and bias is not None:
            scores += bias(key, distance) * factor
        visible = distance >= 0 if near else None
        if plan.window is not None:
            visible = (distance < plan.window) if visible is None else visible & (distance < plan.window)
        scores = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
        page, state = pages((i + 1) * plan.block), flash.step(state, scores, v)
        if not plan.serial:
            return page, state
        over = (remainder((i + 1) * plan.block, plan.chunk) == 0) | (i + 1 == end)
        merged = lambda: (fresh, flash.merge(before[0], flash.gather_sums(state)))  # noqa: E731
        return page, *jax.lax.cond(over, merged, lambda: (state, before[0]))

    carry = first_page, fresh, *([flash.start(*q.shape)] if plan.serial else [])
    if plan.window is None or plan.window > plan.extent:
        carry = jax.lax.fori_loop(begin, far, functools.partial(body, False), carry)
    else:
        far = begin
    _, state, *before = jax.lax.fori_loop(far, end, functools.partial(body, True), carry)
    return before[0] if plan.serial else flash.gather_sums(state)


def load_pages(plan: Plan, table_ref, sequence, start):
    """The page of the block that begins at `start`, or of each of its keys where pages do not hold whole blocks.

    It does not wait for the sequence's length: pages past it, and entries of -1, are never looked at.
    """
    if plan.page % plan.block == 0:
        return plt.load(table_ref.at[sequence, divide(start, plan.page)], mask=start < plan.capacity, other=0)
    key = start + jnp.arange(plan.block, dtype=jnp.int32)
    return plt.load(table_ref.at[sequence, divide(key, plan.page)], mask=key < plan.capacity, other=0)


def seen(plan: Plan, key, length):
    """Whether any of the new rows sees the key: only then is its page one of the sequence's."""
    inside = key < length
    return inside if plan.window is None else inside & (key > length - plan.rows - plan.window)


def load_block(plan: Plan, k_ref, v_ref, head, length, start, page, near: bool):
    """Positions, keys and values of one block. Rows that nobody sees are zeros, whatever their page holds."""
    key = start + jnp.arange(plan.block, dtype=jnp.int32)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    masks = [(columns < plan.head_dim)[None, :]] if columns.size != plan.head_dim else []
    if near or plan.window is not None:
        masks.append(seen(plan, key, length)[:, None])
    mask = flash.every(masks, (plan.block, columns.size))
    if plan.page % plan.block == 0:  # contiguous rows
        offset = remainder(start, plan.page) + jnp.arange(plan.block, dtype=jnp.int32)
    else:
        page, offset = page[:, None], remainder(key, plan.page)
    at = (page, head, offset[:, None], columns[None, :])
    other = None if mask is None else 0
    return key, plt.load(k_ref.at[at], mask=mask, other=other), plt.load(v_ref.at[at], mask=mask, other=other)


def make_bias(plan: Plan, refs, sequence, tile, row, query_head, real, oldest):
    """The function that gives the bias [tile rows, block] of a block's keys, or None."""
    if plan.bias == "none":
        return None
    if plan.bias == "logits":
        rel_ref = refs[0]

        def gather(key, distance):
            del key
            inside = (distance >= 0) & (distance < plan.extent) & real[:, None]
            at = rel_ref.at[sequence, row[:, None], query_head[:, None], distance]
            return plt.load(at, mask=inside, other=0).astype(jnp.float32)

        return gather

    r_ref, flat_ref = refs[:2]
    first = divide(tile * plan.tile_rows, plan.group)
    wide = jnp.arange(max(16, dispatch.next_power_of_2(plan.span * plan.rel_dim)), dtype=jnp.int32)
    mine = (row - first)[:, None] == divide(wide, plan.rel_dim)[None, :]
    at = r_ref.at[sequence, row[:, None], query_head[:, None], remainder(wide, plan.rel_dim)[None, :]]
    r = plt.load(at, mask=mine & real[:, None], other=0)

    def project(key, distance):
        del distance
        at = (oldest + first - key)[:, None] * plan.rel_dim + wide[None, :]
        inside = (at >= 0) & (at < plan.extent * plan.rel_dim) & (wide < plan.span * plan.rel_dim)[None, :]
        return flash.dot_transposed(r, plt.load(flat_ref.at[at], mask=inside, other=0))

    return project


def combine_kernel(part_ref, top_ref, total_ref, out_ref, *, plan: Plan):
    """The chunks of one row and head. One past the length has no part, and a total of 0."""
    sequence, row, head = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns = jnp.arange(dispatch.next_power_of_2(plan.head_dim), dtype=jnp.int32)
    inside = columns < plan.head_dim

    def load(chunk, mask=None):
        at = sequence, chunk, row, head
        top, total = (plt.load(ref.at[at], mask=mask) for ref in (top_ref, total_ref))
        if mask is not None:
            top, total = jnp.where(mask, top, flash.FLOOR), jnp.where(mask, total, 0)
        # Few parts are loaded with their sums, of many only those that the sums call for.
        wanted = mask if plan.chunks <= COMBINE_CHUNKS else total > 0
        masks = [inside[None, :]] if wanted is None else [inside[None, :], wanted[:, None]]
        wanted = flash.every(masks, (chunk.size, columns.size))
        part = plt.load(part_ref.at[sequence, chunk[:, None], row, head, columns[None, :]], mask=wanted, other=0)
        return flash.Softmax(jnp.where((total > 0)[:, None], part, 0), top, total[:, None])

    if may_be_serial(plan):  # in the order of a single program, and so with its very result
        chunks = [load(jnp.full((1,), i, jnp.int32)) for i in range(plan.chunks)]
        out = flash.finish(functools.reduce(flash.merge, chunks, flash.start(1, columns.size)))
        at = out_ref.at[sequence, row, head + jnp.zeros((1, 1), jnp.int32), columns[None, :]]
        plt.store(at, out.astype(out_ref.dtype), mask=inside[None, :])
        return
    size = min(dispatch.next_power_of_2(plan.chunks), COMBINE_CHUNKS)

    def body(i, state):
        out, top, total = state
        chunk = i * size + jnp.arange(size, dtype=jnp.int32)
        part = load(chunk, chunk < plan.chunks)
        new_top = jnp.maximum(top, jnp.max(part.top))
        keep, weights = jnp.exp2(top - new_top), jnp.exp2(part.top - new_top)
        added = jnp.sum(part.out * weights[:, None], axis=0)
        return out * keep + added, new_top, total * keep + jnp.sum(part.total[:, 0] * weights)

    state = jnp.zeros((columns.size,), jnp.float32), jnp.float32(flash.FLOOR), jnp.float32(0)
    groups = pl.cdiv(plan.chunks, size)
    out, _, total = body(0, state) if groups == 1 else jax.lax.fori_loop(0, groups, body, state)
    out = out / jnp.where(total == 0, 1.0, total)
    plt.store(out_ref.at[sequence, row, head, columns], out.astype(out_ref.dtype), mask=inside)


def may_be_serial(plan: Plan) -> bool:
    """Whether one program may walk all chunks, depending on how many sequences there are."""
    return plan.chunks <= SERIAL_CHUNKS and plan.chunks * plan.chunk <= SERIAL_REACH


def is_serial(plan: Plan, programs: int) -> bool:
    """Whether one program does walk them, where so many would."""
    enough = (least for reach, least in SERIAL_PROGRAMS if plan.chunks * plan.chunk <= reach)
    return plan.chunks > 1 and may_be_serial(plan) and programs >= min(enough)


def run(
    q, k_pages, v_pages, page_table, lengths, *, count, rel_logits, r, rel_proj, tau, scale, extent, window,
    implementation, tiles: Tiles | None = None,
):  # fmt: skip
    """The arguments of the public function, checked; `tiles` None chooses for the card."""
    batch, rows, heads, head_dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    capacity = page_table.shape[1] * page
    rel_dim = rel_proj.shape[0] if r is not None else 0
    max_tile_rows = MAX_TILE_ROWS[q.dtype.itemsize]
    if tiles is None:
        # By the most rows of a tile, however few there are: blocks must not depend on that.
        wide = dispatch.next_power_of_2(span(max_tile_rows, heads // kv_heads) * rel_dim)
        key_bytes = (2 * dispatch.next_power_of_2(head_dim) + wide) * q.dtype.itemsize
        tiles = choose_tiles(capacity, window, rows, kv_heads, key_bytes, dispatch.target())
    reach = capacity if window is None else min(capacity, window + rows - 1 + tiles.chunk - 1)
    bias = "logits" if rel_logits is not None else "project" if r is not None else "none"
    plan = Plan(
        rows, heads // kv_heads, head_dim, page, capacity, extent if bias != "none" else 0, window, scale, bias,
        rel_dim, tau is not None,
        tiles.block, tiles.chunk, pl.cdiv(reach, tiles.chunk), max_tile_rows,
    )  # fmt: skip
    plan = dataclasses.replace(plan, serial=is_serial(plan, batch * kv_heads * plan.tiles))
    whole = plan.serial or plan.chunks == 1
    # A caller that keeps rel_proj transposed, [X, R], and passes its .T pays nothing for this one: XLA drops the pair.
    flat = None if r is None else rel_proj[:, :extent].T.reshape(-1)
    operands = [q, k_pages, v_pages, page_table, lengths, count, tau, rel_logits, r, flat]
    call = functools.partial(dispatch.pallas_call, op="rel_paged_attention", implementation=implementation)
    result = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = [
        jax.ShapeDtypeStruct((batch, plan.chunks, rows, heads, head_dim), jnp.float32),
        *(jax.ShapeDtypeStruct((batch, plan.chunks, rows, heads), jnp.float32),) * 2,
    ]
    out = call(
        functools.partial(chunk_kernel, plan=plan),
        grid=(batch, kv_heads * plan.tiles, 1 if whole else plan.chunks),
        out_shape=result if whole else parts,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(*(x for x in operands if x is not None))
    if whole:
        return out
    combine = functools.partial(combine_kernel, plan=plan)
    num_warps = 1 if may_be_serial(plan) else 2
    return call(combine, grid=(batch, rows, heads), out_shape=result, num_warps=num_warps)(*out)
