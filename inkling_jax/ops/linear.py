"""Matrix product with the checkpoint's [out, in] weights."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def precision(dtype: DTypeLike) -> lax.Precision:
    """float32 operands are multiplied as float32: the GPU's default would round them to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def linear(
    x: Float[Array, "*rows I"], w: Float[Array, "O I"], out_dtype: DTypeLike | None = None
) -> Float[Array, "*rows O"]:
    """`x @ w.T`, accumulated in float32 and rounded once to `out_dtype` (default: that of `x`)."""
    y = jax.lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=precision(x.dtype), preferred_element_type=jnp.float32
    )
    return y.astype(out_dtype or x.dtype)
