"""SwiGLU: the gated unit of the dense MLP and of every expert."""

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
    flat = kernels.linear_swiglu(x.reshape(-1, x.shape[-1]), w13, implementation=implementation)
    h = flat.reshape(*x.shape[:-1], -1)
    return linear(h, w2, out_dtype, scale=scale, implementation=implementation)
