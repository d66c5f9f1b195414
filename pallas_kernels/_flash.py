"""The softmax that both attention kernels run block by block, in powers of two."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
# Where a running maximum starts. Finite, so that a row that sees no key subtracts numbers and not infinities.
FLOOR = -1e30


class Softmax(NamedTuple):
    """A softmax in progress over the rows of a tile: the weighted values, the largest score, the sum of weights.

    `total` [rows, keys] keeps a sum for each key of a block, added up at the end: few rows are spread over several
    warps, which a sum in every step would make wait for each other. [rows, 1] where registers are dear.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


def start(rows: int, columns: int, sums: int = 1) -> Softmax:
    """The state that has seen no key; `sums` is 1 or the number of keys of a block."""
    top = jnp.full((rows,), FLOOR, jnp.float32)
    return Softmax(jnp.zeros((rows, columns), jnp.float32), top, jnp.zeros((rows, sums), jnp.float32))


def step(state: Softmax, scores: jax.Array, values: jax.Array) -> Softmax:
    """Take in a block of keys: scores [rows, keys] times log2(e), -inf where invisible; values [keys, columns]."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    keep = jnp.exp2(state.top - top)
    weights = jnp.exp2(scores - top[:, None])
    out = state.out * keep[:, None] + dot(weights.astype(values.dtype), values)
    added = weights if state.total.shape == weights.shape else jnp.sum(weights, axis=1)[:, None]
    return Softmax(out, top, state.total * keep[:, None] + added)


def merge(first: Softmax, then: Softmax) -> Softmax:
    """The softmax over the keys of both, `total` [rows, 1]: that of the lower top is scaled and added to the other.

    One product and one sum: a compiler may fuse them in one way only, so that two kernels that merge the same states in
    the same order give the same bits.
    """
    later = (then.top > first.top)[:, None]
    scale = jnp.exp2(jnp.minimum(first.top, then.top) - jnp.maximum(first.top, then.top))[:, None]

    def add(x, y):
        return jnp.where(later, y, x) + jnp.where(later, x, y) * scale

    return Softmax(add(first.out, then.out), jnp.maximum(first.top, then.top), add(first.total, then.total))


def gather_sums(state: Softmax) -> Softmax:
    """The state with its sums over keys added up, `total` [rows, 1].

    Neighbours are added pair by pair, so that the order is that of the keys and not of the threads that hold them.
    """
    total = state.total
    while total.shape[1] > 1:
        total = jnp.sum(total.reshape(total.shape[0], -1, 2), axis=2)
    return state._replace(total=total)


def finish(state: Softmax) -> jax.Array:
    """The weighted mean of the values, zeros where no key was seen."""
    total = jnp.sum(state.total, axis=1)
    return state.out / jnp.where(total == 0.0, 1.0, total)[:, None]


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32. The highest precision, because f32 products otherwise run as TF32 on a GPU."""
    return lax.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b.T in float32, precision as in `dot`."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def every(masks: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """Where all of the masks hold, in full shape; None where there is none, so that a load goes unmasked."""
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(mask, shape) for mask in masks)) if masks else None


def divide(x: jax.Array, n: int) -> jax.Array:
    """x // n for x >= 0: one instruction, where `//` adds the handling of signs."""
    return lax.div(x, jnp.full(x.shape, n, x.dtype))


def remainder(x: jax.Array, n: int) -> jax.Array:
    """x % n for x >= 0."""
    return lax.rem(x, jnp.full(x.shape, n, x.dtype))


def divide_up(x: jax.Array, n: int) -> jax.Array:
    """The least number of blocks of n that hold x >= 0 things."""
    return divide(x + (n - 1), n)
