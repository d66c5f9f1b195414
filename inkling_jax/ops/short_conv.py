"""The short convolution that Inkling puts on keys, values and both residual branches."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def short_conv(
    x: Float[Array, "B T C"], left: Float[Array, "B L C"], weight: Float[Array, "C W"]
) -> Float[Array, "B T C"]:
    """Depthwise causal convolution plus its own input: `y_t = x_t + sum_j w_j x_{t-W+1+j}`.

    `left` holds the W - 1 inputs before `x` (zeros before the start of a sequence); the last tap is the current
    row. Accumulated in float32, oldest tap first, the input added last, rounded once.
    """
    rows = x.shape[1]
    inputs = jnp.concatenate([left, x], axis=1).astype(jnp.float32)
    taps = weight.astype(jnp.float32)
    total = inputs[:, :rows] * taps[:, 0]
    for j in range(1, weight.shape[1]):
        total = total + inputs[:, j : j + rows] * taps[:, j]
    return (total + x.astype(jnp.float32)).astype(x.dtype)
