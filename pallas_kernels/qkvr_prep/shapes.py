"""Inkling's global (8 KV heads) and local (16) layers: one token, a verify, a batch; a prefill without pages."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.qkvr_prep.api import qkvr_prep

HEADS, DIM, REL, TAPS, RING, PAGE = 64, 128, 16, 4, 12, 64


def case(kind: str, kv: int, batch: int, rows: int, paged: bool = True) -> Case:
    product, channels = (HEADS + 2 * kv) * DIM + HEADS * REL, kv * DIM
    table = 2 + rows // PAGE

    def make_one(key):
        keys = jax.random.split(key, 8)
        normal = lambda k, *shape: jax.random.normal(k, shape, jnp.bfloat16)  # noqa: E731
        state = [normal(k, batch, RING, channels) for k in keys[:2]]
        if paged:
            state += [normal(k, batch * table, kv, PAGE, DIM) for k in keys[2:4]]
        weights = (*(normal(k, channels, TAPS) for k in keys[4:6]), normal(keys[6], DIM), normal(keys[7], DIM))
        rows_of = jnp.full((batch,), 60, jnp.int32), jnp.full((batch,), rows, jnp.int32)
        entries = jnp.arange(batch * table, dtype=jnp.int32).reshape(batch, table)
        return tuple(state), (normal(key, batch, rows, product), *weights, *rows_of, entries)

    def run(implementation, state, inputs):
        qkvr, *weights, start, count, entries = inputs
        pages = dict(k_pages=state[2], v_pages=state[3], page_table=entries) if paged else {}
        out = qkvr_prep(
            *(qkvr, *weights, *state[:2], start, count),
            **dict(heads=HEADS, kv_heads=kv, eps=1e-6, implementation=implementation, **pages),
        )
        state = (out.k_ring, out.v_ring, *((out.k_pages, out.v_pages) if paged else ()))
        return state, (out.q, out.r) if paged else (out.q, out.r, out.k, out.v)

    rings = 2 * channels * (batch * (TAPS - 1 + min(rows, RING)) + TAPS)
    moved = (2 * batch * rows * product + rings + 2 * DIM) * 2
    return Case(f"{kind}, {batch} x {rows} rows", apart(make_one), run, bytes_moved=moved)


CASES = (
    case("global", 8, 1, 1),
    case("local", 16, 1, 1),
    case("local", 16, 1, 4),
    case("local", 16, 64, 1),
    case("local", 16, 1, 8192, paged=False),
)
