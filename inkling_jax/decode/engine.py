"""The jitted steps of one model, and the buckets of sizes they are compiled for.

Modules are split once; a step takes the flat list of arrays. Passing a module or a State instead costs milliseconds
of host time a step. Each function here is jitted once per model, so that its cache of programs lives as long as the
model.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels import Implementation, resolve

from ..cache import Cache, CacheShape, Ring, allocate_pages, bucket, make_cache, padded, specs
from ..config import InklingConfig
from ..memory import free_bytes
from ..nn import InklingModel
from ..processes import agreed, check_same
from ..quantization import quantization_of
from ..sharding import MLP_AXES, TABLE, mesh_of, parts_of, placed, shardings, spec_of
from .loop import decode, prefill, teacher_forced
from .request import Request
from .state import FULL, RUNNING, DecodeState, Settings

PREFILL_CHUNKS = (32, 128, 512)
LARGE_CHUNKS = (2048, 8192)  # on the kernels: there a step of 512 rows waits for the weights of the experts
CAPTURED = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "COLLECTIVES")
"""What XLA captures of a loop with collectives (`_loop_options`): all but loops and branches."""
LEAST_STOPS = 16


def chunk_sizes(implementation: Implementation, batch: int) -> list[int]:
    """Rows that a step over a prompt may have, bounded so that a large batch does not fill memory."""
    sizes = PREFILL_CHUNKS if implementation == "xla" else PREFILL_CHUNKS + LARGE_CHUNKS
    most = max(PREFILL_CHUNKS[0], (4096 if implementation == "xla" else LARGE_CHUNKS[-1]) // batch)
    return [size for size in sizes if size <= most]


def make_chunks(rows: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Start and size of the steps over so many rows: the largest that fit, then one that is more than half full."""
    steps, start = [], 0
    while start < rows:
        left = rows - start
        enough = next((size for size in sizes if size >= left), None)
        if enough is None or (enough > sizes[0] and 2 * left <= enough):
            enough = max(size for size in sizes if size <= left)
        steps.append((start, enough))
        start += enough
    return steps


