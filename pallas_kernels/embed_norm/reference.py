"""The definition, in jnp."""

from jaxtyping import Array, Float, Int32

from pallas_kernels._rows import rms_norm


def embed_norm_reference(
    token_ids: Int32[Array, " T"],
    embed_table: Float[Array, "V H"],
    weight: Float[Array, " H"],
    next_weight: Float[Array, " H"] | None,
    eps: float,
) -> tuple[Float[Array, "T H"], ...]:
    """(RMSNorm(E[id]),) or, with next_weight, that and RMSNorm of its rounded rows. Ids past the table are clamped."""
    rows = embed_table[token_ids.clip(0, embed_table.shape[0] - 1)]
    first = rms_norm(rows, weight, eps)
    return (first,) if next_weight is None else (first, rms_norm(first, next_weight, eps))
