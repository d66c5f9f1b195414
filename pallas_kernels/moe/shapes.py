"""Inkling's experts: hidden 6144, width 3072, top 6 of 64 or of 256; each row draws its experts at random.

The bytes counted are those of the experts that the drawn ids hit. Variants share the weights, and hit other experts.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._case import Case
from pallas_kernels.fp4 import BLOCK_OF, FP4, VALUES_A_WORD
from pallas_kernels.moe.api import moe

HIDDEN, WIDTH, CHOSEN = 6144, 3072, 6
BITS = {None: 16, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32}  # a weight


def draw_ids(rows: int, experts: int, variant: int = 0) -> np.ndarray:
    """Each variant names the experts anew, so all of them hit as many."""
    ids = np.argsort(np.random.default_rng([rows, experts]).random((rows, experts)), axis=1)[:, :CHOSEN]
    return np.random.default_rng(variant).permutation(experts)[ids].astype(np.int32)


def draw_weights(experts: int, form: str | None) -> tuple[jax.Array | FP4, jax.Array | FP4]:
    def one(key, shape):
        if form is None:
            return jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
        codes = jax.random.bits(key, (*shape[:-1], shape[-1] // VALUES_A_WORD), jnp.uint32)
        scales = jnp.full((*shape[:-1], shape[-1] // BLOCK_OF[form]), 56 if form == "nvfp4" else 120, jnp.uint8)
        return FP4(codes, scales, jnp.full(experts, 2.0**-7) if form == "nvfp4" else None, form)

    keys = jax.random.split(jax.random.key(0))
    return one(keys[0], (experts, 2, WIDTH, HIDDEN)), one(keys[1], (experts, HIDDEN, WIDTH))


def case(rows: int, experts: int, form: str | None) -> Case:
    def make(key, copies):
        w13, w2 = draw_weights(experts, form)
        variants = []
        for i, k in enumerate(jax.random.split(key, copies)):
            x = jax.random.normal(k, (rows, HIDDEN), jnp.bfloat16)
            ids = jnp.asarray(draw_ids(rows, experts, i))
            variants.append(((), (x, ids, jnp.full((rows, CHOSEN), 1 / CHOSEN), w13, w2)))
        return variants

    def run(implementation, state, inputs):
        return state, moe(*inputs, implementation=implementation)

    hit = len(np.unique(draw_ids(rows, experts)))
    moved = hit * 3 * WIDTH * HIDDEN * BITS[form] / 8 + 2 * 2 * rows * HIDDEN
    flops = 2 * 3 * WIDTH * HIDDEN * rows * CHOSEN
    return Case(f"{form or 'bf16'}, rows {rows}, top {CHOSEN} of {experts}", make, run, bytes_moved=round(moved), flops=flops)


CASES = tuple(
    case(rows, experts, form)
    for experts, counts in ((64, (1, 8, 16, 64)), (256, (1, 16)))
    for form in (None, "nvfp4", "mxfp4")
    for rows in counts + ((8192,) if form is None and experts == 64 else ())
)
