"""Root-mean-square normalisation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows C"], weight: Float[Array, " C"], eps: float) -> Float[Array, "*rows C"]:
    """`x * rsqrt(mean(x^2) + eps) * weight` in float32, rounded once, at the end."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
