"""Attention with relative bias: over the new rows alone, and over cached rows and new ones together."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.cache import VERIFY_ROWS, PagedKV, Rows
from inkling_jax.config import AttentionShape
from inkling_jax.ops import attend
from tests import reference
from tests.precision import relative_error

LENGTH, REL, PAGE = 40, 4, 4
SHAPES = {
    "local": AttentionShape(heads=4, kv_heads=2, head_dim=8, extent=7, window=7),
    "global": AttentionShape(heads=4, kv_heads=2, head_dim=8, extent=12, window=None),
    "extent_past_everything": AttentionShape(heads=2, kv_heads=2, head_dim=8, extent=64, window=None),
    "one_kv_head": AttentionShape(heads=3, kv_heads=1, head_dim=8, extent=5, window=None),
}


@dataclass
class Case:
    """One sequence of LENGTH rows."""

    shape: AttentionShape
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    r: np.ndarray
    rel_proj: np.ndarray
    tau: np.ndarray

    def exact(self):
        inputs = (np.asarray(a, float) for a in (self.q, self.k, self.v, self.r, self.rel_proj))
        return reference.attend(*inputs, self.shape, list(self.tau))

    def whole(self, dtype="float32"):
        """All rows at once, nothing cached."""
        q, k, v, r = (jnp.asarray(a, dtype)[None] for a in (self.q, self.k, self.v, self.r))
        rows = Rows(jnp.zeros(1, jnp.int32), jnp.full(1, LENGTH, jnp.int32))
        rel_proj, tau = jnp.asarray(self.rel_proj, dtype), jnp.asarray(self.tau, jnp.float32)[None]
        out, _ = jax.jit(attend, static_argnames="shape")(q, k, v, r, rel_proj, rows, self.shape, tau=tau)
        return np.asarray(out[0])


def case(name, seed=0):
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    queries, keys = (LENGTH, shape.heads), (LENGTH, shape.kv_heads)
    draw = lambda *size: rng.standard_normal(size).astype(np.float32)  # noqa: E731
    return Case(
        shape,
        q=3 * draw(*queries, shape.head_dim),
        k=draw(*keys, shape.head_dim),
        v=draw(*keys, shape.head_dim),
        r=draw(*queries, REL),
        rel_proj=draw(REL, shape.extent),
        tau=np.linspace(1, 2, LENGTH, dtype=np.float32),
    )


def probe(shape, distance):
    """Nothing but a bias that is hot at one distance; values that say which key they belong to."""
    profile = np.zeros((REL, shape.extent), np.float32)
    profile[:, distance] = 40.0
    q = np.zeros((LENGTH, shape.heads, shape.head_dim), np.float32)
    k = np.zeros((LENGTH, shape.kv_heads, shape.head_dim), np.float32)
    v = np.broadcast_to(np.arange(LENGTH, dtype=np.float32)[:, None, None], k.shape)
    r = np.full((LENGTH, shape.heads, REL), 1.0, np.float32)
    return Case(shape, q, k, v, r, profile, np.ones(LENGTH, np.float32))


@pytest.mark.parametrize("name", SHAPES)
def test_new_rows_agree_with_the_oracle(name):
    assert relative_error(case(name).whole(), case(name).exact()) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("distance", [0, 1, "last"])
def test_a_hot_distance_finds_its_key(name, distance):
    shape = SHAPES[name]
    distance = min(shape.extent, LENGTH) - 1 if distance == "last" else distance
    found = probe(shape, distance).whole()
    keys = np.arange(LENGTH - distance, dtype=np.float32)
    np.testing.assert_allclose(
        found[distance:], np.broadcast_to(keys[:, None, None], found[distance:].shape), atol=1e-4
    )


def test_past_the_extent_keys_stay_visible_without_bias():
    cold = probe(SHAPES["global"], 0)
    cold.rel_proj[:] = -40.0  # everything inside the extent is shut out
    found, extent = cold.whole(), cold.shape.extent
    means = [np.arange(t - extent + 1).mean() for t in range(extent, LENGTH)]
    np.testing.assert_allclose(found[extent:, 0, 0], means, rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_the_bias_is_not_ignored(name):
    on, off = case(name), case(name)
    off.rel_proj[:] = 0
    assert np.abs(on.whole() - off.whole()).max() > 0.1


def test_a_key_leaves_the_window_after_exactly_window_rows():
    before, after = case("local"), case("local")
    after.v[10] += 100
    changed = np.abs(before.whole() - after.whole()).max(axis=(1, 2)) > 1e-3
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(10, 10 + before.shape.window))


def test_bfloat16_is_close():
    for name in SHAPES:
        assert relative_error(case(name).whole("bfloat16"), case(name).exact()) < 0.03


# ---------------------------------------------------------------------------------------------------- with cached rows

NEW = 6  # rows a step, few enough to be written first; one compilation serves every start and count
CHUNK = VERIFY_ROWS + 4  # rows a step, so many that they attend before they are written


@jax.jit
def wipe(kv: PagedKV) -> PagedKV:
    return PagedKV(jnp.full_like(kv.k, jnp.nan), jnp.full_like(kv.v, jnp.nan), kv.ring)


def cached(c: Case, starts, counts, new=NEW):
    """Rows starts[b] .. starts[b] + counts[b] of the same sequence, for every b, after caching all rows before.

    Pages are handed out in a shuffled order and hold NaN until written: whatever is read too much shows.
    """
    batch, width = len(starts), -(-LENGTH // PAGE) + 2
    rng = np.random.default_rng(7)
    table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
    table[:, -2:] = -1
    pool = jnp.zeros((batch * width, c.shape.kv_heads, PAGE, c.shape.head_dim))
    kv = wipe(PagedKV(pool, pool))
    everything = [jnp.broadcast_to(jnp.asarray(a), (batch, *a.shape)) for a in (c.k, c.v)]
    before = Rows(jnp.zeros(batch, jnp.int32), jnp.asarray(starts, jnp.int32))
    kv = kv.write(*everything, jnp.asarray(table), before)
    rows = Rows(jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32))
    at = np.minimum(np.asarray(starts)[:, None] + np.arange(new), LENGTH - 1)
    q, k, v, r, tau = (jnp.asarray(a[at]) for a in (c.q, c.k, c.v, c.r, c.tau))
    step = jax.jit(attend, static_argnames="shape")
    rel_proj, table = jnp.asarray(c.rel_proj), jnp.asarray(table)
    out, filled = step(q, k, v, r, rel_proj, rows, c.shape, tau=tau, kv=kv, page_table=table)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        at = np.arange(start, start + count)
        np.testing.assert_array_equal(filled.k[table[b, at // PAGE], :, at % PAGE], c.k[at])
        np.testing.assert_array_equal(filled.v[table[b, at // PAGE], :, at % PAGE], c.v[at])
    return np.asarray(out)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("new", [NEW, CHUNK])
def test_cached_rows_agree_with_the_oracle_at_every_start(name, new):
    """Every start there is, so also window, extent and page edges, and unequal sequences side by side."""
    c = case(name)
    starts = np.arange(LENGTH)
    counts = np.minimum(1 + starts % new, LENGTH - starts)
    found, exact = cached(c, starts, counts, new), c.exact()
    assert np.isfinite(found).all()
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert relative_error(found[b, :count], exact[start : start + count]) < 1e-5, (start, count)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("distance", [0, 1, "last"])
def test_a_hot_distance_finds_its_key_among_cached_rows(name, distance):
    shape = SHAPES[name]
    distance = min(shape.extent, LENGTH - NEW) - 1 if distance == "last" else distance
    start = LENGTH - NEW
    found = cached(probe(shape, distance), [start], [NEW])[0]
    keys = np.arange(start - distance, LENGTH - distance, dtype=np.float32)
    np.testing.assert_allclose(found, np.broadcast_to(keys[:, None, None], found.shape), atol=1e-4)


@pytest.mark.parametrize("new", [NEW, CHUNK])
def test_an_idle_sequence_changes_nothing_and_stays_finite(new):
    c = case("local")
    alone, together = cached(c, [30], [NEW], new), cached(c, [30, 0, 5], [NEW, 0, 0], new)
    assert np.isfinite(together).all()
    assert relative_error(together[0], alone[0]) < 1e-6


def test_a_row_does_not_depend_on_how_many_rows_come_with_it():
    """To the last bit, in the type that models run in: drafts must not change what a token's row says."""
    shape, rng = SHAPES["local"], np.random.default_rng(3)
    draw = lambda *size: jnp.asarray(rng.standard_normal((1, *size)), jnp.bfloat16)  # noqa: E731
    q, k, v = draw(NEW, 4, 8), draw(NEW, 2, 8), draw(NEW, 2, 8)
    r, rel_proj = draw(NEW, 4, REL), draw(REL, 7)[0]
    pool = jnp.zeros((10, 2, PAGE, 8), jnp.bfloat16)
    table = jnp.arange(10, dtype=jnp.int32)[None]
    step = jax.jit(attend, static_argnames="shape")

    def run(cuts):
        kv, found = PagedKV(pool, pool), []
        for first, last in itertools.pairwise(cuts):
            rows = Rows(jnp.full(1, first, jnp.int32), jnp.full(1, last - first, jnp.int32))
            spare = ((0, 0), (0, int(last - first < 2)), (0, 0), (0, 0))
            new = [jnp.pad(x[:, first:last], spare) for x in (q, k, v, r)]
            out, kv = step(*new, rel_proj, rows, shape, kv=kv, page_table=table)
            found.append(np.asarray(out[0, : last - first], np.float32))
        return np.concatenate(found)

    for cuts in ([0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 6], [0, 5, 6]):
        np.testing.assert_array_equal(run(cuts), run([0, 6]))
