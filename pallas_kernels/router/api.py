"""The public function."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import check_dtype, check_float, check_shape, resolve
from pallas_kernels.router.reference import router_reference
from pallas_kernels.router.triton import router_triton

OP = "router"


def router(
    x: Float[Array, "M H"],
    weight: Float[Array, "ES H"],
    bias: Float[Array, " E"],
    scale: Float[Array, ""],
    *,
    experts_per_token: int,
    route_scale: float = 1.0,
    implementation: str | None = None,
) -> tuple[Int32[Array, "M A"], Float[Array, "M AS"]]:
    """Expert ids, best first, and float32 weights, the shared experts' last (spec: MoE).

    The logits are x weight^T, summed and kept in float32: the first E rows of `weight` belong to the routed experts,
    the other S to the shared ones. Chosen are the A largest `sigmoid(logit) + bias`, ties to the lowest index; the
    weights are the softmax over the log-sigmoids of the un-biased logits of the chosen and the shared, times
    `route_scale * scale`. A NaN among the logits is chosen and makes the row's weights NaN. A row's result does not
    depend on its neighbours. Raises ValueError for a wrong shape, dtype or number of experts, NotImplementedError when
    the asked implementation cannot run here.
    """
    check(x, weight, bias, scale, experts_per_token)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or x.size == 0:
        return router_reference(x, weight, bias, scale, experts_per_token, route_scale)
    return router_triton(x, weight, bias, scale, experts_per_token, route_scale, chosen)


def check(x: jax.Array, weight: jax.Array, bias: jax.Array, scale: jax.Array, experts_per_token: int) -> None:
    check_shape(OP, "x", x, (None, None))
    check_float(OP, "x", x)
    check_shape(OP, "weight", weight, (None, x.shape[1]))
    check_float(OP, "weight", weight, like=x)
    check_shape(OP, "bias", bias, (None,))
    check_shape(OP, "scale", scale, ())
    for name, array in (("bias", bias), ("scale", scale)):
        check_dtype(OP, name, array, (jnp.float32,))
    if bias.shape[0] > weight.shape[0]:
        raise ValueError(
            f"{OP}: bias has {bias.shape[0]} experts and weight {weight.shape[0]} rows; expected as many or more"
        )
    if not 1 <= experts_per_token <= bias.shape[0]:
        raise ValueError(
            f"{OP}: experts_per_token is {experts_per_token}; expected 1 to {bias.shape[0]}, the routed experts"
        )
