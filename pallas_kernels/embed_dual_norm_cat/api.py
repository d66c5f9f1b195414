"""The public function."""

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import check_float, check_index, check_shape, resolve
from pallas_kernels.embed_dual_norm_cat.reference import embed_dual_norm_cat_reference
from pallas_kernels.embed_dual_norm_cat.triton import embed_dual_norm_cat_triton

OP = "embed_dual_norm_cat"


def embed_dual_norm_cat(
    hidden: Float[Array, "T H"],
    hidden_weight: Float[Array, " H"],
    embed_weight: Float[Array, " H"],
    *,
    eps: float,
    token_ids: Int32[Array, " T"] | None = None,
    embed_table: Float[Array, "V H"] | None = None,
    embeds: Float[Array, "T H"] | None = None,
    pre_norm_weight: Float[Array, " H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T 2*H"]:
    """[RMSNorm(hidden) | RMSNorm(e)], what an MTP depth's input projection reads (spec: MTP).

    e is a row of `embed_table` chosen by `token_ids`, or a row of `embeds`; with `pre_norm_weight` it first passes
    RMSNorm and is rounded to the activation type, as the backbone's embedding norm does. An id outside the table reads
    its nearest row, so check ids first. Raises ValueError for a wrong shape or dtype or unless exactly one source of
    embeddings is given, NotImplementedError when the asked implementation cannot run here.
    """
    check(hidden, hidden_weight, embed_weight, pre_norm_weight)
    source = check_source(hidden, token_ids, embed_table, embeds)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or hidden.shape[0] == 0:
        rows = source if token_ids is None else source[token_ids.clip(0, source.shape[0] - 1)]
        return embed_dual_norm_cat_reference(hidden, rows, hidden_weight, embed_weight, pre_norm_weight, eps)
    return embed_dual_norm_cat_triton(
        hidden, source, hidden_weight, embed_weight, token_ids, pre_norm_weight, eps, chosen
    )


def check(hidden: jax.Array, hidden_weight: jax.Array, embed_weight: jax.Array, pre_norm: jax.Array | None) -> None:
    check_shape(OP, "hidden", hidden, (None, None))
    check_float(OP, "hidden", hidden)
    weights = {"hidden_weight": hidden_weight, "embed_weight": embed_weight, "pre_norm_weight": pre_norm}
    for name, weight in weights.items():
        if weight is not None:
            check_shape(OP, name, weight, (hidden.shape[1],))
            check_float(OP, name, weight)


def check_source(
    hidden: jax.Array, token_ids: jax.Array | None, table: jax.Array | None, embeds: jax.Array | None
) -> jax.Array:
    """The array that embeddings come from: the table, or the rows themselves."""
    if embeds is not None and token_ids is None and table is None:
        check_shape(OP, "embeds", embeds, hidden.shape)
        check_float(OP, "embeds", embeds, like=hidden)
        return embeds
    if embeds is not None or token_ids is None or table is None:
        raise ValueError(f"{OP}: expected either token_ids and embed_table, or embeds")
    check_shape(OP, "token_ids", token_ids, (hidden.shape[0],))
    check_index(OP, "token_ids", token_ids)
    check_shape(OP, "embed_table", table, (None, hidden.shape[1]))
    check_float(OP, "embed_table", table, like=hidden)
    return table
