"""The public functions."""

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels._dispatch import FLOATS, check_float, check_shape, resolve
from pallas_kernels.linear.reference import linear_reference, swiglu_reference
from pallas_kernels.linear.tiles import ROWS
from pallas_kernels.linear.triton import linear_triton, swiglu_triton

OP = "linear"


def linear(
    x: Float[Array, "M I"],
    weights: Float[Array, "O I"] | Sequence[Float[Array, "_ I"]],
    *,
    scale: Float[Array, ""] | None = None,
    outputs: int | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "M O"]:
    """`x @ w.T * scale`, in float32 and rounded once to `out_dtype` (default: the dtype of `x`).

    Several weights [O_i, I] give their products side by side, in one launch and with no copy of the weights. With
    `outputs` only so many of the columns are made, the first. Up to 128 rows a row's result is bitwise the same
    whatever their number and the other rows are; more are multiplied by XLA, whose products are fast there and keep no
    such promise. Raises ValueError for a wrong shape, dtype or number of outputs, NotImplementedError when the asked
    implementation cannot run here.
    """
    weights = [weights] if isinstance(weights, jax.Array) else list(weights)
    total = check(x, weights)
    outputs = total if outputs is None else outputs
    if not 1 <= outputs <= total:
        raise ValueError(f"{OP}: outputs is {outputs}; expected 1 to {total}, the rows of the weights")
    dtype = jax.numpy.dtype(out_dtype or x.dtype)
    if dtype not in [jax.numpy.dtype(d) for d in FLOATS]:
        raise ValueError(f"{OP}: out_dtype is {dtype}; expected bfloat16 or float16 or float32")
    if scale is not None:
        check_shape(OP, "scale", scale, ())
        check_float(OP, "scale", scale)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or not 1 <= x.shape[0] <= ROWS:
        return linear_reference(x, weights, scale, outputs, dtype)
    return linear_triton(x, weights, scale, outputs, dtype, chosen)


def linear_swiglu(
    x: Float[Array, "M H"], w13: Float[Array, "2 F H"], *, implementation: str | None = None
) -> Float[Array, "M F"]:
    """`silu(w13[0] x) * w13[1] x` in one launch: in float32, rounded once to the dtype of `x` (spec: dense MLP).

    Rows and errors as in `linear`.
    """
    check_shape(OP, "x", x, (None, None))
    check_float(OP, "x", x)
    check_shape(OP, "w13", w13, (2, None, x.shape[1]))
    check_float(OP, "w13", w13, like=x)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or not 1 <= x.shape[0] <= ROWS:
        return swiglu_reference(x, w13)
    return swiglu_triton(x, w13, chosen)


def check(x: jax.Array, weights: Sequence[jax.Array]) -> int:
    """How many rows the weights have together."""
    check_shape(OP, "x", x, (None, None))
    check_float(OP, "x", x)
    if not weights:
        raise ValueError(f"{OP}: weights is empty; expected one array or more")
    for i, w in enumerate(weights):
        check_shape(OP, f"weights[{i}]", w, (None, x.shape[1]))
        check_float(OP, f"weights[{i}]", w, like=x)
    return sum(w.shape[0] for w in weights)
