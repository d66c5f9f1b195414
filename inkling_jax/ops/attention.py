"""Attention with Inkling's learned relative bias, over cached pages and the new rows.

score = tau * (q.k / head_dim + bias), where bias[t, s] = r_t . P[:, t - s] inside the extent and 0 outside. Softmax in
float32, block by block with a running maximum, so no more than rows x block of scores exists at a time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..cache import VERIFY_ROWS, PagedKV, Rows
from ..config import AttentionShape
from .linear import linear, precision

MASKED = -1e30  # finite, so that a wholly masked block leaves the running sums exactly as they were
BLOCK = 256  # cached key positions per step


class Softmax(NamedTuple):
    """Running softmax of all blocks so far: unnormalised output, maximum and sum, float32."""

    out: Float[Array, "B K G T D"]
    top: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]


def attend(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    r: Float[Array, "B T N R"],
    rel_proj: Float[Array, "R X"],
    rows: Rows,
    shape: AttentionShape,
    *,
    tau: Float[Array, "B T"] | None = None,
    kv: PagedKV | None = None,
    page_table: Int[Array, "B pages"] | None = None,
) -> tuple[Float[Array, "B T N D"], PagedKV | None]:
    """Output of every new row over the cached rows and the new rows up to itself; and the pages with the new rows.

    A chunk reads the pages before `rows.start` and the new rows from `k` and `v`, and is written afterwards: local
    layers need no more pages than their window, whatever the chunk. The few rows of a verify are written first and
    everything is read from the pages, in blocks that begin at fixed positions: the sums that make up a row are then
    the same however many rows came with it, so greedy decoding gives the same tokens for every number of drafts.

    Padding rows come after the real ones, so causality alone hides them; their own output is finite and meaningless.
    """
    batch, new, heads, dim = q.shape
    grouped = q.reshape(batch, new, shape.kv_heads, heads // shape.kv_heads, dim).transpose(0, 2, 3, 1, 4)
    # In float32: so few terms cost nothing, and the CPU rounds a bfloat16 product of them by the number of rows.
    rel = linear(r.astype(jnp.float32), rel_proj.T.astype(jnp.float32))
    rel = rel.transpose(0, 2, 1, 3).reshape(*grouped.shape[:4], shape.extent)
    if kv is None:
        state = _new_rows(grouped, k, v, rel, tau, shape)
    else:
        assert page_table is not None
        first = new <= VERIFY_ROWS
        written = kv.write(k, v, page_table, rows)
        state = _no_rows(grouped) if first else _new_rows(grouped, k, v, rel, tau, shape)
        end = rows.start + rows.count if first else rows.start
        state = _cached_rows(state, grouped, rel, tau, rows, end, shape, written if first else kv, page_table)
        kv = written
    out = state.out / jnp.where(state.total > 0, state.total, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype), kv


def _no_rows(q: Float[Array, "B K G T D"]) -> Softmax:
    top = jnp.full(q.shape[:-1], MASKED, jnp.float32)
    return Softmax(jnp.zeros(q.shape, jnp.float32), top, jnp.zeros_like(top))


def _accumulate(
    state: Softmax | None,
    scores: Float[Array, "B K G T S"],
    v: Float[Array, "B S K D"],
    tau: Float[Array, "B T"] | None,
    visible: Bool[Array, "#B #T S"],
) -> Softmax:
    if tau is not None:
        scores = scores * tau[:, None, None, :, None]
    visible = visible[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    top = scores.max(axis=-1)
    if state is not None:
        top = jnp.maximum(state.top, top)
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
    total = weights.sum(axis=-1)
    out = jnp.einsum(
        "bkgts,bskd->bkgtd",
        weights.astype(v.dtype),
        v,
        precision=precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    if state is not None:
        keep = jnp.exp(state.top - top)
        out, total = state.out * keep[..., None] + out, state.total * keep + total
    return Softmax(out, top, total)


def _scores(q: Float[Array, "B K G T D"], k: Float[Array, "B S K D"]) -> Float[Array, "B K G T S"]:
    scores = jnp.einsum("bkgtd,bskd->bkgts", q, k, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    return scores * (1.0 / q.shape[-1])


def _new_rows(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    rel: Float[Array, "B K G T X"],
    tau: Float[Array, "B T"] | None,
    shape: AttentionShape,
) -> Softmax:
    """The new rows among themselves: distances are the same for every sequence, so the bias needs no gather."""
    new = k.shape[1]
    distance = jnp.arange(new)[:, None] - jnp.arange(new)[None, :]
    visible = distance >= 0
    if shape.window is not None:
        visible &= distance < shape.window
    return _accumulate(None, _scores(q, k) + _skew(rel, new), v, tau, visible[None])


def _skew(rel: Float[Array, "B K G T X"], new: int) -> Float[Array, "B K G T T"]:
    """bias[t, s] = rel[t, t - s] for s <= t (anything above the diagonal): shifts row t by t through a reshape."""
    extent = rel.shape[-1]
    rel = rel[..., :new] if extent >= new else jnp.pad(rel, ((0, 0),) * 4 + ((0, new - extent),))
    flipped = jnp.pad(rel[..., ::-1], ((0, 0),) * 4 + ((1, 0),))
    return flipped.reshape(*rel.shape[:3], new + 1, new)[..., 1:, :]


def _cached_rows(
    state: Softmax,
    q: Float[Array, "B K G T D"],
    rel: Float[Array, "B K G T X"],
    tau: Float[Array, "B T"] | None,
    rows: Rows,
    end: Int[Array, " B"],
    shape: AttentionShape,
    kv: PagedKV,
    page_table: Int[Array, "B pages"],
) -> Softmax:
    """Adds the cached rows before `end`, as far back as the window reaches and no further."""
    page = kv.k.shape[2]
    pages = max(1, BLOCK // page)
    block = pages * page
    spare = -page_table.shape[1] % pages
    page_table = jnp.pad(page_table, ((0, 0), (0, spare)), constant_values=-1)
    positions = rows.positions(q.shape[3])
    end = jnp.where(rows.count > 0, end, 0)
    oldest = jnp.zeros_like(end)
    if shape.window is not None:
        # Idle sequences must not drag the first block back to 0.
        reach = jnp.where(rows.count > 0, rows.start - shape.window + 1, jnp.iinfo(jnp.int32).max)
        oldest = jnp.maximum(reach, 0)

    def step(i: Int[Array, ""], state: Softmax) -> Softmax:
        ids = lax.dynamic_slice_in_dim(page_table, i * pages, pages, axis=1)
        at = i * block + jnp.arange(block)
        live = (at >= oldest[:, None]) & (at < end[:, None])
        k, v = kv.read(ids, live)
        distance = positions[:, :, None] - at[None, None, :]
        visible = live[:, None, :] & (distance >= 0)
        if shape.window is not None:
            visible &= distance < shape.window
        return _accumulate(state, _scores(q, k) + _bias(rel, distance), v, tau, visible)

    first = jnp.min(jnp.minimum(oldest, jnp.max(end))) // block
    return lax.fori_loop(first, -(-jnp.max(end) // block), step, state)


def _bias(rel: Float[Array, "B K G T X"], distance: Int[Array, "B T S"]) -> Float[Array, "B K G T S"]:
    extent = rel.shape[-1]
    inside = (distance >= 0) & (distance < extent)

    def gather() -> Float[Array, "B K G T S"]:
        index = jnp.clip(distance, 0, extent - 1)[:, None, None]
        return jnp.where(inside[:, None, None], jnp.take_along_axis(rel, index, axis=-1), 0.0)

    shape = (*rel.shape[:4], distance.shape[-1])
    return lax.cond(inside.any(), gather, lambda: jnp.zeros(shape, jnp.float32))
