"""The definitions, in jnp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def product(x: Float[Array, "M I"], w: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """x w^T in float32; float32 operands are multiplied as such, not as TF32."""
    contract = (((1,), (1,)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)


def linear_reference(
    x: Float[Array, "M I"],
    weights: Sequence[Float[Array, "_ I"]],
    scale: Float[Array, ""] | None,
    outputs: int,
    out_dtype: DTypeLike,
) -> Float[Array, "M O"]:
    """The first `outputs` columns of the products side by side, times `scale`, each rounded once."""

    def one(w: Float[Array, "O I"]) -> Float[Array, "M O"]:
        y = product(x, w)
        return (y if scale is None else y * scale.astype(jnp.float32)).astype(out_dtype)

    return jnp.concatenate([one(w) for w in weights], axis=1)[:, :outputs]


def swiglu_reference(x: Float[Array, "M H"], w13: Float[Array, "2 F H"]) -> Float[Array, "M F"]:
    """silu(w13[0] x) * w13[1] x in float32, rounded once."""
    # One product: XLA copies a half of the weights before it multiplies by it.
    gate, up = jnp.split(product(x, w13.reshape(-1, w13.shape[-1])), 2, axis=1)
    return (jax.nn.silu(gate) * up).astype(x.dtype)
