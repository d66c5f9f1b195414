"""The public functions."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._conv import check_conv, check_rows
from pallas_kernels._dispatch import check_float, check_shape, resolve
from pallas_kernels.short_conv.reference import short_conv_reference
from pallas_kernels.short_conv.triton import short_conv_triton


def short_conv(
    x: Float[Array, "B T C"] | Float[Array, "P B T C"],
    weight: Float[Array, "C W"],
    ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    *,
    residual: Float[Array, "B T C"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B R C"]]:
    """y_t = x_t + sum_j w_j x_{t-W+1+j} over T new rows a sequence, and the ring with those rows in it (spec: sconv).

    Row t of sequence b stands at position start[b] + t >= 0 and is real when t < count[b]; other rows give zeros and
    leave no trace. Position p lives in ring row p % R, R >= W - 1; before position 0 everything is 0. float32 within,
    one rounding. `residual` is added to the rounded result. The ring is updated in place where the caller donates it.
    P arrays instead of x are summands of it, added in order in float32 and rounded to the dtype of the ring.
    Raises ValueError for a wrong shape or dtype, NotImplementedError when the asked implementation cannot run here.
    """
    out, ring = run("short_conv", x, weight, ring, start, count, residual, None, 0.0, implementation)
    return out, ring


def short_conv_add_norm(
    x: Float[Array, "B T C"] | Float[Array, "P B T C"],
    weight: Float[Array, "C W"],
    ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    residual: Float[Array, "B T C"],
    norm_weight: Float[Array, " C"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"], Float[Array, "B R C"]]:
    """`short_conv` with residual, and RMSNorm of its result, in one launch: (residual + conv, normed, ring)."""
    op = "short_conv_add_norm"
    out, normed, ring = run(op, x, weight, ring, start, count, residual, norm_weight, eps, implementation)
    return out, normed, ring


def run(
    op: str,
    x: jax.Array,
    weight: jax.Array,
    ring: jax.Array,
    start: jax.Array,
    count: jax.Array,
    residual: jax.Array | None,
    norm_weight: jax.Array | None,
    eps: float,
    implementation: str | None,
) -> tuple[jax.Array, ...]:
    check_shape(op, "x", x, (None,) * (4 if x.ndim == 4 else 3))
    check_float(op, "x", x)
    if x.ndim == 4 and x.shape[0] == 0:
        raise ValueError(f"{op}: x has shape {list(x.shape)}, no summands; expected one or more")
    row: Any = jax.ShapeDtypeStruct(x.shape[-3:], ring.dtype if x.ndim == 4 else x.dtype)
    check_conv(op, ("weight", "ring"), row, row.shape[2], weight, ring)
    check_rows(op, start, count, row.shape[0])
    if residual is not None:
        check_shape(op, "residual", residual, row.shape)
        check_float(op, "residual", residual, like=row)
    if norm_weight is not None:
        check_shape(op, "norm_weight", norm_weight, row.shape[2:])
        check_float(op, "norm_weight", norm_weight)
    chosen = resolve(op, implementation)
    operands = (x, weight, ring, start, count, residual, norm_weight, eps)
    if chosen == "xla" or x.size == 0:
        return short_conv_reference(*operands)
    return short_conv_triton(*operands, chosen)
