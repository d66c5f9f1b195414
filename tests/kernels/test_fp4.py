"""4-bit weights: unpacking against tables spelled out here, and the error that quantising leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp4 import BLOCK_OF, E2M1, FP4, block_scales, quantize
from pallas_kernels.fp4 import dequantize as eager

dequantize = jax.jit(eager)
FORMATS = ("nvfp4", "mxfp4")
# By the four bits of a code: sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, table 5.3.3).
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def float8(bits: int) -> float:
    """float8_e4m3fn by its definition."""
    sign, exponent, mantissa = -1 if bits & 128 else 1, bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def power(bits: int) -> float:
    """e8m0 by its definition."""
    return np.nan if bits == 255 else 2.0 ** (bits - 127)


SCALES = {"nvfp4": [float8(bits) for bits in range(256)], "mxfp4": [power(bits) for bits in range(256)]}


def every_byte_with_every_scale(format: str) -> tuple[FP4, np.ndarray]:
    """Rows for the 256 scales; in each, the bytes 0 to 255, the low nibble first. The weights and their values."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (1, 256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, 512 // BLOCK_OF[format]))
    values = np.array([[VALUES[byte & 15], VALUES[byte >> 4]] for byte in range(256)]).reshape(1, 1, 512)
    expected = values * np.array(SCALES[format])[None, :, None]
    expert = jnp.ones(1, jnp.float32) if format == "nvfp4" else None
    return FP4(jnp.asarray(codes.view("<u4")), jnp.asarray(scales), expert, format), expected


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_with_every_scale_is_exact(format, jit):
    w, expected = every_byte_with_every_scale(format)
    found = np.asarray(dequantize(w) if jit else eager(w))
    with np.errstate(over="ignore"):
        exact = expected.astype(np.float32)  # infinite above 2^128, and below 2^-126 with fewer digits: as it should be
    numbers = ~np.isnan(exact)
    assert numbers.sum() >= 254 * 512
    np.testing.assert_array_equal(np.isnan(found), ~numbers)
    np.testing.assert_array_equal(bits(found)[numbers], bits(exact)[numbers])


