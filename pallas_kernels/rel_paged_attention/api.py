"""The public function of rel_paged_attention: checks, then the chosen implementation."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch as dispatch
from pallas_kernels._rel_checks import check_heads, check_relative
from pallas_kernels.rel_paged_attention import triton
from pallas_kernels.rel_paged_attention.reference import reference

OP = "rel_paged_attention"


def rel_paged_attention(
    q: Float[Array, "B Q N D"],
    k_pages: Float[Array, "P K page D"],
    v_pages: Float[Array, "P K page D"],
    page_table: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    rel_logits: Float[Array, "B Q N X"] | None = None,
    r: Float[Array, "B Q N R"] | None = None,
    rel_proj: Float[Array, "R X"] | None = None,
    scale: float,
    extent: int,
    window: int | None = None,
    tau: Float[Array, "B Q"] | None = None,
    count: Int[Array, " B"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B Q N D"]:
    """Attention of a few new rows a sequence (1 to 16) over paged keys and values, with a bias by distance.

    `lengths` counts the keys of each sequence, its new rows included, whose keys already lie in the pages. The first
    count[b] of the Q rows are real, all of them without `count`: row t stands at position lengths[b] - count[b] + t.
    Position p of sequence b lies in row p % page of page page_table[b, p // page]. With distance i - j between query
    and key, score = (q.k * scale + rel[distance]) * tau, where rel is `rel_logits` or r @ rel_proj inside the extent
    and 0 beyond it; keys of the future, and with a window those at distance >= window, are invisible. The softmax runs
    in float32.

    Rows that are not real or at negative positions, and so all of a sequence of length 0, give zeros. Pages past a
    sequence's length, and those wholly before every row's window, may hold anything and their table entries be -1. A
    length beyond max_pages * page reads past the table, an entry that is no page past the pages, and a count above Q
    moves the rows: check them before.

    Raises ValueError for shapes, dtypes or a page size (16 to 256) and head size (32 to 256) that do not fit, and
    NotImplementedError for an implementation that cannot run here.
    """
    batch, rows, heads, head_dim = (None,) * 4 if q.ndim != 4 else q.shape
    dispatch.check_shape(OP, "q", q, (batch, rows, heads, head_dim))
    dispatch.check_float(OP, "q", q)
    check_heads(OP, q, k_pages, v_pages, ("k_pages", "v_pages"))
    if not 1 <= q.shape[1] <= 16:
        raise ValueError(f"{OP}: q has {q.shape[1]} rows a sequence; expected 1 to 16 (rel_attention takes more)")
    if not 16 <= k_pages.shape[2] <= 256:
        raise ValueError(f"{OP}: k_pages has pages of {k_pages.shape[2]} rows; expected 16 to 256")
    dispatch.check_shape(OP, "page_table", page_table, (batch, None))
    dispatch.check_shape(OP, "lengths", lengths, (batch,))
    dispatch.check_index(OP, "page_table", page_table)
    dispatch.check_index(OP, "lengths", lengths)
    if count is not None:
        dispatch.check_shape(OP, "count", count, (batch,))
        dispatch.check_index(OP, "count", count)
    check_relative(OP, q, rel_logits, r, rel_proj, tau, extent, window)
    arguments: dict[str, Any] = dict(
        count=jnp.full_like(lengths, q.shape[1]) if count is None else count,
        rel_logits=rel_logits, r=r, rel_proj=rel_proj, tau=tau, scale=float(scale), extent=extent, window=window
    )
    chosen = dispatch.resolve(OP, implementation)
    if q.size == 0:
        return jnp.zeros_like(q)
    if chosen == "xla":
        return reference(q, k_pages, v_pages, page_table, lengths, **arguments)
    return triton.run(q, k_pages, v_pages, page_table, lengths, **arguments, implementation=chosen)
