"""4-bit words to weights in registers.

A word holds eight values of a row, the first in its lowest nibble. `Packing.value(codes, scales, t)` gives value t of
every word, so a tile of words gives columns t, t + 8, t + 16, ... of the weights; the rows that they multiply are
stored in that order (`split_columns`). A value times its block's scale has at most six significant bits and is exact
in bfloat16.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.fp4 import BLOCK_OF, VALUES_A_WORD

# An E2M1 magnitude, 3 bits, put where bfloat16 has the lowest two bits of its exponent and the first of its mantissa,
# is the value times 2^-126, the subnormal included; one integer product brings it there and the sign to bit 15. Two
# words of a row give two bfloat16 in one register: 2 byte permutes and 2 shifts for 16 values, and for each pair of
# values two masks, the integer product and the product with the scale. `half` selects the halves of both words.
PTX = """{{ .reg .b32 a, c, z; prmt.b32 a, $1, $2, {half}; {shift} and.b32 a, a, {mask}; mul.lo.u32 a, a, {places};
and.b32 a, a, 0x81c081c0; mov.b32 z, 0x80008000; {normal} fma.rn.bf16x2 $0, a, $3, z; }}"""
EVEN, ODD = dict(mask="0x000f000f", places="0x1040"), dict(mask="0x00f000f0", places="0x104")
# Where the scale may be any power of two, the value becomes a normal number first.
NORMAL = "mov.b32 c, 0x7E807E80; fma.rn.bf16x2 a, a, c, z;"


def split_columns(x: jax.Array) -> jax.Array:
    """[M, K] to [M, 8, K / 8]: row t holds the columns that value t of each word multiplies."""
    return x.reshape(x.shape[0], -1, VALUES_A_WORD).swapaxes(1, 2)


def e4m3(bits: jax.Array) -> jax.Array:
    """The numbers of float8_e4m3fn bits in float32: shifted they are float16 bits of the number times 2^-8."""
    bits = bits.astype(jnp.uint16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 2.0**8)


def float8(bits: jax.Array) -> jax.Array:
    """The same by the card's own conversion, from compute capability 8.9 on."""
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def e8m0(bits: jax.Array) -> jax.Array:
    """2^(bits - 127) in float32; 255 is NaN."""
    bits = bits.astype(jnp.uint32)
    power = lax.bitcast_convert_type(jnp.where(bits == 0, jnp.uint32(0x400000), bits << 23), jnp.float32)
    return jnp.where(bits == 255, jnp.nan, power)


def e2m1(nibble: jax.Array) -> jax.Array:
    """The values of the low four bits of each uint32 in float32."""
    bits = (((nibble & 8) << 12) | ((nibble & 7) << 9)).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**14


@dataclass(frozen=True, slots=True)
class Packing:
    """How the weights are packed. `capability` is NVIDIA's, whose instructions unpack to bfloat16; 0 does without."""

    format: str
    capability: int = 0

    @property
    def block(self) -> int:
        return BLOCK_OF[self.format]

    @property
    def shifted(self) -> bool:
        """Whether scales carry most of the 2^126 that unpacking leaves out: those of e4m3, at most 448, have room."""
        return self.capability > 0 and self.format == "nvfp4"

    @property
    def factor(self) -> float:
        """What `value` leaves to multiply by."""
        return 2.0**8 if self.shifted else 1.0

    def spread(self, bits: jax.Array, words: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Block scales [outputs, blocks] as numbers, one for each word [outputs, words]."""
        scale = e8m0(bits) if self.format == "mxfp4" else e4m3(bits) if self.capability < 89 else float8(bits)
        scale = (scale * 2.0**118 if self.shifted else scale).astype(dtype)
        (rows, blocks), each = bits.shape, words // bits.shape[1]
        return jnp.broadcast_to(scale[:, :, None], (rows, blocks, each)).reshape(rows, words)

    def value(self, codes: jax.Array, scales: jax.Array, t: int) -> jax.Array:
        """Value t of every word, times its scale."""
        if not self.capability:
            return (e2m1(codes >> (4 * t)) * scales.astype(jnp.float32)).astype(scales.dtype)
        asm = PTX.format(
            half="0x7632" if t >= 4 else "0x5410",
            shift="shr.u32 a, a, 8;" if t % 4 >= 2 else "",
            normal="" if self.shifted else NORMAL,
            **(ODD if t % 2 else EVEN),
        )
        [out] = plt.elementwise_inline_asm(
            asm,
            args=[codes, scales],
            constraints="=r,r,r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )
        return out
