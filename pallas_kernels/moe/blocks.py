"""Pairs of a row and one of its experts, sorted by expert and cut into blocks that share one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Blocks(NamedTuple):
    """Block b holds the pairs order[first] .. order[end - 1], all of one expert; pair p is row p // A with its p % A."""

    table: Int32[Array, "3 blocks"]  # expert, first, end; first = end where there is no block
    order: Int32[Array, " pairs"]


def is_hit(ids: jax.Array, experts: int, valid: Bool[Array, " M"] | None) -> Bool[Array, "M A"]:
    """Which pairs are computed: of real rows, with experts that exist."""
    hit = (ids >= 0) & (ids < experts)
    return hit if valid is None else hit & valid[:, None]


def make_blocks(ids: Int32[Array, "M A"], hit: Bool[Array, "M A"], experts: int, size: int) -> Blocks:
    """Blocks of at most `size` pairs, by expert, as many as there can be."""
    pairs = ids.size
    flat = jnp.where(hit, ids, experts).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    expert = jnp.arange(experts, dtype=jnp.int32)
    count = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    start = jnp.cumsum(count) - count
    blocks = (count + (size - 1)) // size
    after = jnp.cumsum(blocks)
    before = after - blocks
    block = jnp.arange(min(pairs, min(experts, pairs) + pairs // size), dtype=jnp.int32)
    own = (block[:, None] >= before) & (block[:, None] < after)
    of_own = lambda value: jnp.sum(jnp.where(own, value, 0), axis=1)  # noqa: E731
    first = of_own(start + (block[:, None] - before) * size)
    end = jnp.minimum(first + size, of_own(start + count))
    return Blocks(jnp.stack([of_own(expert), first, end]), order)
