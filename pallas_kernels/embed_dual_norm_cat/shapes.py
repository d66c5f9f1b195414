"""The input of an MTP depth of Inkling, decode to prefill, gathered and pre-normed."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case
from pallas_kernels.embed_dual_norm_cat.api import embed_dual_norm_cat

HIDDEN, VOCAB = 6144, 201024


def case(rows: int) -> Case:
    def make(key, copies):
        keys = jax.random.split(key, copies + 1)
        table = jax.random.normal(keys[0], (VOCAB, HIDDEN), jnp.bfloat16)  # 2.5 GB: shared, its rows are not
        return [((), (*one(k), table)) for k in keys[1:]]

    def one(key):
        hidden = jax.random.normal(key, (rows, HIDDEN), jnp.bfloat16)
        weights = [jax.random.normal(k, (HIDDEN,), jnp.bfloat16) for k in jax.random.split(key, 3)]
        return hidden, *weights, jax.random.randint(key, (rows,), 0, VOCAB, jnp.int32)

    def run(implementation, state, inputs):
        hidden, hidden_weight, embed_weight, pre_norm_weight, ids, table = inputs
        out = embed_dual_norm_cat(
            *(hidden, hidden_weight, embed_weight),
            eps=1e-6,
            token_ids=ids,
            embed_table=table,
            pre_norm_weight=pre_norm_weight,
            implementation=implementation,
        )
        return state, out

    return Case(f"rows {rows}, H {HIDDEN}", make, run, bytes_moved=(4 * rows + 3) * HIDDEN * 2)


CASES = tuple(case(rows) for rows in (1, 8, 64, 512, 4096))
