"""Which experts a row visits, and with which weights."""

from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, router


def route(
    x: Float[Array, "M H"],
    weight: Float[Array, "ES H"],
    bias: Float[Array, " E"],
    scale: Float[Array, ""],
    experts_per_token: int,
    route_scale: float = 1.0,
    implementation: Implementation = "xla",
) -> tuple[Int[Array, "M A"], Float[Array, "M AS"]]:
    """Expert ids and float32 weights, the shared experts' weights last.

    The first E rows of `weight` score the routed experts, the rest the shared ones. Chosen are the largest
    `sigmoid(logit) + bias` (ties to the lowest index); the weights come from the un-biased logits of the chosen and
    the shared experts, a softmax over their log-sigmoids, times `route_scale * scale`.
    """
    return router(
        *(x, weight, bias, scale),
        experts_per_token=experts_per_token,
        route_scale=route_scale,
        implementation=implementation,
    )
