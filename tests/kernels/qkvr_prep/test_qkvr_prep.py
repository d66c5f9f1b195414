from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import assert_rounds_to, assert_same_arithmetic, bits, f64, jitted, random, rms_norm64
from tests.kernels.short_conv.test_short_conv import HISTORY, conv64

qkvr_prep = jitted(pallas_kernels.qkvr_prep)
EPS = 1e-6


@dataclass
class Case:
    """Streams of k and v from position 0, of which rows start .. start + count - 1 are new; NaN wherever nothing is."""

    starts: list[int]
    counts: list[int]
    rows: int
    ring_rows: int
    dtype: object = jnp.float32
    heads: int = 4
    kv: int = 2
    dim: int = 32
    rel: int = 4

    def __post_init__(self):
        batch, channels, total = len(self.starts), self.kv * self.dim, HISTORY + self.rows
        k, v = (np.array(random(i, (batch, total, channels), self.dtype)) for i in (0, 1))
        q, r = (random(i, (batch, self.rows, self.heads, n), self.dtype) for i, n in ((2, self.dim), (3, self.rel)))
        self.q, self.r, self.streams = np.array(q), np.array(r), {"k": k, "v": v}
        self.rings = {name: np.full((batch, self.ring_rows, channels), np.nan, k.dtype) for name in "kv"}
        columns = (self.heads + 2 * self.kv) * self.dim + self.heads * self.rel
        product = np.full((batch, self.rows, columns), np.nan, k.dtype)
        for b, (s, c) in enumerate(zip(self.starts, self.counts, strict=True)):
            q_row, r_row = (x[b].reshape(self.rows, self.heads * x.shape[-1]) for x in (self.q, self.r))
            new = q_row, k[b, s:], v[b, s:], r_row
            product[b, :c] = np.concatenate([part[:c] for part in new], axis=-1)
            for name, p in ((n, p) for n in "kv" for p in range(max(0, s - self.ring_rows), s)):
                self.rings[name][b, p % self.ring_rows] = self.streams[name][b, p]
        self.conv = {n: random(4 + i, (channels, 4), self.dtype, scale=0.5) for i, n in enumerate("kv")}
        self.norm = {n: random(6 + i, (self.dim,), self.dtype) for i, n in enumerate("qk")}
        self.product = product

    def run(self, implementation, sequences=slice(None), **extra):
        at = [jnp.asarray(np.asarray(x)[sequences]) for x in (self.product, self.rings["k"], self.rings["v"])]
        rows = [jnp.array(x, jnp.int32)[sequences] for x in (self.starts, self.counts)]
        weights = (self.conv["k"], self.conv["v"], self.norm["q"], self.norm["k"])
        return qkvr_prep(
            *(at[0], *weights, at[1], at[2], *rows),
            **dict(heads=self.heads, kv_heads=self.kv, eps=EPS, implementation=implementation, **extra),
        )

    def pages(self, table: list[list[int]], pages: int, size: int) -> dict:
        shape = (pages, self.kv, size, self.dim)
        pools = {f"{n}_pages": random(20 + i, shape, self.dtype) for i, n in enumerate("kv")}
        return dict(pools, page_table=jnp.array(table, jnp.int32))


