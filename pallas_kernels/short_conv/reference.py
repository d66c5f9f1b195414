"""The definition, in jnp: convolution, residual add and norm, each rounded as if it were stored."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._conv import add_up, conv_reference, real_rows, ring_reference
from pallas_kernels._rows import rms_norm


def short_conv_reference(
    x: Float[Array, "B T C"] | Float[Array, "P B T C"],
    weight: Float[Array, "C W"],
    ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    residual: Float[Array, "B T C"] | None,
    norm_weight: Float[Array, " C"] | None,
    eps: float,
) -> tuple[Float[Array, "B ... C"], ...]:
    """(out, ring), or with norm_weight (out, normed, ring); out is the convolution plus residual if there is one."""
    if x.ndim == 4:
        x = add_up(x).astype(ring.dtype)
    out = conv_reference(x, weight, ring, start, count)
    if residual is not None:
        out = jnp.where(real_rows(count, x.shape[1])[..., None], residual + out, 0).astype(x.dtype)
    ring = ring_reference(x, ring, start, count)
    return (out, ring) if norm_weight is None else (out, rms_norm(out, norm_weight, eps), ring)
