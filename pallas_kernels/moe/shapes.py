"""The experts of the models, whole and sharded two ways; each row draws its top 6 at random.

Inkling has hidden 6144, width 3072 and 256 experts, of which a small model keeps 64; Inkling-Small 4096, 2048 and 256.
Tensor sharding halves the width; expert sharding halves the experts, and a row's others are elsewhere. The bytes
counted are those of the experts that the drawn ids hit. Variants share the weights, and hit other experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._case import Case
from pallas_kernels.fp4 import BLOCK_OF, FP4, VALUES_A_WORD
from pallas_kernels.moe.api import moe

CHOSEN = 6
RIVAL = "ragged_dot"
BITS = {None: 16, "nvfp4": 4 + 8 / 16, "mxfp4": 4 + 8 / 32}  # a weight


def draw_ids(rows: int, experts: int, variant: int = 0) -> np.ndarray:
    """Each variant names the experts anew, so all of them hit as many."""
    ids = np.argsort(np.random.default_rng([rows, experts]).random((rows, experts)), axis=1)[:, :CHOSEN]
    return np.random.default_rng(variant).permutation(experts)[ids].astype(np.int32)


def draw_weights(experts: int, form: str | None, hidden: int, width: int) -> tuple[jax.Array | FP4, jax.Array | FP4]:
    def one(key, shape):
        if form is None:
            return jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
        codes = jax.random.bits(key, (*shape[:-1], shape[-1] // VALUES_A_WORD), jnp.uint32)
        scales = jnp.full((*shape[:-1], shape[-1] // BLOCK_OF[form]), 56 if form == "nvfp4" else 120, jnp.uint8)
        return FP4(codes, scales, jnp.full(experts, 2.0**-7) if form == "nvfp4" else None, form)

    keys = jax.random.split(jax.random.key(0))
    return one(keys[0], (experts, 2, width, hidden)), one(keys[1], (experts, hidden, width))


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


def case(rows: int, experts: int, form: str | None, hidden: int = 6144, width: int = 3072, absent: int = 0) -> Case:
    """`absent` experts are on other devices, and so are the pairs that visit them."""

    def make(key, copies):
        w13, w2 = draw_weights(experts, form, hidden, width)
        variants = []
        for i, k in enumerate(jax.random.split(key, copies)):
            x = jax.random.normal(k, (rows, hidden), jnp.bfloat16)
            ids = jnp.asarray(draw_ids(rows, experts + absent, i))
            variants.append(((), (x, ids, jnp.full((rows, CHOSEN), 1 / CHOSEN), w13, w2)))
        return variants

    def run(implementation, state, inputs):
        if implementation == RIVAL:
            return state, with_ragged_dot(*inputs)
        return state, moe(*inputs, elsewhere=absent, implementation=implementation)

    ids = draw_ids(rows, experts + absent)
    ids = ids[ids < experts]
    moved = len(np.unique(ids)) * 3 * width * hidden * BITS[form] / 8 + 2 * 2 * rows * hidden
    flops = 2 * 3 * width * hidden * ids.size
    shard = f" of {experts + absent}" if absent else ""
    name = f"{form or 'bf16'} {hidden} x {width}, rows {rows}, top {CHOSEN} of {experts}{shard}"
    rival = RIVAL if form is None and not absent else None
    return Case(name, make, run, bytes_moved=round(moved), flops=flops, rival=rival)


SMALL = {"hidden": 4096, "width": 2048}
CASES = (
    *(case(rows, 64, None) for rows in (1, 8, 16, 64, 2048, 8192)),
    *(case(rows, 64, form) for form in ("nvfp4", "mxfp4") for rows in (1, 8, 16, 64)),
    *(case(rows, 256, form) for form in (None, "nvfp4", "mxfp4") for rows in (1, 16)),
    *(case(rows, 256, "nvfp4", **SMALL) for rows in (1, 8, 16, 64)),
    *(case(rows, 256, "nvfp4", 4096, 1024) for rows in (1, 8, 16, 64)),
    *(case(rows, 128, "nvfp4", **SMALL, absent=128) for rows in (1, 8, 16, 64)),
    *(case(rows, 256, "mxfp4", **SMALL) for rows in (1, 8, 16, 64)),
)