CASES = {
    "one row": ([0, 2, 7], [1, 1, 0], 1, 4),
    "verify": ([0, 2, 5], [3, 1, 3], 3, 7),
    "chunk longer than the ring": ([0, 6], [9, 5], 9, 4),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in CASES), ("verify", jnp.float16), ("verify", jnp.float32)]
)
def test_without_pages_every_step_matches_float64(implementation, name, dtype):
    case = Case(*CASES[name], dtype=dtype)
    got = case.run(implementation)
    assert got.k_pages is None and got.v_pages is None
    for b, (s, c) in enumerate(zip(case.starts, case.counts, strict=True)):
        conv = {n: conv64(f64(case.streams[n][b]), case.conv[n])[s : s + c].reshape(c, case.kv, case.dim) for n in "kv"}
        assert_rounds_to(got.q[b, :c], rms_norm64(f64(case.q[b, :c]), case.norm["q"], EPS))
        assert_rounds_to(got.v[b, :c], conv["v"])
        # The convolution's rounding moves the norm's input: by one rounding where it is, and by the mean elsewhere.
        assert_rounds_to(got.k[b, :c], rms_norm64(conv["k"], case.norm["k"], EPS), roundings=3)
        np.testing.assert_array_equal(bits(got.r[b, :c]), bits(case.r[b, :c]))
        for field in ("q", "r", "k", "v"):
            assert not np.any(f64(getattr(got, field)[b, c:])), f"{field} of padding rows"
        for n, ring in (("k", got.k_ring), ("v", got.v_ring)):
            expected = bits(case.rings[n])[b].copy()
            for p in range(s, s + c):
                expected[p % case.ring_rows] = bits(case.streams[n][b, p])
            np.testing.assert_array_equal(bits(ring[b]), expected)


