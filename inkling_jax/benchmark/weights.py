"""Random weights, drawn on the device one tensor at a time.

They are distributed as the modules draw their own: matrices N(0, 1 / fan_in), norms and scales 1, selection bias 0. The
router's input is normed and its rows are N(0, 1 / hidden), so its logits are about N(0, 1).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from ..config import InklingConfig
from ..decode.engine import free_memory
from ..nn import abstract_parameters

BLOCK = 2**24  # elements drawn at a time: 64 MiB of float32 are all that drawing needs beside the tensor


def random_parameters(config: InklingConfig, dtype: str, seed: int) -> dict[str, Array]:
    """Every parameter by its dotted path. Raises MemoryError, before anything is drawn, when they do not fit."""
    abstract = abstract_parameters(config, dtype)
    needed = sum(spec.size * spec.dtype.itemsize for spec in abstract.values())
    free = free_memory(jnp.zeros(()))
    if free is not None and needed > free:
        raise MemoryError(
            f"the weights need {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free on the device: take a "
            f"smaller config, or give JAX more of the device with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )
    seeds = np.random.default_rng(seed).integers(2**32, size=len(abstract), dtype=np.uint32)
    return {path: _draw(path, spec, own) for (path, spec), own in zip(abstract.items(), seeds, strict=True)}


def _draw(path: str, spec: jax.ShapeDtypeStruct, seed: np.uint32) -> Array:
    name = path.rpartition(".")[2]
    if name in ("scale", "bias"):
        return jnp.full(spec.shape, float(name == "scale"), spec.dtype)
    if path.endswith("norm.weight"):
        return jnp.ones(spec.shape, spec.dtype)
    return fill(jnp.zeros(spec.shape, spec.dtype), seed, 1 / math.sqrt(spec.shape[-1]))


@functools.partial(jax.jit, donate_argnums=0)
def fill(buffer: Float[Array, "*rows C"], seed: UInt32[Array, ""] | np.uint32, scale: float) -> Float[Array, "*rows C"]:
    """N(0, scale^2) in place of what the buffer holds, a block of rows at a time: no second copy in any dtype.

    A hash of the element's number in its block and of the block's seed makes the bits: a tenth of a second to compile
    for a new shape, where `jax.random` takes half of one (CPU, jax 0.12.0.1, 2026-11-30).
    """
    rows = buffer.reshape(-1, buffer.shape[-1])
    count, width = rows.shape
    block = min(count, max(1, BLOCK // width))
    number = jnp.arange(block, dtype=jnp.uint32)[:, None] * np.uint32(width) + jnp.arange(width, dtype=jnp.uint32)

    def step(i: Array, rows: Array) -> Array:
        start = jnp.minimum(i * block, count - block)  # the last block overlaps the one before it
        bits = _mix(number + _mix(seed + _mix(i.astype(jnp.uint32))))
        between = (bits >> 8).astype(jnp.float32) * np.float32(2**-23) - np.float32(1 - 2**-24)  # in (-1, 1)
        drawn = scale * math.sqrt(2) * lax.erf_inv(between)
        return lax.dynamic_update_slice_in_dim(rows, drawn.astype(rows.dtype), start, axis=0)

    return lax.fori_loop(0, -(-count // block), step, rows).reshape(buffer.shape)


def _mix(x: Array) -> Array:
    """A permutation of the 32-bit integers that leaves no trace of their order ("lowbias32" of hash-prospector)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
