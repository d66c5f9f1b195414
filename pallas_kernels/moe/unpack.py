"""4-bit words to weights in registers.

A word holds eight values of a row, the first in its lowest nibble. `unpack(codes, scales, t, ...)` gives value t of
every word, so the columns of a tile of words are the columns t, t + 8, t + 16, ... of the weights; the rows that they
are multiplied with are stored in that order (`split_columns`). A value times its block's scale has at most six
significant bits and is exact in bfloat16.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.fp4 import VALUES_A_WORD

# An E2M1 magnitude, 3 bits, put where bfloat16 has the lowest two bits of its exponent and the first of its mantissa,
# is the value times 2^-126, the subnormal included. Two words of a row give two bfloat16 in one register: 2 byte
# permutes for 16 values, then for each pair of values 2 shifts, 2 logic operations and the products.
# By nibble of a half word: the shifts of its magnitude and of its sign.
SHIFTS = (
    ("shl.b32 m, a, 6;", "shl.b32 s, a, 12;"),
    ("shl.b32 m, a, 2;", "shl.b32 s, a, 8;"),
    ("shr.u32 m, a, 2;", "shl.b32 s, a, 4;"),
    ("shr.u32 m, a, 6;", "mov.b32 s, a;"),
)
PTX = """{{ .reg .b32 a, m, s, z, c; prmt.b32 a, $1, $2, {half}; {magnitude} {sign} mov.b32 z, 0x80008000;
and.b32 m, m, 0x01c001c0; lop3.b32 m, s, 0x80008000, m, 0xEA; {normal} fma.rn.bf16x2 $0, m, $3, z; }}"""
# Times 2^126 first where the scale may be any power of two; e4m3 scales come times 2^118.
NORMAL = "mov.b32 c, 0x7E807E80; fma.rn.bf16x2 m, m, c, z;"


def split_columns(x: jax.Array) -> jax.Array:
    """[M, K] to [M, 8, K / 8]: row t holds the columns that value t of each word multiplies."""
    return x.reshape(x.shape[0], -1, VALUES_A_WORD).swapaxes(1, 2)


def e4m3(bits: jax.Array) -> jax.Array:
    """The numbers of float8_e4m3fn bits in float32: shifted they are float16 bits of the number times 2^-8."""
    bits = bits.astype(jnp.uint16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 2.0**8)


def e8m0(bits: jax.Array) -> jax.Array:
    """2^(bits - 127) in float32; 255 is NaN."""
    bits = bits.astype(jnp.uint32)
    power = lax.bitcast_convert_type(jnp.where(bits == 0, jnp.uint32(0x400000), bits << 23), jnp.float32)
    return jnp.where(bits == 255, jnp.nan, power)


def e2m1(nibble: jax.Array) -> jax.Array:
    """The values of the low four bits of each uint32 in float32."""
    bits = (((nibble & 8) << 12) | ((nibble & 7) << 9)).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**14
