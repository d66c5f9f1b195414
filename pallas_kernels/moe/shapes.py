"""Inkling's experts: hidden 6144, width 3072, top 6 of 64 or of 256; each row draws its experts at random.

The bytes counted are those of the experts that the drawn ids hit. Variants share the weights, and hit other experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._case import Case
from pallas_kernels.fp4 import BLOCK_OF, FP4, VALUES_A_WORD
from pallas_kernels.moe.api import moe

HIDDEN, WIDTH, CHOSEN = 6144, 3072, 6
RIVAL = "ragged_dot"
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


def with_ragged_dot(x: jax.Array, ids: jax.Array, weights: jax.Array, w13: jax.Array, w2: jax.Array) -> jax.Array:
    """The same by `lax.ragged_dot_general` over rows sorted by expert: what JAX has for it."""
    experts, (rows, chosen) = w13.shape[0], ids.shape
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    axes = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, axes, preferred_element_type=jnp.float32)

    gate, up = jnp.split(product(x[order // chosen], w13.reshape(experts, -1, w13.shape[-1])), 2, axis=-1)
    each = product((jax.nn.silu(gate) * up).astype(x.dtype), w2)
    each = jnp.zeros_like(each).at[order].set(each).reshape(rows, chosen, -1)
    return jnp.sum(each * weights[..., None], axis=1).astype(x.dtype)


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
        if implementation == RIVAL:
            return state, with_ragged_dot(*inputs)
        return state, moe(*inputs, implementation=implementation)

    hit = len(np.unique(draw_ids(rows, experts)))
    moved = hit * 3 * WIDTH * HIDDEN * BITS[form] / 8 + 2 * 2 * rows * HIDDEN
    flops = 2 * 3 * WIDTH * HIDDEN * rows * CHOSEN
    name = f"{form or 'bf16'}, rows {rows}, top {CHOSEN} of {experts}"
    rival = RIVAL if form is None else None
    return Case(name, make, run, bytes_moved=round(moved), flops=flops, rival=rival)


CASES = tuple(
    case(rows, experts, form)
    for experts, counts in ((64, (1, 8, 16, 64)), (256, (1, 16)))
    for form in (None, "nvfp4", "mxfp4")
    for rows in counts + ((8192,) if form is None and experts == 64 else ())
)
