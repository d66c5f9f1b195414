"""The definition, in jnp: a search among all depths, 32 blocks of them at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import target

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


def block_sums(block: jax.Array, weights: jax.Array) -> jax.Array:
    """The weights [rows, columns] of each block: [rows, BLOCKS].

    A CPU adds each number once, in runs of 1024 columns. A GPU would do that in any order, and looks for each block.
    """
    rows, columns = block.shape
    if target().platform != "cpu":
        own = block[:, None] == jnp.arange(BLOCKS, dtype=jnp.int32)[:, None]
        return jnp.sum(jnp.where(own, weights[:, None], 0.0), axis=2)
    row, run = jnp.arange(rows)[:, None], jnp.arange(columns) // 1024
    sums = jnp.zeros((rows, -(-columns // 1024), BLOCKS + 1), jnp.float32)
    return sums.at[row, run, block].add(weights)[..., :BLOCKS].sum(axis=1)


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
    depth = depth_of(x)
    weights = jnp.exp(x) if weighted else jnp.ones_like(x)
    first, before = jnp.zeros(x.shape[0], jnp.int32), jnp.zeros(x.shape[0], jnp.float32)
    for shift, most in PASSES:
        sums = block_sums(block_of(depth, first[:, None], last[:, None], shift), weights)
        found, before = narrow(sums if add_up is None else add_up(sums), before, wanted, most)
        first += found << shift
    return first
