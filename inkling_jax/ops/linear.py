"""Matrix product with the checkpoint's [out, in] weights."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import pallas_kernels as kernels


def precision(dtype: DTypeLike) -> lax.Precision:
    """float32 operands are multiplied as float32: the GPU's default would round them to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "*rows I"],
    w: Float[Array, "_ I"] | Sequence[Float[Array, "_ I"]],
    out_dtype: DTypeLike | None = None,
    *,
    scale: Float[Array, ""] | None = None,
    outputs: int | None = None,
    implementation: kernels.Implementation = "xla",
) -> Float[Array, "*rows _"]:
    """`x @ w.T * scale`, accumulated in float32 and rounded once to `out_dtype` (default: that of `x`).

    Several weights give their products side by side; with `outputs` only the first so many columns are made. The
    kernels have no gradient.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = kernels.linear(flat, w, scale=scale, outputs=outputs, out_dtype=out_dtype, implementation=implementation)
    return y.reshape(*x.shape[:-1], -1)
