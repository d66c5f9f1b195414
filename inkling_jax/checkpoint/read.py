"""Loading: tensors stream one by one, straight to their final dtype and place."""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from inkling_jax.config import InklingConfig
from inkling_jax.errors import CheckpointError
from inkling_jax.processes import agreed
from inkling_jax.quantization import Quantization, quantization_of
from inkling_jax.sharding import mesh_of
from pallas_kernels.fp4 import BLOCK_OF, FP4, VALUES_A_WORD, dequantize

from .files import list_tensors, progress_bar, read_into
from .metadata import read_metadata
from .names import VARIANTS, Shape, stored
from .orbax import Saved, in_memory, is_orbax, open_orbax, read_params
from .packed import LEAF_DTYPES, find_packed, layer_of
from .plan import Packed, Plan, Source, make_plan
from .windows import Window, merged, shape_of, whole, window_of, within

log = logging.getLogger("inkling_jax")

_PART_BYTES = 256 << 20  # of a parameter that are read, and go to a device, at a time
_AHEAD_BYTES = 1 << 30  # in host memory, read or being read


def find_quantization(directory: str | Path, config: InklingConfig) -> Quantization | None:
    """Which layers of a checkpoint hold their routed experts in 4 bits, from the headers and the metadata.

    Raises `CheckpointError` for files that cannot be read, and where the widths of `config` rule the format out. What
    else may be wrong with the tensors, `load_parameters` says.
    """
    directory = Path(directory)
    quantization = open_orbax(directory).quantization if is_orbax(directory) else _find_packed(directory, config)
    if quantization is None:
        return None
    try:
        quantization.check(config)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return quantization


def _find_packed(directory: Path, config: InklingConfig) -> Quantization | None:
    tensors, metadata = list_tensors(directory), read_metadata(directory)
    found = {}
    for i in range(config.num_layers):
        for path in () if config.is_dense(i) else (f"layers.{i}.mlp.experts.w13", f"layers.{i}.mlp.experts.w2"):
            places = [stored(path, variant) for variant in VARIANTS]
            if packed := find_packed(tensors, places, metadata.format if metadata else None):
                found[i] = packed[0].format
    return Quantization(next(iter(found.values())), tuple(found)) if found else None


