"""The definition, in jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._conv import conv_reference, real_rows, ring_reference
from pallas_kernels._rows import rms_norm
from pallas_kernels.qkvr_prep.layout import QKVR, Heads, Pages, Weights


def write_pages(
    pages: Float[Array, "P K page D"],
    rows: Float[Array, "B T K D"],
    table: Int32[Array, "B max_pages"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    kv_rows: int | None,
) -> Float[Array, "P K page D"]:
    """The pages with the real rows at their positions; rows without a page (-1, or past the table) are dropped."""
    t, count = jnp.arange(rows.shape[1]), jnp.minimum(count, rows.shape[1])
    position = start[:, None] + t
    index, slot = position // pages.shape[2], position % pages.shape[2]
    kept = (t < count[:, None]) & (index < table.shape[1])
    if kv_rows is not None:
        kept &= t >= count[:, None] - kv_rows
    page = jnp.take_along_axis(table, index.clip(0, table.shape[1] - 1), axis=1)
    page = jnp.where(kept & (page >= 0), page, pages.shape[0])
    return pages.at[page, :, slot].set(rows, mode="drop")


def qkvr_prep_reference(
    qkvr: Float[Array, "B T J"],
    weights: Weights,
    k_ring: Float[Array, "B R C"],
    v_ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    tau: Float[Array, "B T"] | None,
    pages: Pages | None,
    heads: Heads,
    kv_rows: int | None,
    eps: float,
) -> QKVR:
    """conv on k and v, norms on q and k, tau on q, rows into rings and pages; rows past count give zeros."""
    batch, rows, _ = qkvr.shape
    q, k, v, r = jnp.split(qkvr, heads.starts[1:], axis=-1)
    real = real_rows(count, rows)[..., None]
    split = lambda x, n: x.reshape(batch, rows, n, x.shape[-1] // n)  # noqa: E731
    q = rms_norm(split(jnp.where(real, q, 0), heads.queries), weights.q_norm, eps)
    if tau is not None:
        q = jnp.where(real[..., None], q.astype(jnp.float32) * tau[..., None, None], 0).astype(q.dtype)
    keys = split(conv_reference(k, weights.k_conv, k_ring, start, count), heads.kv)
    keys = rms_norm(keys, weights.k_norm, eps)
    values = split(conv_reference(v, weights.v_conv, v_ring, start, count), heads.kv)
    k_ring, v_ring = ring_reference(k, k_ring, start, count), ring_reference(v, v_ring, start, count)
    r = split(jnp.where(real, r, 0), heads.queries)
    if pages is None:
        return QKVR(q, r, keys, values, k_ring, v_ring, None, None)
    k_pages = write_pages(pages.k, keys, pages.table, start, count, kv_rows)
    v_pages = write_pages(pages.v, values, pages.table, start, count, kv_rows)
    return QKVR(q, r, None, None, k_ring, v_ring, k_pages, v_pages)
