"""The checks that both attention ops share."""

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch as dispatch


def check_heads(op: str, q: jax.Array, k: jax.Array, v: jax.Array, names: tuple[str, str]) -> None:
    """Raise ValueError unless keys fit the query heads; their heads are axis 1 of pages and axis 2 of rows."""
    axis = 1 if names[0].endswith("pages") else 2
    if k.ndim != 4:
        raise ValueError(f"{op}: {names[0]} has shape {list(k.shape)}; expected 4 axes")
    dispatch.check_shape(op, names[1], v, k.shape)
    heads, head_dim, kv_heads = q.shape[2], q.shape[3], k.shape[axis]
    if k.shape[3] != head_dim:
        raise ValueError(f"{op}: {names[0]} has head size {k.shape[3]} and q has {head_dim}; expected the same")
    if not 32 <= head_dim <= 256:
        raise ValueError(f"{op}: q has head size {head_dim}; expected 32 to 256")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads and {names[0]} {kv_heads}; expected a whole number for each")
    for name, x in zip(names, (k, v), strict=True):
        dispatch.check_float(op, name, x, like=q)


def check_relative(
    op: str,
    q: jax.Array,
    rel_logits: jax.Array | None,
    r: jax.Array | None,
    rel_proj: jax.Array | None,
    tau: jax.Array | None,
    extent: int,
    window: int | None,
) -> None:
    """Raise ValueError unless the relative term is given once, whole and in q's shape, and tau is one number a row."""
    batch, rows, heads, _ = q.shape
    if (r is None) != (rel_proj is None):
        raise ValueError(f"{op}: r and rel_proj come together; {'r' if r is None else 'rel_proj'} is missing")
    if r is not None and rel_logits is not None:
        raise ValueError(f"{op}: rel_logits and r, rel_proj say the same; expected only one of them")
    if extent < 0 or (window is not None and window < 1):
        raise ValueError(f"{op}: extent is {extent} and window {window}; expected extent >= 0 and window >= 1 or None")
    if rel_logits is not None:
        dispatch.check_shape(op, "rel_logits", rel_logits, (batch, rows, heads, extent))
        dispatch.check_float(op, "rel_logits", rel_logits)
    if r is not None and rel_proj is not None:
        dispatch.check_shape(op, "r", r, (batch, rows, heads, None))
        dispatch.check_shape(op, "rel_proj", rel_proj, (r.shape[3], extent))
        dispatch.check_float(op, "r", r)
        dispatch.check_float(op, "rel_proj", rel_proj, like=r)
    if tau is not None:
        dispatch.check_shape(op, "tau", tau, (batch, rows))
        dispatch.check_dtype(op, "tau", tau, (*dispatch.FLOATS, jnp.float32))