def load_parameters(
    directory: str | Path,
    config: InklingConfig,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Every parameter of `abstract` by dotted path, in its dtype and, where it says one, with its sharding.

    Every layout is read, with the MTP tensors indexed or in `mtp.safetensors`. Towers are left out, which one line of
    log says. Weights in 4 bits stay packed where `abstract` has their words and scales, and are unpacked expert by
    expert where it has the plain weight; scales of activations are ignored, which another line says. Of a parameter
    with a sharding, a process reads the slices of its own devices and no more. Parts of 256 MiB go to the devices while
    the next are read: host memory beyond the arrays themselves stays below 1 GiB plus a few pieces of 32 MiB, or an
    unpacked expert.

    Raises `CheckpointError` listing everything that is missing, unexpected, misshapen, quantised or cut short, and
    ValueError where a sharding does not cut a parameter evenly, or cuts a block of 4-bit weights.
    """
    directory, mesh = Path(directory), mesh_of(abstract)
    with agreed(mesh is not None and mesh.is_multi_process):
        _check_shardings(abstract)
        opened = _open_saved(directory, abstract) if is_orbax(directory) else None
        source = opened or open_checkpoint(directory, config, abstract)
        _check_packed(directory, source.quantization, quantization_of(abstract))
    if source.towers:
        log.warning("%s: leaving out %d tensors of the vision and audio towers", directory, len(source.towers))
    if isinstance(source, Saved):
        with progress_bar("loading", sum(map(in_memory, abstract.values())), progress) as bar:
            return dict(read_params(source, abstract, bar))
    if source.unused:
        log.warning("%s: ignoring %d scales of activations: only weights are in 4 bits", directory, len(source.unused))
    with progress_bar("loading", sum(map(_bytes_here, abstract.values())), progress) as bar:
        return _load(source, abstract, bar)


def open_checkpoint(directory: Path, config: InklingConfig, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Plan:
    """Where each parameter is, after every check that needs no tensor data. Raises `CheckpointError`."""
    plan = make_plan(list_tensors(directory), unpacked_shapes(abstract), config, read_metadata(directory))
    plan.check(directory)
    return plan


def _open_saved(directory: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Saved:
    saved = open_orbax(directory)
    saved.compare(unpacked_shapes(abstract))
    saved.check()
    return saved


def unpacked_shapes(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Shape]:
    """Shapes by path, of weights in 4 bits those that they have unpacked."""
    shapes: dict[str, Shape] = {}
    for path, spec in abstract.items():
        weight, _, leaf = path.rpartition(".")
        if layer_of(weight) is None:
            shapes[path] = spec.shape
        elif leaf == "codes":
            shapes[weight] = (*spec.shape[:-1], spec.shape[-1] * VALUES_A_WORD)
    return shapes


def _check_packed(directory: Path, found: Quantization | None, wanted: Quantization | None) -> None:
    if wanted is not None and (
        found is None or wanted.format != found.format or not set(wanted.layers) <= set(found.layers)
    ):
        raise CheckpointError(f"{directory}: {wanted} is asked for, and {found or 'no quantisation'} is there")


def _check_shardings(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ValueError for axes that do not divide, and for devices that would hold a part of a block of 4 bits."""
    wrong = []
    for path, spec in abstract.items():
        try:
            _ = spec.sharding and spec.sharding.shard_shape(spec.shape)
        except ValueError:
            wrong.append(f"{path}: {list(spec.shape)} cannot be cut evenly as {spec.sharding}")
    if wrong:
        raise ValueError("these parameters do not fit the mesh:\n  " + "\n  ".join(wrong))
    for path, spec in abstract.items():
        scales = abstract.get(path.removesuffix("codes") + "scales") if path.endswith(".codes") else None
        if scales is not None and spec.sharding is not None and scales.sharding is not None:
            block = spec.shape[-1] * VALUES_A_WORD // scales.shape[-1]
            words, blocks = (x.sharding.shard_shape(x.shape)[-1] for x in (spec, scales))
            if words * VALUES_A_WORD != blocks * block:
                raise ValueError(f"{path}: {words * VALUES_A_WORD} inputs a device are not whole blocks of {block}")


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read at a time: rows of a parameter, or of one of the arrays of a weight in 4 bits.

    `places` says which of it goes to which device, None for the one that JAX chooses, and `row` where it begins there.
    """

    path: str
    window: Window
    dtype: np.dtype
    places: list[tuple[tuple[slice, ...], Any]]
    row: int

    @property
    def nbytes(self) -> int:
        return math.prod(shape_of(self.window)) * self.dtype.itemsize


def _load(plan: Plan, abstract: Mapping[str, jax.ShapeDtypeStruct], bar: tqdm) -> dict[str, jax.Array]:
    """Every parameter where it belongs: a part of one goes to the devices while the next are read."""
    shards: dict[str, dict[Any, jax.Array]] = {path: {} for path in abstract}
    for part, host in _read_ahead(plan, [part for path, spec in abstract.items() for part in _parts(path, spec)]):
        spec, arrays = abstract[part.path], shards[part.path]
        shape = spec.shape if spec.sharding is None else spec.sharding.shard_shape(spec.shape)
        for at, device in part.places:
            rows = jax.device_put(host[at], device)
            if rows.shape != shape:
                array = arrays[device] if part.row else jnp.zeros(shape, spec.dtype, device=device)
                rows = _write(array, rows, part.row)
            arrays[device] = rows
        jax.block_until_ready(list(arrays.values()))
        bar.update(part.nbytes)
        del host  # before more is read
    return {path: _assemble(spec, list(shards[path].values())) for path, spec in abstract.items()}


def _parts(path: str, spec: jax.ShapeDtypeStruct) -> Iterator[_Part]:
    """All of a parameter; with a sharding what this process's devices hold, once where several hold the same."""
    devices: dict[Window, list[Any]] = {}
    if spec.sharding is None:
        devices[whole(spec.shape)] = [None]
    else:
        for device, index in spec.sharding.addressable_devices_indices_map(spec.shape).items():
            devices.setdefault(window_of(index or (), spec.shape), []).append(device)
    for box, windows in merged(devices):
        for rows in _cut(box, spec.dtype.itemsize):
            parts = {window: (*rows[:1], *window[1:]) if len(box) > 1 else window for window in windows}
            places = [(within(parts[window], rows), device) for window in windows for device in devices[window]]
            yield _Part(path, rows, spec.dtype, places, rows[0].start - box[0].start if box else 0)


def _cut(box: Window, itemsize: int) -> Iterator[Window]:
    """A box in runs of rows along its first axis, all as long if that is easy: each length is compiled for."""
    if len(box) < 2:
        yield box
        return
    rows, *rest = box
    least = min(-(-math.prod(shape_of(box)) * itemsize // _PART_BYTES), rows.extent)
    count = next(n for n in range(least, 2 * least + 1) if rows.extent % n == 0 or n == 2 * least)
    step = -(-rows.extent // count)
    for start in range(rows.start, rows.stop, step):
        yield (rows._replace(start=start, stop=min(start + step, rows.stop)), *rest)


@partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, rows: jax.Array, start: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, rows, start, 0)


def _assemble(spec: jax.ShapeDtypeStruct, shards: list[jax.Array]) -> jax.Array:
    if spec.sharding is None:
        [array] = shards
        return array
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, shards, dtype=spec.dtype)


def _read_ahead(plan: Plan, parts: list[_Part]) -> Iterator[tuple[_Part, np.ndarray]]:
    """Each part with what was read of it: in a thread, the next ones while the caller works with one."""
    under_way: deque[tuple[_Part, Future[np.ndarray]]] = deque()
    reader = ThreadPoolExecutor(1)
    try:
        for part in parts:
            while under_way and sum(other.nbytes for other, _ in under_way) + part.nbytes > _AHEAD_BYTES:
                oldest = under_way[0][0]
                yield oldest, under_way[0][1].result()
                under_way.popleft()
            under_way.append((part, reader.submit(_read, plan, part.path, part.window, part.dtype)))
        while under_way:
            part, future = under_way.popleft()
            yield part, future.result()
    finally:
        reader.shutdown(cancel_futures=True)  # after an error nothing more is read


def _bytes_here(spec: jax.ShapeDtypeStruct) -> int:
    """What this process reads of a parameter, in the bytes that it has in memory."""
    size = spec.size
    if spec.sharding is not None:
        indices = spec.sharding.addressable_devices_indices_map(spec.shape).values()
        windows = {window_of(index or (), spec.shape) for index in indices}
        size = sum(math.prod(shape_of(window)) for window in windows)
    return size * spec.dtype.itemsize


def _read(plan: Plan, path: str, window: Window, dtype: np.dtype) -> np.ndarray:
    """A window of a parameter in host memory, or of one of the arrays of a weight in 4 bits."""
    source = plan.sources.get(path)
    if isinstance(source, Source):
        return read_parameter(source, window, dtype)
    if source is not None:
        return _read_unpacked(source, window, dtype)
    weight, _, leaf = path.rpartition(".")
    return read_leaf(plan.packed[weight], leaf, window, dtype)


def read_parameter(source: Source, window: Window, dtype: np.dtype) -> np.ndarray:
    """A window of one parameter in host memory. Rows of the unembedding that the file leaves out are zero."""
    host = np.empty(shape_of(window), dtype)
    views, windows = source.form.views(host), source.form.windows(window)
    for tensor, view, (first, *rest) in zip(source.tensors, views, windows, strict=True):
        stop = max(first.start, min(first.stop, tensor.shape[0]))
        view[stop - first.start :] = 0
        read_into(view[: stop - first.start], tensor, (first._replace(stop=stop), *rest))
    return host


def read_leaf(packed: Packed, leaf: str, window: Window, dtype: np.dtype) -> np.ndarray:
    """A window of the words, the scales or the experts' scales of a weight in 4 bits, in host memory.

    Raises `CheckpointError` for an expert's scale that is no finite number.
    """
    host = read_parameter(packed.leaves[leaf], window, dtype)
    if leaf == "expert_scale":
        if packed.spelling.divides:
            with np.errstate(divide="ignore"):
                host = (1 / host).astype(dtype)
        if not np.isfinite(host).all():
            [tensor] = packed.leaves[leaf].tensors
            raise CheckpointError(f"{tensor.file}: {tensor.name}: the scale of an expert is not a finite number")
    return host


def _read_unpacked(packed: Packed, window: Window, dtype: np.dtype) -> np.ndarray:
    """A window of a weight in 4 bits, unpacked in host memory expert by expert."""
    host = np.empty(shape_of(window), dtype)
    block = BLOCK_OF[packed.spelling.format]
    experts, *rows, inputs = window
    blocks = inputs.over(block)  # whole ones, perhaps with a few inputs too many
    inside = inputs.within(blocks.times(block))
    for i in range(len(host)):
        expert = experts._replace(start=experts.start + i, stop=experts.start + i + 1)
        windows: dict[str, Window] = {
            "codes": (expert, *rows, blocks.times(block // VALUES_A_WORD)),
            "scales": (expert, *rows, blocks),
            "expert_scale": (expert,),
        }
        arrays = {leaf: read_leaf(packed, leaf, windows[leaf], LEAF_DTYPES[leaf]) for leaf in packed.leaves}
        host[i] = np.asarray(_unpack(packed.spelling.format, dtype, **arrays))[0, ..., inside]
    return host


@partial(jax.jit, static_argnums=(0, 1))
def _unpack(
    format: str, dtype: np.dtype, codes: jax.Array, scales: jax.Array, expert_scale: jax.Array | None = None
) -> jax.Array:
    return dequantize(FP4(codes, scales, expert_scale, format), dtype)
