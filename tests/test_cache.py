"""What decoding remembers: rows in chunks of any size give what an uncached run gives, and nothing else is touched."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.cache import (
    VERIFY_ROWS,
    Cache,
    CacheShape,
    LayerCache,
    PagedKV,
    Ring,
    Rows,
    allocate_pages,
    cache_bytes,
    make_cache,
)
from inkling_jax.decode.engine import Engine
from inkling_jax.ops import attention
from tests import reference
from tests.precision import relative_error

DEPTHS = 2
CONFIG = replace(reference.BASE, num_layers=2, local_layers=(0,), mtp_depths=DEPTHS, mtp_local=(1,))
PAGE = 8
LENGTHS = np.array([
    *(1, 2, 3),
    *(CONFIG.window - 1, CONFIG.window, CONFIG.window + 1, 3 * CONFIG.window),
    *(CONFIG.rel_extent - 1, CONFIG.rel_extent, CONFIG.rel_extent + 1),
    *(2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1),
    33,
])  # fmt: skip
TOKENS = [reference.random_tokens(CONFIG, length, seed) for seed, length in enumerate(LENGTHS)]
CHUNKS = (1, 2, 3, 5, 40)
BLOCKS = {2: 2 * PAGE, 5: PAGE}  # chunks that read the cached rows in several blocks; 40 and the others in one


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, {path: jnp.asarray(p) for path, p in reference.random_params(CONFIG).items()}, "float32")


@pytest.fixture(scope="module")
def expected():
    """For each sequence the oracle's logits of the backbone and of every depth it is long enough for."""
    params, found = reference.random_params(CONFIG), []
    for tokens in TOKENS:
        deep = reference.depths(params, CONFIG, tokens, min(DEPTHS, len(tokens) - 1))
        found.append([reference.forward(params, CONFIG, tokens)["logits"], *(depth["logits"] for depth in deep)])
    return found


@pytest.fixture(scope="module")
def chunked(engine):
    """Runs positions start .. start + chunk - 1 of the backbone and the depths: their logits, and the new cache."""

    @partial(jax.jit, static_argnames="chunk", donate_argnames="cache")
    def run(leaves, cache, tokens, length, start, chunk):
        model, first = engine.model(leaves), jnp.full_like(length, start)

        def rows(end):
            return Rows(first, jnp.clip(end - start, 0, chunk))

        def shifted(by):
            return jax.lax.dynamic_slice_in_dim(tokens, start + by, chunk, axis=1)

        h, cache = model.hidden(shifted(0), rows(length), cache)
        logits = [model.logits(h)]
        for d in range(DEPTHS):
            h, cache = model.depth(d, h, shifted(d + 1), rows(length - d - 1), cache)
            logits.append(model.logits(h))
        return logits, cache

    return run


def poisoned_cache() -> Cache:
    """Nothing but NaN in it; global pages in no order, -1 behind those that a sequence needs."""
    pages = -(-LENGTHS // PAGE)
    shape = CacheShape(batch=len(LENGTHS), pages=int(pages.sum()) + 3, width=8, drafts=DEPTHS, page_size=PAGE)
    everything, ring = allocate_pages(CONFIG, shape, LENGTHS)
    shuffled = np.random.default_rng(0).permutation(shape.pages).astype(np.int32)
    everything = np.where(everything >= 0, shuffled[everything], -1)
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_cache(CONFIG, shape, "float32"))
    return replace(cache, global_pages=jnp.asarray(everything), local_pages=jnp.asarray(ring))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_cached_is_uncached_at_every_position(engine, chunked, expected, chunk, monkeypatch):
    """Sequences of all lengths in one batch, over a cache full of NaN."""
    monkeypatch.setattr(attention, "BLOCK", BLOCKS.get(chunk, attention.BLOCK))
    tokens = np.full((len(LENGTHS), 2 * max(CHUNKS) + DEPTHS), CONFIG.real_vocab_size - 1, np.int32)
    for row, own in zip(tokens, TOKENS, strict=True):
        row[: len(own)] = own
    cache, pieces = poisoned_cache(), []
    for start in range(0, LENGTHS.max(), chunk):
        arrays = (jnp.asarray(tokens), jnp.asarray(LENGTHS, jnp.int32), jnp.int32(start))
        logits, cache = chunked(engine.leaves, cache, *arrays, chunk=chunk)
        pieces.append(logits)
    found = [np.concatenate(part, axis=1) for part in zip(*pieces, strict=True)]
    for b, parts in enumerate(expected):
        for exact, part in zip(parts, found, strict=False):
            assert relative_error(part[b, : len(exact)], exact) < 1e-5, (LENGTHS[b], chunk)
    assert sum(len(parts) for parts in expected) == 3 * len(LENGTHS) - 3  # one token has no depth, two have one


