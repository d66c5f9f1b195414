"""Inkling's two residual streams: conv, add and norm over one token, a verify, a batch, a prefill."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.short_conv.api import short_conv_add_norm

HIDDEN, TAPS = 6144, 4


def case(batch: int, rows: int, ring_rows: int, summands: int = 0) -> Case:
    """`summands`: x comes in so many float32 parts, which the plain path adds up in a launch of its own."""

    def make_one(key):
        keys = jax.random.split(key, 4)
        x, residual = (jax.random.normal(k, (batch, rows, HIDDEN), jnp.bfloat16) for k in keys[:2])
        if summands:
            x = jax.random.normal(keys[0], (summands, *x.shape), jnp.float32)
        weight = jax.random.normal(keys[2], (HIDDEN, TAPS), jnp.bfloat16)
        norm = jnp.ones((HIDDEN,), jnp.bfloat16)
        ring = jax.random.normal(keys[3], (batch, ring_rows, HIDDEN), jnp.bfloat16)
        start, count = jnp.full((batch,), 1000, jnp.int32), jnp.full((batch,), rows, jnp.int32)
        return ring, (x, weight, start, count, residual, norm)

    def run(implementation, ring, inputs):
        x, weight, *others = inputs
        out, normed, ring = short_conv_add_norm(x, weight, ring, *others, eps=1e-6, implementation=implementation)
        return ring, (out, normed)

    rings = batch * (TAPS - 1 + min(rows, ring_rows))
    moved = ((3 + max(2 * summands, 1)) * batch * rows + rings + TAPS + 1) * HIDDEN * 2
    kind = f", {summands} summands" if summands else ""
    return Case(f"{batch} x {rows} rows, C {HIDDEN}{kind}", apart(make_one), run, bytes_moved=moved)


CASES = (case(1, 1, 12), case(1, 4, 12), case(8, 1, 12), case(64, 1, 12), case(1, 8192, 12), case(1, 1, 12, 2))
