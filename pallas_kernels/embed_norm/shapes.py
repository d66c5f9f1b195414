"""Inkling's embedding, decode to prefill, with the first layer's norm chained."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case
from pallas_kernels.embed_norm.api import embed_norm

HIDDEN, VOCAB = 6144, 201024


def case(rows: int) -> Case:
    def make(key, copies):
        keys = jax.random.split(key, copies + 1)
        table = jax.random.normal(keys[0], (VOCAB, HIDDEN), jnp.bfloat16)  # 2.5 GB: shared, its rows are not
        weights = [jax.random.normal(k, (2, HIDDEN), jnp.bfloat16) for k in keys[1:]]
        ids = [jax.random.randint(k, (rows,), 0, VOCAB, jnp.int32) for k in keys[1:]]
        return [((), (i, table, w[0], w[1])) for i, w in zip(ids, weights, strict=True)]

    def run(implementation, state, inputs):
        ids, table, weight, following = inputs
        return state, embed_norm(ids, table, weight, eps=1e-6, next_weight=following, implementation=implementation)

    return Case(f"rows {rows}, H {HIDDEN}", make, run, bytes_moved=(3 * rows + 2) * HIDDEN * 2)


CASES = tuple(case(rows) for rows in (1, 8, 64, 4096))
