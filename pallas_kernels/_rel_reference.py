"""Relative attention as it is defined, with every score written out: the reference of both attention kernels."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def project(
    r: Float[Array, "*rows R"] | None, rel_proj: Float[Array, "R X"] | None, rel_logits: Float[Array, "*rows X"] | None
) -> Float[Array, "*rows X"] | None:
    """The relative logits by distance, float32: the given ones, or r @ rel_proj, or None where there is no bias."""
    if r is None or rel_proj is None:
        return None if rel_logits is None else rel_logits.astype(jnp.float32)
    return jnp.matmul(r.astype(jnp.float32), rel_proj.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def gather_pages(pages: Float[Array, "P K page D"], table: Int[Array, " pages"]) -> Float[Array, "S K D"]:
    """One sequence's rows in order; an entry of -1 gives some page's rows, which the caller must not look at."""
    rows = pages[jnp.clip(table, 0, pages.shape[0] - 1)]
    return jnp.swapaxes(rows, 1, 2).reshape(-1, pages.shape[1], pages.shape[3])


def attend(
    q: Float[Array, "T N D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K D"],
    q_pos: Int[Array, " T"],
    k_pos: Int[Array, " S"],
    rel: Float[Array, "T N X"] | None,
    tau: Float[Array, " T"] | None,
    *,
    scale: float,
    extent: int,
    window: int | None,
) -> Float[Array, "T N D"]:
    """softmax((q.k * scale + bias by distance) * tau) @ v over the visible keys of one sequence, in float32.

    A position of -1 marks a row that does not exist: as a key it is invisible, as a query it gives zeros. Key j is
    visible to query i when 0 <= i - j, and i - j < window if there is one. A key that no query sees may hold anything.
    """
    group = q.shape[1] // k.shape[1]
    distance = q_pos[:, None] - k_pos[None, :]
    visible = (q_pos >= 0)[:, None] & (k_pos >= 0)[None, :] & (distance >= 0)
    if window is not None:
        visible &= distance < window
    seen = visible.any(axis=0)[:, None, None]
    k, v = (jnp.where(seen, x, 0).astype(jnp.float32).repeat(group, axis=1) for x in (k, v))
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("tnd,snd->tns", q.astype(jnp.float32), k, precision=highest) * scale
    if rel is not None and extent > 0:
        index = jnp.broadcast_to(jnp.clip(distance, 0, extent - 1)[:, None], scores.shape)
        near = (distance >= 0) & (distance < extent)
        scores += jnp.where(near[:, None], jnp.take_along_axis(rel, index, axis=-1), 0)
    if tau is not None:
        scores *= tau.astype(jnp.float32)[:, None, None]
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    weights = jnp.where(visible[:, None], jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30)), 0)
    total = weights.sum(-1, keepdims=True)
    weights /= jnp.where(total == 0, 1, total)
    return jnp.einsum("tns,snd->tnd", weights, v, precision=highest).astype(q.dtype)


def positions(start: jax.Array, count: jax.Array, rows: int) -> Int[Array, " rows"]:
    """start, start + 1, ... for `count` rows, then -1."""
    t = jnp.arange(rows, dtype=jnp.int32)
    return jnp.where(t < count, start + t, -1)
