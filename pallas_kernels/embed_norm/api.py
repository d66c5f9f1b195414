"""The public function."""

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import check_float, check_index, check_shape, resolve
from pallas_kernels.embed_norm.reference import embed_norm_reference
from pallas_kernels.embed_norm.triton import embed_norm_triton

OP = "embed_norm"


def embed_norm(
    token_ids: Int32[Array, "*rows"],
    embed_table: Float[Array, "V H"],
    weight: Float[Array, " H"],
    *,
    eps: float,
    next_weight: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows H"] | tuple[Float[Array, "*rows H"], Float[Array, "*rows H"]]:
    """RMSNorm(E[id]) for int32 ids of any shape; with `next_weight` also RMSNorm of that, as a second output.

    The first output is rounded to the table's type before the second norm, as if it had been stored. An id outside
    the table reads its nearest row, so check ids first. Raises ValueError for a wrong shape or dtype,
    NotImplementedError when the asked implementation cannot run here.
    """
    check(token_ids, embed_table, weight, next_weight)
    chosen = resolve(OP, implementation)
    ids = token_ids.reshape(-1)
    if chosen == "xla" or ids.size == 0:
        outs = embed_norm_reference(ids, embed_table, weight, next_weight, eps)
    else:
        outs = embed_norm_triton(ids, embed_table, weight, next_weight, eps, chosen)
    shaped = tuple(out.reshape(*token_ids.shape, embed_table.shape[1]) for out in outs)
    return shaped[0] if next_weight is None else (shaped[0], shaped[1])


def check(token_ids: jax.Array, table: jax.Array, weight: jax.Array, next_weight: jax.Array | None) -> None:
    check_index(OP, "token_ids", token_ids)
    check_shape(OP, "embed_table", table, (None, None))
    check_float(OP, "embed_table", table)
    for name, w in (("weight", weight), ("next_weight", next_weight)):
        if w is not None:
            check_shape(OP, name, w, (table.shape[1],))
            check_float(OP, name, w)
