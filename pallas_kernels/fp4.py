"""4-bit weights as checkpoints store them: E2M1 values, two a byte, with a scale a block (NVFP4, MXFP4).

Arrays are kept as uint32 words, eight values each, the first in the lowest nibble: one-byte arrays of more than 2 GiB
would get 32-bit offsets in a kernel, and an Inkling layer's experts have 2.4 GB.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

VALUES_A_WORD = 8
BLOCK_OF = {"nvfp4": 16, "mxfp4": 32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the low three bits; the fourth is the sign

# The largest scale that amax / 6 may ask for in an expert: 6 steps of float8_e4m3fn below its largest, 448, so that a
# block may also map its largest magnitude to 4 instead of 6, and a little beyond.
_LARGEST = 256.0
# Scales tried around amax / 6, in steps of float8_e4m3fn. Gaussian weights gain nothing from a wider range.
_STEPS = (0, -2, -1, 1, 2, 3, 4, 5, 6)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FP4:
    """Weights [E, ..., I], packed along the input: value = E2M1 * scale of its block * scale of its expert.

    codes: uint32 [E, ..., I/8]. scales: uint8 [E, ..., I/block], the bits of float8_e4m3fn (blocks of 16, "nvfp4") or
    of an e8m0 exponent (blocks of 32, "mxfp4"). expert_scale: float32 [E] for "nvfp4", None for "mxfp4".
    """

    codes: jax.Array
    scales: jax.Array
    expert_scale: jax.Array | None
    format: str = field(metadata={"static": True})

    @property
    def block(self) -> int:
        """How many values of a row share a scale."""
        return BLOCK_OF[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unpacked weights."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * VALUES_A_WORD)

    def __getitem__(self, expert: jax.Array | int) -> "FP4":
        """One expert's, or several experts', weights, still packed."""
        scale = None if self.expert_scale is None else self.expert_scale[expert]
        return FP4(self.codes[expert], self.scales[expert], scale, self.format)


def dequantize(w: FP4, dtype: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "..."]:
    """The weights in `dtype`, of `w.shape`.

    Exact in float32: E2M1 times the scale of its block has at most 6 bits, and the scale of the expert adds one
    rounding. "mxfp4" keeps results below the normal range too, which a device may flush to zero when it multiplies.
    """
    shift = 4 * jnp.arange(VALUES_A_WORD, dtype=jnp.uint32)
    nibbles = ((w.codes[..., None] >> shift) & 15).reshape(*w.scales.shape, w.block)
    magnitude = (nibbles & 7).astype(jnp.int32)
    if w.format == "mxfp4":
        values = _times_power(magnitude, w.scales[..., None])
    else:
        values = _e2m1(magnitude) * block_scales(w)[..., None]
    values = jnp.where(nibbles >= 8, -values, values)
    if w.expert_scale is not None:
        values *= w.expert_scale.reshape(*w.expert_scale.shape, *(1,) * (values.ndim - w.expert_scale.ndim))
    return values.reshape(w.shape).astype(dtype)


def block_scales(w: FP4) -> Float[Array, "..."]:
    """The scale of every block in float32: 2^(bits - 127), NaN for 255 ("mxfp4"); the float8 number ("nvfp4").

    2^-127, the e8m0 scale of bits 0, is below float32's normal range: a product with it may be flushed to zero.
    """
    return _in_float32(w.scales, w.format)


def _in_float32(bits: UInt[Array, "..."], format: str) -> Float[Array, "..."]:
    if format == "nvfp4":
        return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    wide = bits.astype(jnp.uint32)
    wide = jnp.where(bits == 0, jnp.uint32(1 << 22), jnp.where(bits == 255, jnp.uint32(0x7FC00000), wide << 23))
    return lax.bitcast_convert_type(wide, jnp.float32)


def _e2m1(magnitude: Int[Array, "..."]) -> Float[Array, "..."]:
    """The numbers of three-bit codes, by arithmetic: a table would be gathered from value by value."""
    normal = lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
    return jnp.where(magnitude < 2, magnitude.astype(jnp.float32) / 2, normal)


def _times_power(magnitude: Int[Array, "..."], scale: UInt[Array, "..."]) -> Float[Array, "..."]:
    """E2M1 times 2^(scale - 127), put together bit by bit: overflow is infinite, scale 255 is NaN."""
    scale = scale.astype(jnp.int32)
    exponent = scale + (magnitude >> 1) - 1
    significand = jnp.where(magnitude < 2, 2 * magnitude, 2 + (magnitude & 1)) << 22
    normal = (exponent << 23) + significand - (1 << 23)
    bits = jnp.where(exponent > 0, normal, significand >> jnp.maximum(1 - exponent, 0))
    bits = jnp.where(exponent > 254, 0x7F800000, bits)
    bits = jnp.where(scale == 255, 0x7FC00000, jnp.where(magnitude == 0, 0, bits))
    return lax.bitcast_convert_type(bits, jnp.float32)


@partial(jax.jit, static_argnames="format")
def quantize(weights: Float[Array, "E *rows I"], format: str) -> FP4:
    """Weights in 4 bits, with the scale of every block chosen among several to make its squared error least.

    "nvfp4" tries nine float8 scales around amax / 6, "mxfp4" the exponent that OCP's rule gives and the next, by which
    the largest value is not clipped. Relative error of Gaussian weights: 0.081 (with amax / 6 alone 0.095) and 0.112
    (with OCP's rule alone 0.115).

    Raises ValueError for an unknown format and for an input that is not whole blocks. Weights must be finite.
    """
    if format not in BLOCK_OF:
        raise ValueError(f"format: expected {' or '.join(BLOCK_OF)}, found {format!r}")
    block = BLOCK_OF[format]
    if weights.shape[-1] % block:
        raise ValueError(f"weights: an input of {weights.shape[-1]} is not a multiple of {format}'s block, {block}")
    blocks = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, block)
    expert_scale = None
    if format == "nvfp4":
        expert_scale = _expert_scale(blocks)
        blocks /= expert_scale.reshape(-1, *(1,) * (blocks.ndim - 1))
    scales = _best_scales(blocks, _candidates(jnp.abs(blocks).max(-1), format), format)
    codes = _code(blocks / _in_float32(scales, format)[..., None])
    words = codes.reshape(*weights.shape[:-1], -1, VALUES_A_WORD)
    words <<= 4 * jnp.arange(VALUES_A_WORD, dtype=jnp.uint32)
    return FP4(words.sum(-1, dtype=jnp.uint32), scales, expert_scale, format)


def _expert_scale(blocks: Float[Array, "E *rows"]) -> Float[Array, " E"]:
    amax = jnp.abs(blocks).reshape(len(blocks), -1).max(-1)
    return jnp.where(amax > 0, jnp.maximum(amax / (E2M1[-1] * _LARGEST), jnp.finfo(jnp.float32).tiny), 1.0)


def _candidates(amax: Float[Array, "*blocks"], format: str) -> list[UInt[Array, "*blocks"]]:
    """Bits of scales to try for blocks whose largest magnitudes are `amax`, the plain choice first; never a zero."""
    if format == "nvfp4":
        plain = lax.bitcast_convert_type((amax / E2M1[-1]).astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)
        steps, largest = _STEPS, 126
    else:
        plain = (lax.bitcast_convert_type(amax, jnp.int32) >> 23) - 2  # OCP's rule: 6 has the exponent 2
        steps, largest = (0, 1), 253
    return [jnp.clip(plain + step, 1, largest).astype(jnp.uint8) for step in steps]


def _best_scales(
    blocks: Float[Array, "*blocks K"], candidates: list[UInt[Array, "*blocks"]], format: str
) -> UInt[Array, "*blocks"]:
    """The scale of the least squared error for each block, the first of equals.

    Sum and search are written out, and on magnitudes: XLA's CPU backend then vectorises across the blocks, and is ten
    times faster than with a reduction or a loop (jax 0.11.2, two cores, 2026-11-30).
    """
    magnitudes = [jnp.abs(blocks[..., k]) for k in range(blocks.shape[-1])]
    best, least = candidates[0], jnp.full(blocks.shape[:-1], jnp.inf, jnp.float32)
    for bits in candidates:
        scale = _in_float32(bits, format)
        inverse, error = 1 / scale, jnp.zeros_like(scale)
        for x in magnitudes:
            error += jnp.square(x - _nearest(x * inverse) * scale)
        best, least = jnp.where(error < least, bits, best), jnp.minimum(error, least)
    return best


def _nearest(magnitude: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest E2M1 magnitude, the even code of two equally near."""
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    return jnp.minimum(jnp.round(magnitude / step) * step, E2M1[-1])


def _code(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """The four bits of the E2M1 number nearest to `x`."""
    m = _nearest(jnp.abs(x))
    code = jnp.where(m < 2, 2 * m, jnp.where(m < 4, m + 2, m / 2 + 4))
    return code.astype(jnp.uint32) | jnp.where(jnp.signbit(x), jnp.uint32(8), jnp.uint32(0))
