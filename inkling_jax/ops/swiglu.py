"""SwiGLU: the gated unit of the dense MLP and of every expert."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels

from .linear import linear


def swiglu(
    x: Float[Array, "*rows H"],
    w13: Float[Array, "2 F H"],
    w2: Float[Array, "H F"],
    out_dtype: DTypeLike = jnp.float32,
    *,
    scale: Float[Array, ""] | None = None,
    implementation: kernels.Implementation = "xla",
) -> Float[Array, "*rows H"]:
    """`w2 (silu(w13[0] x) * w13[1] x) * scale` in float32, with one rounding before `w2`, then to `out_dtype`."""
    if implementation != "xla":
        flat = kernels.linear_swiglu(x.reshape(-1, x.shape[-1]), w13, implementation=implementation)
        h = flat.reshape(*x.shape[:-1], -1)
    else:
        # One product: XLA copies a half of the weights before it multiplies by it.
        gate, up = jnp.split(linear(x, w13.reshape(-1, w13.shape[-1]), jnp.float32), 2, axis=-1)
        h = (jax.nn.silu(gate) * up).astype(x.dtype)
    return linear(h, w2, out_dtype, scale=scale, implementation=implementation)
