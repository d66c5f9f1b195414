"""Random weights, drawn on the device one tensor at a time.

They are distributed as the modules draw their own: matrices N(0, 1 / fan_in), norms and scales 1, selection bias 0. The
router's input is normed and its rows are N(0, 1 / hidden), so its logits are about N(0, 1). Matrices in 4 bits have
random codes and block scales, of mean square 1 / fan_in once they are unpacked.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Shaped, UInt32

from pallas_kernels.fp4 import BLOCK_OF, E2M1, VALUES_A_WORD

from ..config import InklingConfig
from ..memory import check_memory
from ..nn import abstract_parameters
from ..quantization import Quantization
from ..sharding import shardings

BLOCK = 2**24  # elements drawn at a time: 64 MiB of float32 are all that drawing needs beside the tensor
_CODES = sum(value**2 for value in E2M1) / len(E2M1)  # the variance of codes that are all as likely
_FLOAT8 = sum((1 + i / 8) ** 2 for i in range(8)) / 8  # the mean square of the block scales of NVFP4


def random_parameters(
    config: InklingConfig, dtype: str, seed: int, quantization: Quantization | None = None, mesh: Mesh | None = None
) -> dict[str, Array]:
    """Every parameter by its dotted path, on a mesh each device drawing its own part of it.

    Raises MemoryError, before anything is drawn, when they do not fit.
    """
    check_memory(config, dtype, quantization, mesh)
    abstract = abstract_parameters(config, dtype, quantization)
    where = {} if mesh is None else shardings(config, mesh, quantization)
    seeds = np.random.default_rng(seed).integers(2**32, size=len(abstract), dtype=np.uint32)
    return {
        path: _draw(path, spec.update(sharding=where.get(path)), _fan_in(path, abstract), own)
        for (path, spec), own in zip(abstract.items(), seeds, strict=True)
    }


def _fan_in(path: str, abstract: dict[str, jax.ShapeDtypeStruct]) -> int:
    """How many inputs a matrix sums; of one in 4 bits its words tell."""
    weight = path.rpartition(".")[0]
    if (words := abstract.get(f"{weight}.codes")) is not None:
        return words.shape[-1] * VALUES_A_WORD
    return abstract[path].shape[-1]


def _draw(path: str, spec: jax.ShapeDtypeStruct, fan_in: int, seed: np.uint32) -> Array:
    """One parameter, or one of the arrays of a weight in 4 bits, drawn where `spec` says."""
    name = path.rpartition(".")[2]
    constant = {"scale": 1.0, "bias": 0.0, "expert_scale": 1 / math.sqrt(_CODES * _FLOAT8 * fan_in)}.get(name)
    if constant is None and path.endswith("norm.weight"):
        constant = 1.0
    if constant is not None:
        return jnp.full(spec.shape, constant, spec.dtype, device=spec.sharding)
    scale, draw = 1 / math.sqrt(fan_in), normal
    if name == "codes":
        draw = words
    elif name == "scales":
        scale, draw = scale / math.sqrt(_CODES), float8 if fan_in // spec.shape[-1] == BLOCK_OF["nvfp4"] else e8m0
    return fill(jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), seed, scale, draw, spec.sharding)


def normal(bits: UInt32[Array, "..."], scale: Float[Array, ""]) -> Float[Array, "..."]:
    """N(0, scale^2)."""
    between = (bits >> 8).astype(jnp.float32) * np.float32(2**-23) - np.float32(1 - 2**-24)  # in (-1, 1)
    return scale * math.sqrt(2) * lax.erf_inv(between)


def words(bits: UInt32[Array, "..."], scale: Float[Array, ""]) -> UInt32[Array, "..."]:
    """Eight E2M1 values, each as likely as any other."""
    return bits


def float8(bits: UInt32[Array, "..."], scale: Float[Array, ""]) -> UInt32[Array, "..."]:
    """One of the eight float8_e4m3fn numbers from 1 to 1.875."""
    return 0x38 + (bits >> 29)


def e8m0(bits: UInt32[Array, "..."], scale: Float[Array, ""]) -> UInt32[Array, "..."]:
    """One of the two powers of two around `scale`, the larger so often that the mean square is scale^2."""
    low = jnp.floor(jnp.log2(scale))
    larger = (jnp.square(scale * jnp.exp2(-low)) - 1) / 3
    chosen = (bits >> 8).astype(jnp.float32) * np.float32(2**-24) < larger
    return (127 + low).astype(jnp.uint32) + chosen.astype(jnp.uint32)


@functools.partial(jax.jit, static_argnames=("draw", "where"), donate_argnums=0)
def fill(
    buffer: Shaped[Array, "*rows C"],
    seed: UInt32[Array, ""] | np.uint32,
    scale: float,
    draw: Callable[[Array, Array], Array] = normal,
    where: Sharding | None = None,
) -> Shaped[Array, "*rows C"]:
    """What `draw` makes of random bits, in place of what the buffer holds: by default N(0, scale^2).

    `where` is the buffer's sharding: every device fills its own part, parts that are copies alike.
    """
    if not isinstance(where, NamedSharding) or where.mesh.size == 1:
        return _fill(buffer, seed, scale, draw)
    split = [axis for axes in where.spec for axis in ((axes,) if isinstance(axes, str) else axes or ())]

    def own(part: Array, seed: Array, scale: Array) -> Array:
        part_seed = seed + _mix(lax.axis_index(tuple(split)).astype(jnp.uint32)) if split else seed
        return _fill(part, part_seed, scale, draw)

    specs = (where.spec, PartitionSpec(), PartitionSpec())
    on_shards = jax.shard_map(own, mesh=where.mesh, in_specs=specs, out_specs=where.spec, check_vma=False)
    return on_shards(buffer, jnp.uint32(seed), jnp.float32(scale))


def _fill(buffer: Array, seed: Array | np.uint32, scale: Array | float, draw: Callable[..., Array]) -> Array:
    """A block of rows at a time: no second copy in any dtype.

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
        return lax.dynamic_update_slice_in_dim(rows, draw(bits, scale).astype(rows.dtype), start, axis=0)

    return lax.fori_loop(0, -(-count // block), step, rows).reshape(buffer.shape)


def _mix(x: Array) -> Array:
    """A permutation of the 32-bit integers that leaves no trace of their order ("lowbias32" of hash-prospector)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
