"""The definition, in jnp."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


def router_reference(
    x: Float[Array, "M H"],
    weight: Float[Array, "ES H"],
    bias: Float[Array, " E"],
    scale: Float[Array, ""],
    experts_per_token: int,
    route_scale: float,
) -> tuple[Int32[Array, "M A"], Float[Array, "M AS"]]:
    """Largest sigmoid(logit) + bias, and the softmax of the log-sigmoids of the chosen and the shared, scaled."""
    contract = (((1,), (1,)), ((), ()))
    # float32 operands: their products are those of bfloat16 exactly, and a CPU rounds a bfloat16 product.
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    logits = lax.dot_general(x, weight, contract, precision=lax.Precision.HIGHEST)
    routed, shared = logits[:, : bias.shape[0]], logits[:, bias.shape[0] :]
    scores = jax.nn.sigmoid(routed) + bias
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)  # top_k ranks a NaN by its sign: first, or last and unseen
    _, ids = lax.top_k(scores, experts_per_token)  # ties to the lowest index
    chosen = jnp.concatenate([jnp.take_along_axis(routed, ids, axis=1), shared], axis=1)
    return ids, jax.nn.softmax(jax.nn.log_sigmoid(chosen), axis=-1) * (route_scale * scale)
