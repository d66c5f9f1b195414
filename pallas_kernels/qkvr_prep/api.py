"""The public function."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._conv import check_conv, check_rows
from pallas_kernels._dispatch import check_dtype, check_float, check_index, check_shape, resolve
from pallas_kernels.qkvr_prep.layout import QKVR, Heads, Pages, Weights
from pallas_kernels.qkvr_prep.reference import qkvr_prep_reference
from pallas_kernels.qkvr_prep.triton import qkvr_prep_triton

OP = "qkvr_prep"


def qkvr_prep(
    qkvr: Float[Array, "B T J"],
    k_conv_weight: Float[Array, "C W"],
    v_conv_weight: Float[Array, "C W"],
    q_norm_weight: Float[Array, " D"],
    k_norm_weight: Float[Array, " D"],
    k_ring: Float[Array, "B R C"],
    v_ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    tau: Float[Array, "B T"] | None = None,
    k_pages: Float[Array, "P K page D"] | None = None,
    v_pages: Float[Array, "P K page D"] | None = None,
    page_table: Int32[Array, "B max_pages"] | None = None,
    kv_rows: int | None = None,
    implementation: str | None = None,
) -> QKVR:
    """From the product q|k|v|r, J = (N + 2K)*D + N*R columns, to what attention reads (spec: forward, steps 2 to 6).

    k and v pass their short convolutions (rings as in `short_conv`, R there the ring's rows), then q and k are normed
    per head, each step rounded. Row t of sequence b stands at position start[b] + t >= 0 and is real when t < count[b];
    other rows give zeros and are never written. With pages, keys and values go to page_table[b, position // page],
    row position % page; rows whose entry is -1 or past the table are dropped. Where entries repeat, so that a sequence
    keeps `kv_rows` rows, only the last kv_rows new rows are written. Without pages k and v are results.

    `tau` multiplies the normed q and rounds again. The relative logits need it too: where the attention op takes tau
    itself, leave it out here. Rings and pages are updated in place where the caller donates them.
    Raises ValueError for a wrong shape or dtype, NotImplementedError when the asked implementation cannot run here.
    """
    weights = Weights(k_conv_weight, v_conv_weight, q_norm_weight, k_norm_weight)
    layout = check_product(qkvr, weights, heads, kv_heads)
    check_conv(OP, ("k_conv_weight", "k_ring"), qkvr, layout.kv * layout.dim, k_conv_weight, k_ring)
    check_conv(OP, ("v_conv_weight", "v_ring"), qkvr, layout.kv * layout.dim, v_conv_weight, v_ring)
    check_shape(OP, "v_conv_weight", v_conv_weight, k_conv_weight.shape)
    check_shape(OP, "v_ring", v_ring, k_ring.shape)
    check_rows(OP, start, count, qkvr.shape[0])
    if tau is not None:
        check_shape(OP, "tau", tau, qkvr.shape[:2])
        check_dtype(OP, "tau", tau, (jnp.float32,))
    pages = check_pages(qkvr, layout, k_pages, v_pages, page_table)
    if kv_rows is not None and kv_rows < 1:
        raise ValueError(f"{OP}: kv_rows is {kv_rows}; expected at least 1, or None where a sequence keeps all rows")
    chosen = resolve(OP, implementation)
    operands = (qkvr, weights, k_ring, v_ring, start, count, tau, pages, layout, kv_rows, eps)
    if chosen == "xla" or qkvr.size == 0:
        return qkvr_prep_reference(*operands)
    return qkvr_prep_triton(*operands, chosen)


def check_product(qkvr: jax.Array, weights: Weights, heads: int, kv_heads: int) -> Heads:
    """Where the parts of a product row lie, from its width, the heads and the norms' width."""
    check_shape(OP, "qkvr", qkvr, (None, None, None))
    check_float(OP, "qkvr", qkvr)
    check_shape(OP, "q_norm_weight", weights.q_norm, (None,))
    check_shape(OP, "k_norm_weight", weights.k_norm, weights.q_norm.shape)
    check_float(OP, "q_norm_weight", weights.q_norm)
    check_float(OP, "k_norm_weight", weights.k_norm)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{OP}: {heads} heads over {kv_heads} kv_heads; expected a whole number of query heads each")
    dim = weights.q_norm.shape[0]
    rel, rest = divmod(qkvr.shape[2] - (heads + 2 * kv_heads) * dim, heads)
    if rest or rel < 1:
        raise ValueError(
            f"{OP}: qkvr has {qkvr.shape[2]} columns; expected ({heads} + 2 * {kv_heads}) * {dim} and"
            f" some more for each of {heads} heads"
        )
    return Heads(heads, kv_heads, dim, rel)


def check_pages(
    qkvr: jax.Array, layout: Heads, k_pages: jax.Array | None, v_pages: jax.Array | None, table: jax.Array | None
) -> Pages | None:
    """The pages, all of them or none."""
    if k_pages is None and v_pages is None and table is None:
        return None
    if k_pages is None or v_pages is None or table is None:
        raise ValueError(f"{OP}: k_pages, v_pages and page_table come together; expected all or none of them")
    check_shape(OP, "k_pages", k_pages, (None, layout.kv, None, layout.dim))
    check_shape(OP, "v_pages", v_pages, k_pages.shape)
    check_float(OP, "k_pages", k_pages, like=qkvr)
    check_float(OP, "v_pages", v_pages, like=qkvr)
    check_shape(OP, "page_table", table, (qkvr.shape[0], None))
    check_index(OP, "page_table", table)
    return Pages(k_pages, v_pages, table)