class Engine:
    """The compiled side of a model: parameters as flat arrays, and the steps that take them."""

    def __init__(
        self,
        config: InklingConfig,
        params: Mapping[str, Array | jax.ShapeDtypeStruct],
        dtype: DTypeLike,
        implementation: Implementation | None = None,
        mesh: Mesh | None = None,
    ):
        """`mesh`, with the axes of `inkling_jax.sharding`, is where the parameters go; None leaves them where they are.

        Raises ValueError where the model does not divide over it.
        """
        mesh = mesh_of(params) if mesh is None else mesh
        self.config, self.dtype, self.mesh = config, jnp.dtype(dtype), mesh
        self.implementation: Implementation = choose_implementation(config, implementation)
        packed = quantization_of(params)
        abstract = nnx.eval_shape(lambda: InklingModel(config, dtype=self.dtype, quantization=packed, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        self.leaves = [params[path] for path in paths]
        if mesh is not None:
            where = shardings(config, mesh, packed)
            self.leaves = [_put(params[path], where[path]) for path in paths]
        tree = jax.tree.structure(state)

        def model(leaves: list[Array]) -> InklingModel:
            return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

        def on_shards(
            step: Callable[..., Any], leaves: list[Array], *arrays: Any, beside: PartitionSpec | None = None
        ) -> Any:
            """A step on each device. It returns a state split as the first array, behind an array split as `beside`."""
            run = lambda leaves, *arrays: step(model(leaves), *arrays)  # noqa: E731
            if mesh is None or mesh.size == 1:
                return run(leaves, *arrays)
            weights, given = [where[path].spec for path in paths], tuple(map(specs, arrays))
            returned = given[0] if beside is None else (beside, given[0])
            return jax.shard_map(run, mesh=mesh, in_specs=(weights, *given), out_specs=returned, check_vma=False)(
                leaves, *arrays
            )

        def run_prefill(leaves, state, start, chunk, drafts):
            return on_shards(partial(prefill, chunk=chunk, drafts=drafts), leaves, state, start)

        def run_decode(leaves, state, settings, rounds, drafts):
            return on_shards(partial(decode, drafts=drafts), leaves, state, settings, rounds)

        def run_teacher_forced(leaves, cache, tokens, length, start, chunk, depth):
            step = partial(teacher_forced, chunk=chunk, depth=depth)
            return on_shards(step, leaves, cache, tokens, length, start, beside=spec_of(("batch",)))

        self.model, self.on_shards, self.quantization = model, on_shards, packed
        jit = partial(jax.jit, donate_argnums=1)
        self.prefill = jit(run_prefill, static_argnames=("chunk", "drafts"))
        self.decode = jit(run_decode, static_argnames=("drafts",), compiler_options=_loop_options(mesh))
        self.teacher_forced = jit(run_teacher_forced, static_argnames=("chunk", "depth"))
        # Not methods: a cache of them would keep the engine, and the weights with it, until the garbage is collected.
        self.empty = lru_cache(maxsize=64)(partial(_empty, config, self.dtype, self.implementation, mesh))
        self.cache_bytes = lru_cache(maxsize=64)(partial(_cache_bytes, self.empty, mesh))

    def start(self, requests: list[Request], drafts: int) -> tuple[DecodeState, Settings]:
        """The state and settings of a batch, padded to a bucket with sequences that are already full.

        Raises MemoryError where the cache cannot fit, ValueError where processes ask for different things.
        """
        if self.shared:
            check_same("prompts and settings", (requests, drafts))
        batch = self.batch(len(requests))
        prompt = np.ones(batch, np.int32)
        limit = np.ones(batch, np.int32)
        for b, request in enumerate(requests):
            prompt[b] = len(request.tokens)
            limit[b] = prompt[b] + request.max_new_tokens
        real = np.arange(batch) < len(requests)
        needed = np.where(real, limit + drafts + 1, 0)
        shape = self.shape(needed, drafts)
        tokens = np.zeros((batch, shape.width * shape.page_size), np.int32)
        for b, request in enumerate(requests):
            tokens[b, : prompt[b]] = request.tokens
        self.check_memory(shape)
        state = DecodeState(
            cache=self.cache(shape, needed),
            tokens=self.place(tokens),
            drafted=self.place(np.zeros(tokens.shape, np.int8)),
            rejected=self.place(np.full(tokens.shape, -1, np.int32)),
            length=self.place(prompt),
            limit=self.place(limit),
            status=self.place(np.where(real, RUNNING, FULL).astype(np.int32)),
            hidden=Ring(self.place(np.zeros((batch, 2 * drafts + 1, self.config.hidden_size), self.dtype))),
            rounds=self.place(np.zeros(batch, np.int32)),
            offered=self.place(np.zeros((batch, max(drafts, 1)), np.int32)),
            accepted=self.place(np.zeros((batch, max(drafts, 1)), np.int32)),
        )
        return state, jax.tree.map(self.place, _settings(requests, batch, self.config))

    def chunks(self, rows: int, batch: int) -> list[tuple[int, int]]:
        """Start and size of the prefill steps over the `rows` first rows of a batch of prompts."""
        return make_chunks(rows, chunk_sizes(self.implementation, batch // self.groups))

    @property
    def groups(self) -> int:
        """Over how many devices the sequences of a batch are split."""
        return 1 if self.mesh is None else parts_of(self.mesh, TABLE["batch"])

    @property
    def shared(self) -> bool:
        """Whether the devices belong to several processes."""
        return self.mesh is not None and self.mesh.is_multi_process

    def batch(self, sequences: int) -> int:
        """How many sequences a batch is padded to: on every device of the data axis a power of two."""
        return self.groups * padded(-(-sequences // self.groups))

    def place(self, array: np.ndarray) -> Array:
        """An array [B, ...] of the host on the devices, each with its own sequences."""
        if self.mesh is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(
            array.shape, placed(spec_of(("batch",)), self.mesh), lambda part: array[part]
        )

    def fetch(self, array: Array) -> np.ndarray:
        """An array of the state on the host, put together from all processes where each has a part."""
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return multihost_utils.process_allgather(array, tiled=True)

    def shape(self, needed: np.ndarray, drafts: int) -> CacheShape:
        """The bucket of cache sizes for sequences of `needed[b]` rows."""
        return CacheShape.of(needed, drafts, self.groups)

    def cache(self, shape: CacheShape, needed: np.ndarray) -> Cache:
        """An empty cache with pages allocated for `needed[b]` rows of each sequence."""
        everything, ring = allocate_pages(self.config, shape, needed)
        cache = self.empty(shape)()
        return dataclasses.replace(cache, global_pages=self.place(everything), local_pages=self.place(ring))

    def check_memory(self, shape: CacheShape) -> None:
        """Raises MemoryError, before anything is allocated, when the cache cannot fit."""
        needed = self.cache_bytes(shape)
        weights = self.leaves[0]
        free = free_memory(weights) if isinstance(weights, jax.Array) else None
        with agreed(self.shared, MemoryError):
            if free is not None and needed > free:
                raise MemoryError(
                    f"the cache of {shape.batch} sequences, the longest of {shape.width * shape.page_size} tokens, "
                    f"needs {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free: lower max_new_tokens, "
                    f"shorten the prompts, give fewer of them at a time, or use fewer draft_tokens"
                )


def _empty(
    config: InklingConfig, dtype: DTypeLike, implementation: Implementation, mesh: Mesh | None, shape: CacheShape
) -> Callable[[], Cache]:
    """Makes an empty cache, each device of a mesh its own part of it.

    In one launch: 66 layers have some 400 arrays, and each would cost the host 0.1 ms.
    """
    make = partial(make_cache, config, shape, dtype, implementation, mesh)
    if mesh is None:
        return jax.jit(make)
    where = jax.tree.map(partial(placed, mesh=mesh), specs(jax.eval_shape(make)))
    return jax.jit(make, out_shardings=where)


def _cache_bytes(empty: Callable[[CacheShape], Callable[[], Cache]], mesh: Mesh | None, shape: CacheShape) -> int:
    """Bytes of a cache on each device."""
    cache = jax.eval_shape(empty(shape))

    def size(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        own = leaf.shape if mesh is None else placed(spec, mesh).shard_shape(leaf.shape)
        return math.prod(own) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, cache, specs(cache))))


def _loop_options(mesh: Mesh | None) -> dict[str, str] | None:
    """XLA's options for the decoding loop: NVIDIA GPUs of one process capture a round's collectives in its graph.

    By default each collective ends a graph, 2 us at either side, of which a round of 42 layers has 170. CUDA takes no
    collective inside of a graph's own loops and branches, so those stay with the host. A prefill changes the addresses
    that a graph holds, and the gaps are little to it.
    """
    if mesh is None or parts_of(mesh, MLP_AXES) == 1 or mesh.is_multi_process:
        return None
    if "NVIDIA" not in mesh.devices.flat[0].device_kind:
        return None
    return {"xla_gpu_enable_command_buffer": ",".join(CAPTURED)}


def _put(array: Array | jax.ShapeDtypeStruct, where: NamedSharding) -> Array | jax.ShapeDtypeStruct:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)
    if where.is_fully_addressable or array.sharding == where:
        return jax.device_put(array, where)
    return jax.make_array_from_callback(array.shape, where, lambda part: np.asarray(array[part]))


def choose_implementation(config: InklingConfig, asked: str | None) -> Implementation:
    """What runs the model: the asked one, or for None the kernels where there is a GPU and they fit the model.

    Raises ValueError for an unknown name, NotImplementedError where the asked one cannot run, with the reason.
    """
    chosen = resolve("inkling_jax", asked)
    sizes = {"head_dim": config.head_dim, "local_head_dim": config.local_head_dim}
    unfit = [f"{name} = {size}" for name, size in sizes.items() if not 32 <= size <= 256]
    if chosen == "xla" or not unfit:
        return chosen
    if asked is None:
        return "xla"
    reason = f"the kernels take head sizes from 32 to 256, this model has {', '.join(unfit)}"
    raise NotImplementedError(f"implementation={asked!r}: {reason}; 'xla' runs any model")


def free_memory(array: Array) -> int | None:
    """Bytes free on the fullest device of an array here, or None where none says."""
    free = (free_bytes(shard.device) for shard in array.addressable_shards)
    return min((n for n in free if n is not None), default=None)


def _settings(requests: list[Request], batch: int, config: InklingConfig) -> Settings:
    stops = np.full((batch, bucket(max(len(r.stop_ids) for r in requests), LEAST_STOPS)), -1, np.int32)
    for b, request in enumerate(requests):
        stops[b, : len(request.stop_ids)] = request.stop_ids

    def column(name: str, dtype: type, idle: float | int) -> np.ndarray:
        values = [getattr(request, name) for request in requests] + [idle] * (batch - len(requests))
        return np.asarray(values, dtype)

    return Settings(
        temperature=column("temperature", np.float32, 0.0),
        top_k=column("top_k", np.int32, config.real_vocab_size),
        top_p=column("top_p", np.float32, 1.0),
        seed=column("seed", np.uint32, 0),
        stop_ids=stops,
    )
