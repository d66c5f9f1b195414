"""The public function."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._dispatch import check_dtype, check_float, check_index, check_shape, resolve
from pallas_kernels.fp4 import BLOCK_OF, FP4, VALUES_A_WORD
from pallas_kernels.moe.reference import moe_reference
from pallas_kernels.moe.triton import moe_triton

OP = "moe"


def moe(
    x: Float[Array, "M H"],
    ids: Int32[Array, "M A"],
    weights: Float[Array, "M AS"],
    w13: Float[Array, "E 2 F H"] | FP4,
    w2: Float[Array, "E H F"] | FP4,
    shared_w13: Float[Array, "S 2 F H"] | None = None,
    shared_w2: Float[Array, "S H F"] | None = None,
    *,
    valid: Bool[Array, " M"] | None = None,
    elsewhere: int = 0,
    implementation: str | None = None,
) -> Float[Array, "M H"]:
    """Weighted sum over each row's routed experts and over the shared ones (spec: MoE).

    An expert is `w2 (silu(w13[0] x) * w13[1] x)`: products and sums in float32, the SwiGLU product rounded once to the
    dtype of `x`. `weights` (float32) hold the A routed experts of a row, then the S shared ones; the sum over them runs
    in that order in float32 and is rounded once, so a row's result does not depend on its neighbours. Rows that are not
    `valid` visit no expert and give zeros, and an id outside 0 .. E - 1 adds nothing. 4-bit weights are unpacked in
    registers; shared experts are arrays always. Rows may have chosen among `elsewhere` more experts, held by other
    devices; that bears on speed alone. Raises ValueError for a wrong shape, dtype or format, NotImplementedError when
    the asked implementation cannot run here.
    """
    if elsewhere < 0:
        raise ValueError(f"{OP}: elsewhere is {elsewhere}; expected 0 or more experts")
    if (shared_w13 is None) != (shared_w2 is None):
        raise ValueError(f"{OP}: one of shared_w13 and shared_w2 is missing; expected both or neither")
    check(x, ids, weights, w13, w2, shared_w13, shared_w2, valid)
    chosen = resolve(OP, implementation)
    if x.shape[0] == 0:
        return x
    if chosen == "xla":
        return moe_reference(x, ids, weights, w13, w2, shared_w13, shared_w2, valid, elsewhere)
    return moe_triton(x, ids, weights, w13, w2, shared_w13, shared_w2, valid, elsewhere, chosen)


def check(x, ids, weights, w13, w2, shared_w13, shared_w2, valid) -> None:
    check_shape(OP, "x", x, (None, None))
    check_float(OP, "x", x)
    rows, hidden = x.shape
    check_shape(OP, "ids", ids, (rows, None))
    check_index(OP, "ids", ids)
    check_weight("w13", w13, (None, 2, None), hidden, x)
    experts, _, width, _ = w13.shape
    check_weight("w2", w2, (experts, hidden), width, x)
    shared = 0 if shared_w13 is None else shared_w13.shape[0]
    for name, array, shape in (
        ("shared_w13", shared_w13, (None, 2, width, hidden)),
        ("shared_w2", shared_w2, (shared, hidden, width)),
    ):
        if array is not None:
            check_shape(OP, name, array, shape)
            check_float(OP, name, array, like=x)
    if ids.shape[1] == 0 or experts == 0:
        raise ValueError(f"{OP}: ids have {ids.shape[1]} columns and w13 {experts} experts; expected 1 or more of each")
    check_shape(OP, "weights", weights, (rows, ids.shape[1] + shared))
    check_dtype(OP, "weights", weights, (jnp.float32,))
    if valid is not None:
        check_shape(OP, "valid", valid, (rows,))
        check_dtype(OP, "valid", valid, (jnp.bool_,))


def check_weight(name: str, w: jax.Array | FP4, rows: tuple[int | None, ...], columns: int, x: jax.Array) -> None:
    """Raise ValueError unless the weights, packed or not, have the shape [*rows, columns] and fit together."""
    if not isinstance(w, FP4):
        check_shape(OP, name, w, (*rows, columns))
        check_float(OP, name, w, like=x)
        return
    if w.format not in BLOCK_OF:
        raise ValueError(f"{OP}: {name} has format {w.format!r}; expected one of {tuple(BLOCK_OF)}")
    if columns % w.block:
        raise ValueError(f"{OP}: {name} has {columns} columns; expected a multiple of the block, {w.block}")
    check_shape(OP, f"{name}.codes", w.codes, (*rows, columns // VALUES_A_WORD))
    check_dtype(OP, f"{name}.codes", w.codes, (jnp.uint32,))
    check_shape(OP, f"{name}.scales", w.scales, (*w.codes.shape[:-1], columns // w.block))
    check_dtype(OP, f"{name}.scales", w.scales, (jnp.uint8,))
    if (w.expert_scale is None) == (w.format == "nvfp4"):
        raise ValueError(f"{OP}: {name}.expert_scale is for 'nvfp4' and for it alone; its format is {w.format!r}")
    if w.expert_scale is not None:
        check_shape(OP, f"{name}.expert_scale", w.expert_scale, (w.codes.shape[0],))
        check_dtype(OP, f"{name}.expert_scale", w.expert_scale, (jnp.float32,))
