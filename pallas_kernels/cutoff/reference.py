"""The definition, in jnp: a search among all depths, 32 blocks of them at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

BLOCKS = 32
DEEPEST = 2**31 - 1
PASSES = ((26, 32), (21, 32), (16, 32), (11, 32), (6, 32), (1, 32), (0, 2))
"""A pass looks at so many blocks of 2^shift depths, which are one block of the pass before: 31 bits in all."""

Sum = Callable[[jax.Array], jax.Array]


def depth_of(x: jax.Array) -> jax.Array:
    """Numbers at or below 0 (and NaN) as int32 that grow as they fall: the bits of -x."""
    return lax.bitcast_convert_type(-x, jnp.int32) & DEEPEST


def block_of(depth: jax.Array, first: jax.Array, last: jax.Array, shift: jax.Array | int) -> jax.Array:
    """Which of the blocks of 2^shift depths from `first` on a depth lies in; BLOCKS outside of all, or past `last`."""
    block = (depth - first) >> shift
    return jnp.where((depth >= first) & (block < BLOCKS) & (depth <= last), block, BLOCKS)


def narrow(sums: jax.Array, before: jax.Array, wanted: jax.Array, most: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """In which of `most` blocks, whose sums stand along the last axis, the sum reaches `wanted`; and that before it.

    The last block where none does. `before`: the sum of what lies before all of them, as `wanted` without that axis.
    """
    block = jnp.arange(BLOCKS, dtype=jnp.int32)
    short = before[..., None] + jnp.cumsum(sums, axis=-1) < wanted[..., None]
    found = jnp.minimum(jnp.sum(short.astype(jnp.int32), axis=-1), most - 1)
    return found, before + jnp.sum(jnp.where(block < found[..., None], sums, 0.0), axis=-1)


def cutoff_reference(
    x: Float[Array, "N V"], wanted: Float[Array, " N"], last: Int32[Array, " N"], weighted: bool, add_up: Sum | None
) -> Int32[Array, " N"]:
    depth, block = depth_of(x), jnp.arange(BLOCKS, dtype=jnp.int32)
    weights = jnp.exp(x) if weighted else jnp.ones_like(x)
    first, before = jnp.zeros(x.shape[0], jnp.int32), jnp.zeros(x.shape[0], jnp.float32)
    for shift, most in PASSES:
        own = block_of(depth, first[:, None], last[:, None], shift)
        sums = jnp.sum(jnp.where(own[:, None] == block[:, None], weights[:, None], 0.0), axis=2)
        found, before = narrow(sums if add_up is None else add_up(sums), before, wanted, most)
        first += found << shift
    return first