def test_unneeded_pages_are_never_written(engine, chunked):
    """The three pages that no table names hold the NaN they began with, page 0 and the last page among the named."""
    cache = poisoned_cache()
    named = np.unique(cache.global_pages)
    tokens = jnp.zeros((len(LENGTHS), 2 * max(CHUNKS) + DEPTHS), jnp.int32)
    _, cache = chunked(engine.leaves, cache, tokens, jnp.asarray(LENGTHS, jnp.int32), jnp.int32(0), chunk=40)
    pool = np.asarray(cache.layers[1].kv.k)
    spare = np.setdiff1d(np.arange(len(pool)), named)
    assert len(spare) == 3
    assert np.isnan(pool[spare]).all()
    rows = np.isfinite(pool).all(axis=(1, 3))  # [P, page]
    assert rows.sum() == LENGTHS.sum()  # one slot for each real row, none for padding


# ------------------------------------------------------------------------------------------------------- single writes


def paged(pages: int, ring: int | None = None) -> PagedKV:
    return PagedKV(jnp.full((pages, 1, 4, 2), -1.0), jnp.full((pages, 1, 4, 2), -1.0), ring)


def rows_of(start: list[int], count: list[int]) -> Rows:
    return Rows(jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32))


def values(batch: int, new: int) -> jax.Array:
    """Row t of sequence b holds 100 b + t in every channel."""
    numbers = 100.0 * np.arange(batch)[:, None] + np.arange(new)
    return jnp.asarray(np.broadcast_to(numbers[:, :, None, None], (batch, new, 1, 2)), jnp.float32)


def written(kv: PagedKV) -> dict[tuple[int, int], float]:
    """What lies in each (page, slot) that was written; keys and values must have gone to the same places."""
    np.testing.assert_array_equal(kv.v, jnp.where(kv.k >= 0, kv.k + 10, -1))
    return {(int(page), int(slot)): float(kv.k[page, 0, slot, 0]) for page, slot in np.argwhere(kv.k[:, 0, :, 0] >= 0)}


def write(kv: PagedKV, table: list[list[int]], new: int, rows: Rows) -> dict[tuple[int, int], float]:
    x = values(len(table), new)
    return written(kv.write(x, x + 10, jnp.asarray(table, jnp.int32), rows))


def test_a_row_lands_in_its_page_and_slot():
    found = write(paged(5), [[3, 1, -1], [0, 4, 2]], 3, rows_of([3, 6], [3, 3]))
    assert found == {(3, 3): 0, (1, 0): 1, (1, 1): 2, (4, 2): 100, (4, 3): 101, (2, 0): 102}


@pytest.mark.parametrize(
    ("table", "start", "count"),
    [
        ([0, 1, 2], 0, 0),  # padding only
        ([-1, -1, -1], 0, 3),  # unallocated: -1 must not be the last page
        ([0, 1, 2], 12, 3),  # past the table: must not be clamped to its last entry
        ([0, 1, 2], -8, 3),  # before the start
    ],
)
def test_rows_without_a_place_are_dropped(table, start, count):
    assert write(paged(3), [table], 3, rows_of([start], [count])) == {}, "something was written"


def test_padding_and_unallocated_rows_leave_the_rest_alone():
    found = write(paged(3), [[2, -1], [0, 1]], 4, rows_of([2, 1], [4, 2]))
    assert found == {(2, 2): 0, (2, 3): 1, (0, 1): 100, (0, 2): 101}


def test_a_chunk_longer_than_the_ring_leaves_its_last_rows():
    found = write(paged(2, ring=8), [[0, 1, 0, 1, 0, 1]], 19, rows_of([2], [17]))
    assert sorted(found.values()) == list(range(9, 17))  # positions 11 .. 18
    assert found[0, 0] == 14  # position 16, in the page that position 0 and 8 had before


