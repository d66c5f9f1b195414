import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import assert_rounds_to, assert_same_arithmetic, bits, f64, jitted, random, rms_norm64

short_conv = jitted(pallas_kernels.short_conv)
short_conv_add_norm = jitted(pallas_kernels.short_conv_add_norm)

EPS = 1e-6
HISTORY = 12  # rows of each sequence that exist before any case begins


def conv64(stream: np.ndarray, weight) -> np.ndarray:
    """The whole stream [S, C] of one sequence, from position 0."""
    w = f64(weight)
    padded = np.concatenate([np.zeros((w.shape[1] - 1, w.shape[0])), stream])
    return stream + sum(w[:, j] * padded[j : j + len(stream)] for j in range(w.shape[1]))


def case(start, count, rows: int, ring_rows: int, channels: int, dtype, taps: int = 4):
    """A ring filled by position from the streams, poison where no position lives yet, and padding rows of NaN."""
    streams = np.array(random(0, (len(start), HISTORY + rows, channels), dtype))
    ring = np.full((len(start), ring_rows, channels), np.nan, streams.dtype)
    x = np.full((len(start), rows, channels), np.nan, streams.dtype)
    for b, (s, c) in enumerate(zip(start, count, strict=True)):
        for p in range(max(0, s - ring_rows), s):
            ring[b, p % ring_rows] = streams[b, p]
        x[b, :c] = streams[b, s : s + c]
    weight = random(1, (channels, taps), dtype, scale=0.5)
    arrays = jnp.asarray(x), weight, jnp.asarray(ring), jnp.array(start, jnp.int32), jnp.array(count, jnp.int32)
    return *arrays, streams


# Starts at 0, before and after the taps are full, at the ring's seam; counts of nothing, some and all.
CASES = {
    "one row": ([0, 1, 2, 3, 7], [1, 1, 1, 1, 0], 1, 8),
    "verify": ([0, 2, 5, 11], [4, 3, 0, 4], 4, 7),
    "chunk longer than the ring": ([0, 5, 12, 2], [9, 6, 1, 0], 9, 4),
    "chunk that meets the ring": ([3, 4], [5, 5], 5, 7),
    "ring of the taps alone": ([3, 1], [6, 2], 6, 3),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, jnp.bfloat16) for name in CASES), ("verify", jnp.float16), ("verify", jnp.float32)]
)
def test_short_conv_and_its_ring(implementation, name, dtype):
    starts, counts, rows, ring_rows = CASES[name]
    x, weight, ring, start, count, streams = case(starts, counts, rows, ring_rows, 40, dtype)
    y, after = short_conv(x, weight, ring, start, count, implementation=implementation)
    expected_ring = bits(ring).copy()
    for b, (s, c) in enumerate(zip(starts, counts, strict=True)):
        assert_rounds_to(y[b, :c], conv64(f64(streams[b]), weight)[s : s + c])
        assert not np.any(bits(y[b, c:]))
        for p in range(s, s + c):
            expected_ring[b, p % ring_rows] = bits(streams[b, p])
    np.testing.assert_array_equal(bits(after), expected_ring)  # padding rows and other slots untouched


@pytest.mark.parametrize(
    ("name", "channels", "dtype"),
    [
        ("one row", 512, jnp.bfloat16),
        ("verify", 40, jnp.float16),
        ("verify", 40, jnp.float32),
        ("chunk longer than the ring", 512, jnp.bfloat16),
        ("chunk longer than the ring", 40, jnp.bfloat16),
    ],
)
def test_add_and_norm_are_the_unfused_sequence(implementation, name, channels, dtype):
    starts, counts, rows, ring_rows = CASES[name]
    x, weight, ring, start, count, _ = case(starts, counts, rows, ring_rows, channels, dtype)
    residual, norm_weight = random(5, x.shape, dtype), random(6, (channels,), dtype)
    out, normed, after = short_conv_add_norm(
        x, weight, ring, start, count, residual, norm_weight, eps=EPS, implementation=implementation
    )
    y, ring_alone = short_conv(x, weight, ring, start, count, implementation=implementation)
    np.testing.assert_array_equal(bits(after), bits(ring_alone))
    for b, c in enumerate(counts):
        exact = f64(residual)[b, :c] + f64(y[b, :c])
        assert_rounds_to(out[b, :c], exact, floor=2.0**-20)  # y comes from a program of its own
        assert_rounds_to(normed[b, :c], rms_norm64(f64(out[b, :c]), norm_weight, EPS))
        assert not np.any(f64(out[b, c:])) and not np.any(f64(normed[b, c:]))
    with_add, _ = short_conv(x, weight, ring, start, count, residual=residual, implementation=implementation)
    assert_same_arithmetic(with_add, out)


