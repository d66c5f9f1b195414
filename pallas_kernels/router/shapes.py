"""Inkling's router: 256 routed experts and 2 shared, 6 chosen."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.router.api import router

EXPERTS, SHARED, CHOSEN = 256, 2, 6


def case(rows: int) -> Case:
    def make_one(key):
        logits = jax.random.normal(key, (rows, EXPERTS + SHARED))
        return (), (logits, jax.random.normal(key, (EXPERTS,)) * 0.1, jnp.float32(8.0))

    def run(implementation, state, inputs):
        return state, router(*inputs, experts_per_token=CHOSEN, implementation=implementation)

    moved = (rows * (EXPERTS + SHARED + 2 * CHOSEN + SHARED) + EXPERTS + 1) * 4
    return Case(f"rows {rows}, top {CHOSEN} of {EXPERTS}", apart(make_one), run, bytes_moved=moved)


CASES = tuple(case(rows) for rows in (1, 8, 64, 8192))
