"""Inkling's decode and verify: global layers (8 KV heads, extent 1024) and local ones (16, window and extent 512)."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.rel_paged_attention.api import rel_paged_attention

HEADS, DIM, REL, PAGE = 64, 128, 16, 64
GLOBAL: dict[str, Any] = dict(kv=8, extent=1024, window=None)
LOCAL: dict[str, Any] = dict(kv=16, extent=512, window=512)
LOCAL_CONTEXT = 4096


def case(batch: int, context: int, rows: int = 1, *, kv: int, extent: int, window: int | None, projected=False) -> Case:
    """`projected`: the relative logits are given by distance, and the product that makes them is part of the time."""
    table = context // PAGE

    def make_one(key):
        keys = jax.random.split(key, 6)
        normal = lambda k, *shape: jax.random.normal(k, shape, jnp.bfloat16)  # noqa: E731
        pages = [normal(k, batch * table, kv, PAGE, DIM) for k in keys[:2]]
        entries = jax.random.permutation(keys[2], batch * table).astype(jnp.int32).reshape(batch, table)
        r, proj = normal(keys[4], batch, rows, HEADS, REL), normal(keys[5], extent, REL)
        q, lengths = normal(keys[3], batch, rows, HEADS, DIM), jnp.full(batch, context, jnp.int32)
        return (), (q, *pages, entries, lengths, r, proj)

    def run(implementation, state, inputs):
        *arrays, r, proj = inputs
        relative = dict(r=r, rel_proj=proj.T)
        if projected:
            relative = dict(rel_logits=r @ proj.T)
        options = dict(scale=1 / DIM, extent=extent, window=window, implementation=implementation)
        return state, rel_paged_attention(*arrays, **relative, **options)

    seen = context if window is None else window + rows - 1
    moved = 2 * batch * (2 * seen * kv + 2 * rows * HEADS) * DIM
    kind = f"{'global' if window is None else 'local'} {HEADS}/{kv}, {batch} x {context}"
    name = f"{kind}{f', {rows} rows' if rows > 1 else ''}{', projected' if projected else ''}"
    return Case(name, apart(make_one), run, bytes_moved=moved)


CASES = (
    case(1, 8192, **GLOBAL),
    case(1, 65536, **GLOBAL),
    case(1, 131072, **GLOBAL),
    case(64, 4096, **GLOBAL),
    case(1, 8192, 4, **GLOBAL),
    case(64, 4096, 4, **GLOBAL),
    case(1, 8192, **GLOBAL, projected=True),
    case(64, 4096, **GLOBAL, projected=True),
    case(1, LOCAL_CONTEXT, **LOCAL, projected=True),
    case(1, LOCAL_CONTEXT, **LOCAL),
    case(64, LOCAL_CONTEXT, **LOCAL),
    case(1, LOCAL_CONTEXT, 4, **LOCAL),
    case(64, LOCAL_CONTEXT, 4, **LOCAL),
)