@pytest.mark.parametrize(
    ("name", "dtype"), [("one row", jnp.bfloat16), ("verify", jnp.bfloat16), ("verify", jnp.float32)]
)
def test_summands_are_added_in_order_and_rounded(implementation, name, dtype):
    x, weight, ring, start, count, _ = case(*CASES[name], 40, dtype)
    residual, norm_weight = random(5, x.shape, dtype), random(6, (40,), dtype)
    large = random(7, x.shape, jnp.float32, scale=1e4)  # takes digits from what it is added to
    parts = jnp.stack([x.astype(jnp.float32), large, random(8, x.shape, jnp.float32) - large])
    whole = ((parts[0] + parts[1]) + parts[2]).astype(dtype)
    rest = weight, ring, start, count
    assert np.any(bits(whole) != bits((parts[0] + (parts[1] + parts[2])).astype(dtype)))
    for found, expected in zip(
        short_conv(parts, *rest, residual=residual, implementation=implementation),
        short_conv(whole, *rest, residual=residual, implementation=implementation),
        strict=True,
    ):
        np.testing.assert_array_equal(bits(found), bits(expected))
    for found, expected in zip(
        short_conv_add_norm(parts, *rest, residual, norm_weight, eps=EPS, implementation=implementation),
        short_conv_add_norm(whole, *rest, residual, norm_weight, eps=EPS, implementation=implementation),
        strict=True,
    ):
        np.testing.assert_array_equal(bits(found), bits(expected))


def test_row_by_row_is_the_same_as_at_once(implementation):
    x, weight, ring, start, _, _ = case([0, 5], [6, 6], 6, 9, 40, jnp.bfloat16)
    one = jnp.ones_like(start)
    whole, whole_ring = short_conv(x, weight, ring, start, one * 6, implementation=implementation)
    for t in range(6):
        y, ring = short_conv(x[:, t : t + 1], weight, ring, start + t, one, implementation=implementation)
        np.testing.assert_array_equal(bits(y[:, 0]), bits(whole[:, t]))
    np.testing.assert_array_equal(bits(ring), bits(whole_ring))


def test_a_long_prompt_in_long_blocks(implementation):
    """Blocks of 8 rows, the last one not whole, and padding after it."""
    x, weight, ring, start, count, streams = case([5], [4101], 4109, 7, 8, jnp.bfloat16)
    y, after = short_conv(x, weight, ring, start, count, implementation=implementation)
    assert_rounds_to(y[0, :4101], conv64(f64(streams[0]), weight)[5 : 5 + 4101])
    assert not np.any(bits(y[0, 4101:]))
    for p in range(5 + 4101 - 7, 5 + 4101):
        np.testing.assert_array_equal(bits(after[0, p % 7]), bits(streams[0, p]))


def test_a_count_beyond_the_rows_is_all_rows(implementation):
    x, weight, ring, start, _, _ = case([5], [2], 2, 8, 32, jnp.bfloat16)
    all_rows, beyond = (
        short_conv(x, weight, ring, start, jnp.array([count]), implementation=implementation) for count in (2, 10)
    )
    for expected, found in zip(all_rows, beyond, strict=True):
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_other_numbers_of_taps(implementation, taps):
    x, weight, ring, start, count, streams = case([0, 6], [3, 2], 3, 8, 20, jnp.float32, taps=taps)
    y, _ = short_conv(x, weight, ring, start, count, implementation=implementation)
    for b, (s, c) in enumerate(((0, 3), (6, 2))):
        assert_rounds_to(y[b, :c], conv64(f64(streams[b]), weight)[s : s + c])


def test_a_sequence_does_not_depend_on_its_neighbours(implementation):
    x, weight, ring, start, count, _ = case([0, 2, 5], [4, 3, 2], 4, 7, 40, jnp.bfloat16)
    together, _ = short_conv(x, weight, ring, start, count, implementation=implementation)
    for b in range(3):
        alone, _ = short_conv(
            *(x[b : b + 1], weight, ring[b : b + 1], start[b : b + 1], count[b : b + 1]), implementation=implementation
        )
        np.testing.assert_array_equal(bits(alone[0]), bits(together[b]))


def test_the_oracle_rejects_a_conv_that_forgets_its_ring():
    x, weight, ring, start, count, streams = case([5], [4], 4, 7, 40, jnp.float32)
    y, _ = short_conv(x, weight, jnp.zeros_like(ring), start, count, implementation="xla")
    with pytest.raises(AssertionError, match="beyond the rounding"):
        assert_rounds_to(y[0], conv64(f64(streams[0]), weight)[5:9])


def test_bad_arguments_are_named():
    x, weight, ring, start, count, _ = case([0], [1], 2, 8, 16, jnp.float32)
    with pytest.raises(ValueError, match="ring has 2 rows; expected at least 3"):
        short_conv(x, weight, ring[:, :2], start, count)
    with pytest.raises(ValueError, match=r"weight has shape \[15, 4\]; expected \[16, any\]"):
        short_conv(x, weight[1:], ring, start, count)
    with pytest.raises(ValueError, match="ring is bfloat16; expected float32"):
        short_conv(x, weight, ring.astype(jnp.bfloat16), start, count)
    with pytest.raises(ValueError, match=r"x has shape \[1, 1, 1, 2, 16\]; expected \[any, any, any\]"):
        short_conv(x[None, None], weight, ring, start, count)
    with pytest.raises(ValueError, match=r"x has shape \[0, 1, 2, 16\], no summands; expected one or more"):
        short_conv(x[None][:0], weight, ring, start, count)
    with pytest.raises(ValueError, match="count is float32; expected int32"):
        short_conv(x, weight, ring, start, count.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"residual has shape \[1, 1, 16\]; expected \[1, 2, 16\]"):
        short_conv(x, weight, ring, start, count, residual=x[:, :1])
