"""rel_attention as it is defined, a few query rows at a time so that no array holds all rows times the context."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._rel_reference import attend, gather_pages, positions, project

ROWS = 128


def reference(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    k_pages: Float[Array, "P K page D"] | None,
    v_pages: Float[Array, "P K page D"] | None,
    page_table: Int[Array, "B max_pages"] | None,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    rel_logits: Float[Array, "B T N X"] | None,
    r: Float[Array, "B T N R"] | None,
    rel_proj: Float[Array, "R X"] | None,
    tau: Float[Array, "B T"] | None,
    scale: float,
    extent: int,
    window: int | None,
) -> Float[Array, "B T N D"]:
    """One sequence at a time, its cached rows before `start` followed by the new ones, `ROWS` queries at a time."""
    rows = q.shape[1]
    tile = min(rows, ROWS)
    padding = -rows % tile

    def split(x):
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))).reshape(-1, tile, *x.shape[1:])

    def one(x):
        queries, k, v, table, start, count = x
        k_pos = positions(start, count, rows)
        if table is not None and k_pages is not None and v_pages is not None:
            cached = gather_pages(k_pages, table), gather_pages(v_pages, table)
            k, v = jnp.concatenate([cached[0], k]), jnp.concatenate([cached[1], v])
            k_pos = jnp.concatenate([positions(jnp.int32(0), start, cached[0].shape[0]), k_pos])

        def some(y):
            (q, r, rel_logits, tau), q_pos = y
            rel = project(r, rel_proj, rel_logits)
            return attend(q, k, v, q_pos, k_pos, rel, tau, scale=scale, extent=extent, window=window)

        q_pos = jnp.pad(positions(start, count, rows), (0, padding), constant_values=-1).reshape(-1, tile)
        return jax.lax.map(some, (jax.tree.map(split, queries), q_pos)).reshape(-1, *q.shape[2:])[:rows]

    return jax.lax.map(one, ((q, r, rel_logits, tau), k, v, page_table, start, count))
