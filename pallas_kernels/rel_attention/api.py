"""The public function of rel_attention: checks, then the chosen implementation."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch as dispatch
from pallas_kernels._rel_checks import check_heads, check_relative
from pallas_kernels.rel_attention import triton
from pallas_kernels.rel_attention.reference import reference

OP = "rel_attention"


def rel_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    k_pages: Float[Array, "P K page D"] | None = None,
    v_pages: Float[Array, "P K page D"] | None = None,
    page_table: Int[Array, "B max_pages"] | None = None,
    start: Int[Array, " B"] | None = None,
    count: Int[Array, " B"] | None = None,
    rel_logits: Float[Array, "B T N X"] | None = None,
    r: Float[Array, "B T N R"] | None = None,
    rel_proj: Float[Array, "R X"] | None = None,
    scale: float,
    extent: int,
    window: int | None = None,
    tau: Float[Array, "B T"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N D"]:
    """Attention of many new rows a sequence over themselves and over earlier rows in pages, with a bias by distance.

    Row t of sequence b stands at position start[b] + t and is real when t < count[b]; without `count` all rows are,
    without `start` (which comes with the pages) nothing came before. The keys of positions below start[b] lie in the
    pages as in `rel_paged_attention`, those of the new rows are `k` and `v`: they need not be in the pages yet, so a
    ring of pages no longer than the window serves a chunk of any length. Scores, bias, window and tau as in
    `rel_paged_attention`.

    Rows that are not real give zeros, and hold anything. Pages past start, and those wholly before every row's window,
    may hold anything and their entries be -1. Starts beyond the table and pages that are not there are not looked for:
    check them before.

    Raises ValueError for shapes, dtypes, a page size (16 to 256) or head size (32 to 256) that do not fit or pages that
    come incomplete, and NotImplementedError for an implementation that cannot run here.
    """
    batch, rows, _, head_dim = (None,) * 4 if q.ndim != 4 else q.shape
    dispatch.check_shape(OP, "q", q, (batch, rows, None, head_dim))
    dispatch.check_float(OP, "q", q)
    check_heads(OP, q, k, v, ("k", "v"))
    dispatch.check_shape(OP, "k", k, (batch, rows, None, head_dim))
    check_pages(q, k, k_pages, v_pages, page_table, start)
    for name, x in (("start", start), ("count", count)):
        if x is not None:
            dispatch.check_shape(OP, name, x, (batch,))
            dispatch.check_index(OP, name, x)
    check_relative(OP, q, rel_logits, r, rel_proj, tau, extent, window)
    chosen = dispatch.resolve(OP, implementation)
    arguments: dict[str, Any] = dict(
        k_pages=k_pages, v_pages=v_pages, page_table=page_table, rel_logits=rel_logits, r=r, rel_proj=rel_proj, tau=tau,
        start=jnp.zeros(q.shape[0], jnp.int32) if start is None else start,
        count=jnp.full(q.shape[0], q.shape[1], jnp.int32) if count is None else count,
        scale=float(scale), extent=extent, window=window,
    )  # fmt: skip
    if q.size == 0:
        return jnp.zeros_like(q)
    if chosen == "xla":
        return reference(q, k, v, **arguments)
    return triton.run(q, k, v, **arguments, implementation=chosen)


def check_pages(
    q: jax.Array,
    k: jax.Array,
    k_pages: jax.Array | None,
    v_pages: jax.Array | None,
    page_table: jax.Array | None,
    start: jax.Array | None,
) -> None:
    """Raise ValueError unless pages, table and start come together and fit the new rows."""
    together = {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table, "start": start}
    missing = [name for name, x in together.items() if x is None]
    if missing and len(missing) < len(together):
        raise ValueError(f"{OP}: {', '.join(together)} come together; {', '.join(missing)} missing")
    if k_pages is None or v_pages is None or page_table is None:
        return
    check_heads(OP, q, k_pages, v_pages, ("k_pages", "v_pages"))
    dispatch.check_shape(OP, "k_pages", k_pages, (None, k.shape[2], None, k.shape[3]))
    if not 16 <= k_pages.shape[2] <= 256:
        raise ValueError(f"{OP}: k_pages has pages of {k_pages.shape[2]} rows; expected 16 to 256")
    dispatch.check_shape(OP, "page_table", page_table, (q.shape[0], None))
    dispatch.check_index(OP, "page_table", page_table)
