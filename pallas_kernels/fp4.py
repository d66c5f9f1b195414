"""4-bit weights as checkpoints store them: E2M1 values, two a byte, with a scale a block (spec: NVFP4, MXFP4).

Arrays are kept as uint32 words, eight values each, the first in the lowest nibble: one-byte arrays of more than 2 GiB
would get 32-bit offsets in a kernel, and an Inkling layer's experts have 2.4 GB.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

VALUES_A_WORD = 8
BLOCK_OF = {"nvfp4": 16, "mxfp4": 32}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the low three bits; the fourth is the sign


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
    """The weights in `dtype`, of `w.shape`; the product of the three factors is exact in float32 but for its rounding."""
    shift = 4 * jnp.arange(VALUES_A_WORD, dtype=jnp.uint32)
    nibble = (w.codes[..., None] >> shift) & 15
    value = jnp.asarray(E2M1, jnp.float32)[nibble & 7] * jnp.where(nibble & 8, -1.0, 1.0)
    blocks = value.reshape(*w.scales.shape, w.block) * block_scales(w)[..., None]
    if w.expert_scale is not None:
        blocks *= w.expert_scale.reshape(*w.expert_scale.shape, *(1,) * (blocks.ndim - w.expert_scale.ndim))
    return blocks.reshape(w.shape).astype(dtype)


def block_scales(w: FP4) -> Float[Array, "..."]:
    """The scale of every block in float32: 2^(bits - 127) for "mxfp4", the float8 number for "nvfp4"."""
    if w.format == "nvfp4":
        return jax.lax.bitcast_convert_type(w.scales, jnp.float8_e4m3fn).astype(jnp.float32)
    return jax.lax.bitcast_convert_type(w.scales.astype(jnp.uint32) << 23, jnp.float32)