@pytest.mark.parametrize("format", FORMATS)
def test_scales_are_those_of_the_table(format):
    w, _ = every_byte_with_every_scale(format)
    found = np.asarray(block_scales(w))[0, :, 0]
    exact = np.array(SCALES[format], np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    np.testing.assert_array_equal(bits(found)[~np.isnan(exact)], bits(exact)[~np.isnan(exact)])
    if format == "mxfp4":
        assert bits(found)[0] == bits(np.float32(2.0**-127))
        assert np.isnan(found[255])


def drawn(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_blocks_rows_and_experts_each_have_their_own_scale():
    """Values against an index-by-index reading of the arrays."""
    rng = np.random.default_rng(1)
    for format, block in BLOCK_OF.items():
        codes = rng.integers(0, 2**32, (3, 2, 2, 8), np.uint32)
        scales = rng.integers(100, 120, (3, 2, 2, 64 // block), np.uint8)
        expert = np.array([0.3, 5.0, 1e-4], np.float32) if format == "nvfp4" else None
        w = FP4(jnp.asarray(codes), jnp.asarray(scales), None if expert is None else jnp.asarray(expert), format)
        found = np.asarray(dequantize(w))
        assert w.shape == found.shape == (3, 2, 2, 64) and w.block == block
        for index in np.ndindex(3, 2, 2, 64):
            *row, i = index
            nibble = int(codes[(*row, i // 8)]) >> 4 * (i % 8) & 15
            exact = np.float32(VALUES[nibble] * SCALES[format][scales[(*row, i // block)]])
            assert found[index] == (exact if expert is None else exact * expert[index[0]])
        np.testing.assert_array_equal(dequantize(w[1]), found[1])
        np.testing.assert_array_equal(dequantize(w[jnp.array([2, 0])]), found[[2, 0]])


def relative_error(weights, format) -> float:
    exact = np.asarray(weights, np.float64)
    found = np.asarray(dequantize(quantize(jnp.asarray(weights), format)), np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(("format", "least", "most"), [("nvfp4", 0.079, 0.083), ("mxfp4", 0.110, 0.113)])
def test_error_on_gaussian_weights(format, least, most, dtype):
    assert least < relative_error(drawn((2, 128, 512), dtype=dtype) / 80, format) <= most


@pytest.mark.parametrize("format", FORMATS)
def test_no_scale_is_better_than_the_one_that_is_chosen(format):
    """Of every scale there is, for a few blocks; float64 decides."""
    block = BLOCK_OF[format]
    weights = drawn((1, 1, 40 * block), seed=3)
    weights[0, 0, : 8 * block] *= np.exp(drawn(8 * block, seed=4))  # heavier tails as well
    w = quantize(jnp.asarray(weights), format)
    exact = weights.reshape(-1, block).astype(float)
    expert = 1.0 if w.expert_scale is None else float(w.expert_scale[0])
    scales = np.array(SCALES[format][1:254]) * expert
    scales = np.sort(scales[scales > 0])
    grid = np.array(VALUES, float)
    nearest = np.abs(exact[:, None, :, None] - scales[:, None, None] * grid).min(-1)
    best = (nearest**2).sum(-1).min(1)
    found = ((np.asarray(dequantize(w), float).reshape(-1, block) - exact) ** 2).sum(1)
    assert (found <= best * (1 + 1e-4)).mean() >= 0.95  # the search is over the scales near amax / 6
    assert (found <= best * 1.1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_the_nearest(format):
    weights = drawn((4, 2, 64), seed=5)
    w = quantize(jnp.asarray(weights), format)
    scales = np.repeat(np.asarray(block_scales(w), float), w.block, axis=-1)
    if w.expert_scale is not None:
        scales *= np.asarray(w.expert_scale, float)[:, None, None]
    exact = weights.astype(float)
    nearest = np.abs(exact[..., None] - scales[..., None] * np.array(VALUES, float)).min(-1)
    np.testing.assert_allclose(np.abs(np.asarray(dequantize(w), float) - exact), nearest, rtol=0, atol=1e-6)


def test_what_a_format_can_hold_is_held_exactly():
    values = np.tile(np.array(VALUES * 4, np.float32), (4, 2, 1))
    for scale in (2.0**-100, 2.0**-7, 1.0, 2.0**100):
        weights = values * np.float32(scale)
        np.testing.assert_array_equal(dequantize(quantize(jnp.asarray(weights), "mxfp4")), weights)
    weights = values * np.repeat(np.float32([1, 0.5, 0.25, 0.0625]), 16)
    np.testing.assert_array_equal(dequantize(quantize(jnp.asarray(weights), "nvfp4")), weights)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_extremes(format):
    """Never NaN: an expert of zeros, a block of zeros, the largest bfloat16 and the smallest."""
    weights = np.zeros((4, 2, 64), np.float32)
    weights[1, 0, :32] = drawn(32)
    weights[2] = drawn((2, 64)) * np.float32(1e30)
    weights[2, 0, 0] = 3.3e38
    weights[3] = 1e-38
    found = np.asarray(dequantize(quantize(jnp.asarray(weights), format)))
    assert np.isfinite(found).all()
    assert not found[0].any() and not found[1, 1].any() and not found[1, 0, 32:].any()
    assert abs(found[2, 0, 0] / 3.3e38 - 1) <= 0.25


def test_signs_and_order_within_a_word():
    weights = np.zeros((4, 2, 64), np.float32)
    weights[0, 0, :5] = [6, -4, 3, -0.5, 1.5]
    for format in FORMATS:
        w = quantize(jnp.asarray(weights), format)
        nibbles = [int(w.codes[0, 0, 0]) >> 4 * i & 15 for i in range(8)]
        assert nibbles == [7, 14, 5, 9, 3, 0, 0, 0]
    assert tuple(VALUES[:8]) == E2M1


def test_wrong_arguments():
    with pytest.raises(ValueError, match="format: expected nvfp4 or mxfp4, found 'int4'"):
        quantize(jnp.zeros((1, 1, 32)), "int4")
    with pytest.raises(ValueError, match=r"an input of 48 is not a multiple of mxfp4's block, 32"):
        quantize(jnp.zeros((1, 1, 48)), "mxfp4")
