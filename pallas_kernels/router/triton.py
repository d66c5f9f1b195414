"""One warp a row: as many arg-max rounds as experts are chosen, all in registers."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Implementation, next_power_of_2, pallas_call


def log_sigmoid(x: jax.Array) -> jax.Array:
    return jnp.minimum(x, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(x)))


def choose(scores: jax.Array, chosen: int, lanes: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The lanes of the largest scores, best first, ties to the lowest: in a tile like `lanes`, and one by one.

    A NaN counts as the largest, so that it reaches the weights and can be seen.
    """
    left = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    ids, each = jnp.zeros_like(lanes), []
    for i in range(chosen):
        best = lax.argmax(left, 0, jnp.int32)
        left = jnp.where(jnp.arange(left.shape[0]) == best, -jnp.inf, left)
        ids = jnp.where(lanes == i, best, ids)
        each.append(best)
    return ids, each


def router_kernel(logits_ref, bias_ref, scale_ref, ids_ref, weights_ref, *, experts: int, shared: int, chosen: int):
    t = pl.program_id(0)
    expert = jnp.arange(next_power_of_2(experts))
    real = expert < experts
    logits = plt.load(logits_ref.at[t, expert], mask=real, other=0.0)
    scores = jax.nn.sigmoid(logits) + plt.load(bias_ref.at[expert], mask=real, other=0.0)
    lanes = jnp.arange(next_power_of_2(chosen + shared))
    ids, each = choose(jnp.where(real, scores, -jnp.inf), chosen, lanes)
    is_shared = (lanes >= chosen) & (lanes < chosen + shared)
    own = plt.load(logits_ref.at[t, experts + lanes - chosen], mask=is_shared, other=0.0)
    for i, best in enumerate(each):
        own = jnp.where(lanes == i, logits_ref[t, best], own)
    log_weight = jnp.where(lanes < chosen + shared, log_sigmoid(own), -jnp.inf)
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    plt.store(ids_ref.at[t, lanes], ids, mask=lanes < chosen)
    plt.store(weights_ref.at[t, lanes], weight / jnp.sum(weight) * scale_ref[0], mask=lanes < chosen + shared)


def router_triton(
    logits: jax.Array, bias: jax.Array, scale: jax.Array, experts_per_token: int, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    """The kernel's call; shapes as in the reference."""
    rows, experts = logits.shape[0], bias.shape[0]
    shared = logits.shape[1] - experts
    kernel = functools.partial(router_kernel, experts=experts, shared=shared, chosen=experts_per_token)
    call = pallas_call(
        kernel,
        op="router",
        implementation=implementation,
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, experts_per_token), jnp.int32),
            jax.ShapeDtypeStruct((rows, experts_per_token + shared), jnp.float32),
        ),
        num_warps=1,
        num_stages=1,
    )
    ids, weights = call(logits, bias, scale.reshape(1))
    return ids, weights
