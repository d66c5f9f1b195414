"""rel_paged_attention as it is defined: pages gathered in order, every score written out."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._rel_reference import attend, gather_pages, positions, project


def reference(
    q: Float[Array, "B Q N D"],
    k_pages: Float[Array, "P K page D"],
    v_pages: Float[Array, "P K page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    count: Int[Array, " B"],
    rel_logits: Float[Array, "B Q N X"] | None,
    r: Float[Array, "B Q N R"] | None,
    rel_proj: Float[Array, "R X"] | None,
    tau: Float[Array, "B Q"] | None,
    scale: float,
    extent: int,
    window: int | None,
) -> Float[Array, "B Q N D"]:
    """One sequence at a time, so that the sums of a sequence do not depend on how many stand beside it."""
    rows = q.shape[1]

    def one(x):
        q, table, length, count, rel, tau = x
        k, v = gather_pages(k_pages, table), gather_pages(v_pages, table)
        k_pos = positions(jnp.int32(0), length, k.shape[0])
        t = jnp.arange(rows, dtype=jnp.int32)
        q_pos = jnp.where(t < count, jnp.maximum(length - count + t, -1), -1)
        return attend(q, k, v, q_pos, k_pos, rel, tau, scale=scale, extent=extent, window=window)

    return jax.lax.map(one, (q, page_table, lengths, count, project(r, rel_proj, rel_logits), tau))