def test_reading_hides_what_is_not_live():
    kv = paged(3).write(*[values(1, 6)] * 2, jnp.asarray([[2, 0]]), rows_of([0], [6]))
    live = jnp.arange(12)[None] < 5
    k, v = kv.read(jnp.asarray([[2, 0, -1]]), live)
    np.testing.assert_array_equal(k[0, :, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(k, v)


def test_a_ring_drops_padding_and_keeps_the_last_rows():
    ring = Ring(jnp.full((3, 5, 1), -1.0))
    x = jnp.arange(7, dtype=jnp.float32)[None, :, None] + jnp.asarray([0.0, 100.0, 200.0])[:, None, None]
    found = ring.write(x, rows_of([4, 4, 4], [7, 2, 0])).rows[..., 0]
    np.testing.assert_array_equal(found[0], [6, 2, 3, 4, 5])  # positions 10, 6, 7, 8, 9
    np.testing.assert_array_equal(found[1], [101, -1, -1, -1, 100])
    np.testing.assert_array_equal(found[2], [-1] * 5)


def test_a_ring_reads_zeros_before_the_start():
    ring = Ring(jnp.arange(1.0, 6.0)[None, :, None])
    np.testing.assert_array_equal(ring.read(jnp.asarray([-2]), 4)[0, :, 0], [0, 0, 1, 2])
    np.testing.assert_array_equal(ring.read(jnp.asarray([9]), 3)[0, :, 0], [5, 1, 2])


# ---------------------------------------------------------------------------------------------------------- allocation


def shape_of(**sizes: int) -> CacheShape:
    return CacheShape(**{**dict(batch=2, pages=6, width=4, drafts=2, page_size=PAGE), **sizes})


def test_pages_of_sequences_are_disjoint_and_just_enough():
    everything, _ = allocate_pages(CONFIG, shape_of(), np.array([PAGE + 1, 3 * PAGE]))
    assert [(row >= 0).sum() for row in everything] == [2, 3]
    used = everything[everything >= 0]
    assert len(set(used)) == len(used)
    assert everything.dtype == np.int32


def test_local_tables_repeat_a_few_pages():
    shape = shape_of(width=40, pages=80)
    _, ring = allocate_pages(CONFIG, shape, np.array([300, 5]))
    assert ring.shape == (2, 40)
    most = -(-(CONFIG.window - 1 + max(shape.rows, VERIFY_ROWS)) // PAGE)
    assert len(set(ring[0])) == most == shape.local_pages(CONFIG)
    assert set(ring[0]).isdisjoint(ring[1])
    assert (ring[:, most:] == ring[:, :-most]).all()


def test_local_layers_keep_as_many_pages_for_any_context():
    sizes = [
        {kv.k.shape[0] for kv in local_kv(make_cache(CONFIG, shape_of(width=width, pages=2 * width), "float32"))}
        for width in (10, 1000)
    ]
    assert sizes[0] == sizes[1] == {2 * shape_of().local_pages(CONFIG)}


def local_kv(cache: Cache) -> list[PagedKV]:
    layers: list[LayerCache] = [*cache.layers, *cache.depths]
    kept = [layer.kv for layer in layers if layer.kv.ring is not None]
    assert len(kept) == 2  # one layer, one of the two depths
    return kept


@pytest.mark.parametrize("capacity", [[4 * PAGE, 2 * PAGE + 1], [4 * PAGE + 1, 1]])
def test_too_many_rows_are_refused(capacity):
    with pytest.raises(ValueError, match="pages of 8 rows needed, the cache holds 6"):
        allocate_pages(CONFIG, shape_of(), np.array(capacity))


def test_bytes_are_those_of_the_arrays():
    parts = cache_bytes(CONFIG, batch=3, context=200, draft_tokens=2, dtype="bfloat16")
    shape = CacheShape(batch=4, pages=16, width=16, drafts=2)  # 3 x 4 pages of 64, in buckets
    cache = make_cache(CONFIG, shape, "bfloat16")

    def size(tree) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert parts["total"] == size(cache.layers) + size(cache.depths)
    assert parts["global_kv"] == 2 * 16 * 64 * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert parts["local_kv"] == size(cache.layers[0].kv)
    assert parts["depths"] == size(cache.depths)
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")