@pytest.mark.parametrize(("name", "dtype"), [*((name, jnp.bfloat16) for name in CASES), ("verify", jnp.float32)])
def test_pages_get_the_rows_and_nothing_else_changes(implementation, name, dtype):
    case = Case(*CASES[name], dtype=dtype)
    size = 6  # no power of two; sequence 1's second page is not allocated
    extra = case.pages([[3, 0, 5], [1, -1, 4], [2, 6, -1]][: len(case.starts)], pages=8, size=size)
    plain, got = case.run(implementation), case.run(implementation, **extra)
    assert got.k is None and got.v is None
    for n, pool in (("k", got.k_pages), ("v", got.v_pages)):
        expected, written = np.array(extra[f"{n}_pages"]), np.zeros(pool.shape, bool)
        for b, (s, c) in enumerate(zip(case.starts, case.counts, strict=True)):
            for t in range(c):
                page = int(extra["page_table"][b, (s + t) // size])
                if page >= 0:
                    expected[page, :, (s + t) % size] = getattr(plain, n)[b, t]
                    written[page, :, (s + t) % size] = True
        assert_same_arithmetic(pool[written], expected[written])
        np.testing.assert_array_equal(bits(pool[~written]), bits(expected[~written]))
    for field in ("q", "r", "k_ring", "v_ring"):
        assert_same_arithmetic(getattr(got, field), getattr(plain, field))


def test_repeating_entries_keep_the_last_rows(implementation):
    """Two pages of 3 in a ring for each sequence: of its new rows the last 6 stay, each where its position says."""
    case = Case(*CASES["chunk longer than the ring"], dtype=jnp.bfloat16)
    table = np.array([[1, 0] * 3, [2, 4] * 3])
    extra = case.pages(table.tolist(), pages=5, size=3)
    plain, got = case.run(implementation), case.run(implementation, kv_rows=6, **extra)
    expected = np.array(extra["k_pages"])
    for b, (s, c) in enumerate(zip(case.starts, case.counts, strict=True)):
        for t in range(max(c - 6, 0), c):
            expected[table[b, (s + t) // 3], :, (s + t) % 3] = plain.k[b, t]
    assert_same_arithmetic(got.k_pages, expected)


def test_rows_past_the_table_are_dropped(implementation):
    case = Case(*CASES["verify"], dtype=jnp.bfloat16)
    extra = case.pages([[1], [0], [2]], pages=3, size=6)  # positions 6 and 7 of the last sequence have no entry
    plain, got = case.run(implementation), case.run(implementation, **extra)
    expected = np.array(extra["v_pages"])
    for page, b, t in ((1, 0, 0), (1, 0, 1), (1, 0, 2), (0, 1, 0), (2, 2, 0)):
        expected[page, :, case.starts[b] + t] = plain.v[b, t]
    assert_same_arithmetic(got.v_pages, expected)


@pytest.mark.parametrize(("heads", "kv", "dim", "rel"), [(6, 3, 40, 3), (9, 9, 16, 1), (3, 1, 128, 16)])
def test_heads_that_are_no_powers_of_two(implementation, heads, kv, dim, rel):
    case = Case([0, 5], [2, 3], 3, 6, heads=heads, kv=kv, dim=dim, rel=rel)
    got = case.run(implementation)
    for b, (s, c) in enumerate(((0, 2), (5, 3))):
        conv = conv64(f64(case.streams["v"][b]), case.conv["v"])[s : s + c].reshape(c, kv, dim)
        assert_rounds_to(got.v[b, :c], conv)
        assert_rounds_to(got.q[b, :c], rms_norm64(f64(case.q[b, :c]), case.norm["q"], EPS))
        np.testing.assert_array_equal(bits(got.r[b, :c]), bits(case.r[b, :c]))


def test_tau_multiplies_the_rounded_q_and_nothing_else(implementation):
    case = Case(*CASES["verify"], dtype=jnp.bfloat16)
    tau = np.array([[1.0, 1.25, 1.5], [1.0625, np.nan, np.nan], [1.0625, 1.3, 1.7]], np.float32)
    plain, got = case.run(implementation), case.run(implementation, tau=jnp.asarray(tau))
    for b, c in enumerate(case.counts):
        assert_rounds_to(got.q[b, :c], f64(plain.q[b, :c]) * tau[b, :c, None, None])
    assert not np.any(f64(got.q[1, 1:]))
    np.testing.assert_array_equal(bits(got.q[0, 0]), bits(plain.q[0, 0]))
    for field in ("r", "k", "v", "k_ring", "v_ring"):
        np.testing.assert_array_equal(bits(getattr(got, field)), bits(getattr(plain, field)))


def test_a_sequence_does_not_depend_on_its_neighbours(implementation):
    case = Case(*CASES["verify"], dtype=jnp.bfloat16)
    together = case.run(implementation)
    for b in range(3):
        alone = case.run(implementation, slice(b, b + 1))
        for field in ("q", "r", "k", "v", "k_ring", "v_ring"):
            np.testing.assert_array_equal(bits(getattr(alone, field)[0]), bits(getattr(together, field)[b]))


@pytest.mark.parametrize(("starts", "rows"), [([], 2), ([5], 0)])
def test_nothing_gives_nothing(implementation, starts, rows):
    case = Case(starts, [0] * len(starts), rows, 4)
    got = case.run(implementation)
    assert (got.q.shape, got.k.shape) == ((len(starts), rows, 4, 32), (len(starts), rows, 2, 32))
    np.testing.assert_array_equal(bits(got.k_ring), bits(case.rings["k"]))


def test_bad_arguments_are_named():
    case = Case([0], [1], 1, 4)
    extra = case.pages([[0]], pages=1, size=4)
    with pytest.raises(ValueError, match="k_pages, v_pages and page_table come together"):
        case.run("xla", k_pages=extra["k_pages"])
    with pytest.raises(ValueError, match="page_table is float32; expected int32"):
        case.run("xla", **{**extra, "page_table": extra["page_table"].astype(jnp.float32)})
    with pytest.raises(ValueError, match=r"v_pages has shape \[1, 2, 3, 32\]"):
        case.run("xla", **{**extra, "v_pages": extra["v_pages"][:, :, 1:]})
    with pytest.raises(ValueError, match="tau is float16; expected float32"):
        case.run("xla", tau=jnp.ones((1, 1), jnp.float16))
    with pytest.raises(ValueError, match="kv_rows is 0"):
        case.run("xla", kv_rows=0, **extra)
    case.kv = 3
    with pytest.raises(ValueError, match="4 heads over 3 kv_heads"):
        case.run("xla")
    case.heads = 3
    with pytest.raises(ValueError, match="qkvr has 272 columns"):
        case.run("xla")
