"""The routers of Inkling's two sizes and of the benchmark's slice: H, routed experts; 2 shared experts, 6 chosen."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.router.api import router

SHARED, CHOSEN = 2, 6


def case(rows: int, hidden: int, experts: int) -> Case:
    def make_one(key):
        x = jax.random.normal(key, (rows, hidden), jnp.bfloat16)
        weight = jax.random.normal(key, (experts + SHARED, hidden), jnp.bfloat16) / hidden**0.5
        return (), (x, weight, jax.random.normal(key, (experts,)) * 0.1, jnp.float32(1.0))

    def run(implementation, state, inputs):
        return state, router(*inputs, experts_per_token=CHOSEN, route_scale=8.0, implementation=implementation)

    moved = (rows + experts + SHARED) * hidden * 2 + (rows * (2 * CHOSEN + SHARED) + experts + 1) * 4
    flops = 2 * rows * (experts + SHARED) * hidden
    return Case(f"rows {rows}, top {CHOSEN} of {experts}, H {hidden}", apart(make_one), run, moved, flops)


CASES = (*(case(rows, 6144, 64) for rows in (1, 8, 64)), *(case(rows, 4096, 256) for rows in (1, 64, 8192)))
