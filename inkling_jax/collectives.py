"""Sums and gathers between the devices of a mesh, named by the logical axis that is split (`sharding.TABLE`).

A step runs under `jax.shard_map`: every device runs the model on its own shards. Where the axis is not split, and
wherever there is no mesh, each function here is the identity and leaves no trace in the program.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from .sharding import TABLE

WHOLE_ROWS = 256
"""Most rows of a step whose row-parallel products are summed whole on every device (`few`)."""

GATHERED = 2**20
"""Most numbers that a sum may gather on a device (`summands`)."""


def few(rows: int, axis: str | None) -> bool:
    """Whether a step of so many rows a device sums a branch whole; else it does reduce-scatter and all-gather.

    Both move the same bytes. With few rows latency counts, and one collective has half of two; with many the short
    convolution and the sum are worth splitting. Two H200s meet between 128 and 512 rows of H = 6144
    (docs/distributed.md has the figures).
    """
    return sums_whole(parts(axis), rows)


def sums_whole(devices: int, rows: int) -> bool:
    """The rule of `few`, for so many devices."""
    return devices == 1 or rows <= WHOLE_ROWS


def gathers(devices: int, numbers: int) -> bool:
    """Whether a sum of so many numbers gathers what the devices hold (`summands`), or is an all-reduce."""
    return devices == 1 or devices * numbers <= GATHERED


def parts(axis: str | None) -> int:
    """Over how many devices a dimension of this logical axis is split; 1 outside of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _names(axis))


def summand_dtype(axis: str | None, dtype: DTypeLike) -> DTypeLike:
    """The dtype of this device's part of a sum over `axis`: float32, rounded once it is whole; `dtype` if it is."""
    return jnp.float32 if parts(axis) > 1 else dtype


def index(axis: str | None) -> Int[Array, ""] | int:
    """Which of the parts is this device's."""
    return lax.axis_index(_names(axis)) if parts(axis) > 1 else 0


def own(x: Shaped[Array, "..."], axis: str | None, dimension: int = -1) -> Shaped[Array, "..."]:
    """This device's part of an array that is whole here."""
    if parts(axis) == 1:
        return x
    size = x.shape[dimension] // parts(axis)
    return lax.dynamic_slice_in_dim(x, index(axis) * size, size, dimension)


def all_reduce(x: Shaped[Array, "..."], axis: str | None) -> Shaped[Array, "..."]:
    """The sum in float32 of what the devices hold, whole on each."""
    return summands(x, axis).astype(jnp.float32).sum(axis=0) if parts(axis) > 1 else x


def summands(x: Shaped[Array, "..."], axis: str | None) -> Shaped[Array, "parts ..."]:
    """What each device still has to add up for the sum of what they hold, all in the same order.

    Of a small sum all parts: one way through the wires, where an all-reduce has two. Of a large one itself alone.
    """
    if gathers(parts(axis), x.size):
        return exchange(x, axis)
    return lax.psum(x.astype(jnp.float32), _names(axis))[None]


def reduce_scatter(x: Shaped[Array, "... C"], axis: str | None) -> Shaped[Array, "... c"]:
    """This device's part, along the last dimension, of the sum of what the devices hold."""
    if parts(axis) == 1:
        return x
    return lax.psum_scatter(x, _names(axis), scatter_dimension=x.ndim - 1, tiled=True)


def all_gather(x: Shaped[Array, "... c"], axis: str | None) -> Shaped[Array, "... C"]:
    """The devices' parts of the last dimension put together."""
    if parts(axis) == 1:
        return x
    return jnp.moveaxis(exchange(x, axis), 0, -2).reshape(*x.shape[:-1], -1)


def exchange(x: Shaped[Array, "..."], axis: str | None) -> Shaped[Array, "parts ..."]:
    """What each device holds, in the order of the parts."""
    return lax.all_gather(x, _names(axis)) if parts(axis) > 1 else x[None]


def _names(axis: str | None) -> tuple[str, ...]:
    """The mesh axes that really split a logical one, in a program that runs on each device."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in TABLE[axis] if name in mesh.manual_axes and mesh.shape[name] > 1)
