"""The public function."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import check_dtype, check_shape, resolve
from pallas_kernels.router.reference import router_reference
from pallas_kernels.router.triton import router_triton

OP = "router"


def router(
    logits: Float[Array, "M ES"],
    bias: Float[Array, " E"],
    scale: Float[Array, ""],
    *,
    experts_per_token: int,
    implementation: str | None = None,
) -> tuple[Int32[Array, "M A"], Float[Array, "M AS"]]:
    """Expert ids, best first, and float32 weights, the shared experts' last (spec: MoE).

    The first E columns of `logits` belong to the routed experts, the other S to the shared ones. Chosen are the A
    largest `sigmoid(logit) + bias`, ties to the lowest index; the weights are the softmax over the log-sigmoids of the
    un-biased logits of the chosen and the shared, times `scale`. A NaN among the logits is chosen and makes the row's
    weights NaN. Everything is float32. Raises ValueError for a wrong shape, dtype or number of experts,
    NotImplementedError when the asked implementation cannot run here.
    """
    check(logits, bias, scale, experts_per_token)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or logits.shape[0] == 0:
        return router_reference(logits, bias, scale, experts_per_token)
    return router_triton(logits, bias, scale, experts_per_token, chosen)


def check(logits: jax.Array, bias: jax.Array, scale: jax.Array, experts_per_token: int) -> None:
    check_shape(OP, "logits", logits, (None, None))
    check_shape(OP, "bias", bias, (None,))
    check_shape(OP, "scale", scale, ())
    for name, array in (("logits", logits), ("bias", bias), ("scale", scale)):
        check_dtype(OP, name, array, (jnp.float32,))
    if bias.shape[0] > logits.shape[1]:
        raise ValueError(
            f"{OP}: bias has {bias.shape[0]} experts and logits {logits.shape[1]} columns; expected as many or more"
        )
    if not 1 <= experts_per_token <= bias.shape[0]:
        raise ValueError(
            f"{OP}: experts_per_token is {experts_per_token}; expected 1 to {bias.shape[0]}, the routed experts"
        )
