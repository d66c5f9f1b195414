"""SwiGLU: the gated unit of the dense MLP and of every expert."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .linear import linear


def swiglu(x: Float[Array, "*rows H"], w13: Float[Array, "2 F H"], w2: Float[Array, "H F"]) -> Float[Array, "*rows H"]:
    """`w2 (silu(w13[0] x) * w13[1] x)` in float32: silu and product in float32, one rounding before `w2`."""
    # One product: XLA copies a half of the weights before it multiplies by it.
    gate, up = jnp.split(linear(x, w13.reshape(-1, w13.shape[-1]), jnp.float32), 2, axis=-1)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), w2, jnp.float32)
