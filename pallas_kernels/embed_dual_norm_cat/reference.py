"""The definition, in jnp: the unfused sequence, the inner rounding included."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._rows import rms_norm


def embed_dual_norm_cat_reference(
    hidden: Float[Array, "T H"],
    embeds: Float[Array, "T H"],
    hidden_weight: Float[Array, " H"],
    embed_weight: Float[Array, " H"],
    pre_norm_weight: Float[Array, " H"] | None,
    eps: float,
) -> Float[Array, "T 2*H"]:
    """[RMSNorm(hidden) | RMSNorm(e)], where e is embeds, through the pre-norm and its rounding if there is one."""
    if pre_norm_weight is not None:
        embeds = rms_norm(embeds, pre_norm_weight, eps)
    return jnp.concatenate([rms_norm(hidden, hidden_weight, eps), rms_norm(embeds, embed_weight, eps)], axis=-1)
