"""top-p over the vocabulary of both models, for batches of rows; its rival sorts."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.cutoff.api import cutoff

VOCABULARY, TOP_P = 200_058, 0.95


def sort(x: jax.Array) -> jax.Array:
    """The logit of the last token that top-p keeps."""
    ordered = jnp.sort(x, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    count = jnp.sum(jnp.cumsum(probability, axis=-1) - probability < TOP_P, axis=-1)
    return jnp.take_along_axis(ordered, jnp.maximum(count, 1)[:, None] - 1, axis=1)


def case(rows: int) -> Case:
    def make_one(key):
        x = 2 * jax.random.normal(key, (rows, VOCABULARY), jnp.float32)
        return (), x - x.max(axis=1, keepdims=True)

    def run(implementation, state, x):
        if implementation == "sort":
            return state, sort(x)
        wanted = TOP_P * jnp.exp(x).sum(axis=1)
        return state, cutoff(x, wanted, weighted=True, implementation=implementation)

    return Case(f"rows {rows}, V {VOCABULARY}", apart(make_one), run, rows * (VOCABULARY * 4 + 12), rival="sort")


CASES = tuple(map(case, (1, 8, 64)))
