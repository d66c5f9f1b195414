"""Inkling's prefill: a prompt of 8192 rows in global and local layers, and a chunk over a cached context."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.rel_attention.api import rel_attention

HEADS, DIM, REL, PAGE = 64, 128, 16, 64
GLOBAL: dict[str, Any] = dict(kv=8, extent=1024, window=None)
LOCAL: dict[str, Any] = dict(kv=16, extent=512, window=512)


def visible_pairs(start: int, rows: int, window: int | None) -> int:
    """Pairs of a query row and a key it sees."""
    return sum(min(start + t + 1, window or start + t + 1) for t in range(rows))


def case(rows: int, start: int = 0, *, kv: int, extent: int, window: int | None) -> Case:
    def make_one(key):
        keys = jax.random.split(key, 8)
        normal = lambda k, *shape: jax.random.normal(k, shape, jnp.bfloat16)  # noqa: E731
        fresh = normal(keys[0], 1, rows, HEADS, DIM), *(normal(k, 1, rows, kv, DIM) for k in keys[1:3])
        pages = ()
        if start:
            entries = jax.random.permutation(keys[3], start // PAGE).astype(jnp.int32)[None]
            k_pages, v_pages = (normal(k, start // PAGE, kv, PAGE, DIM) for k in keys[4:6])
            pages = k_pages, v_pages, entries, jnp.full(1, start, jnp.int32)
        return (), (fresh, pages, normal(keys[6], 1, rows, HEADS, REL), normal(keys[7], extent, REL))

    def run(implementation, state, inputs):
        fresh, pages, r, proj = inputs
        cached = dict(zip(("k_pages", "v_pages", "page_table", "start"), pages, strict=True)) if pages else {}
        options = dict(scale=1 / DIM, extent=extent, window=window, implementation=implementation)
        return state, rel_attention(*fresh, r=r, rel_proj=proj.T, **cached, **options)

    moved = 2 * DIM * (2 * rows * HEADS + 2 * (rows + min(start, window or start)) * kv)
    flops = 4 * HEADS * DIM * visible_pairs(start, rows, window)
    name = f"{'global' if window is None else 'local'} {HEADS}/{kv}, {rows} rows{f' after {start}' if start else ''}"
    return Case(name, apart(make_one), run, bytes_moved=moved, flops=flops)


CASES = (
    case(8192, **GLOBAL),
    case(8192, **LOCAL),
    case(512, 8192, **LOCAL),
    case(512, 8192, **GLOBAL),
)
