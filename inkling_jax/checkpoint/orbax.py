"""Orbax checkpoints: the parameters by path as one tree, which any mesh reads its slices from.

A directory holds config.json, the tokenizer's files, `params`, which is Orbax's own, and `orbax.json`, which is written
last and lists every file with its size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from inkling_jax.config import read_json
from inkling_jax.errors import CheckpointError
from inkling_jax.quantization import Quantization, quantization_of
from pallas_kernels.fp4 import FP4, dequantize

from .files import write_json
from .names import Shape, is_tower
from .packed import layer_of, leaf_shapes

PARAMS, LIST = "params", "orbax.json"
_GROUP_BYTES = 4 << 30  # what is under way at a time, in either direction
_CHUNK_BYTES = 64 << 20  # the least that can be read of a parameter on disk


def is_orbax(directory: Path) -> bool:
    """Whether a directory is such a checkpoint, or may have been going to be one."""
    return (directory / LIST).exists() or any(path.is_dir() for path in directory.glob(f"{PARAMS}*"))


@dataclass(frozen=True, slots=True)
class Saved:
    """What a directory holds: dtypes and shapes of the parameters by path, and of the towers by name.

    The lists hold paths, or lines that begin with one, of what does not fit a model.
    """

    directory: Path
    arrays: dict[str, jax.ShapeDtypeStruct]
    towers: dict[str, jax.ShapeDtypeStruct]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    @property
    def quantization(self) -> Quantization | None:
        return quantization_of(self.arrays)

    def compare(self, shapes: Mapping[str, Shape]) -> None:
        """Note what does not fit parameters of these shapes, unpacked ones of weights in 4 bits."""
        wanted = dict(shapes)
        for path, shape in shapes.items():
            if self.quantization is not None and layer_of(path) in self.quantization.layers:
                del wanted[path]
                leaves = leaf_shapes(shape, self.quantization.format)
                wanted |= {f"{path}.{leaf}": leaf_shape for leaf, leaf_shape in leaves.items()}
        self.missing.extend(path for path in wanted if path not in self.arrays)
        self.unexpected.extend(path for path in self.arrays if path not in wanted)
        for path in wanted.keys() & self.arrays.keys():
            if self.arrays[path].shape != wanted[path]:
                self.misshapen.append(f"{path}: {list(self.arrays[path].shape)}, expected {list(wanted[path])}")

    def check(self) -> None:
        """Raise one `CheckpointError` that lists everything that does not fit."""
        groups = {"missing": self.missing, "unexpected": self.unexpected, "of the wrong shape": self.misshapen}
        lines = [f"  {len(found)} {what}:\n    " + "\n    ".join(found) for what, found in groups.items() if found]
        if lines:
            head = f"{self.directory}: not the parameters of the model that config.json describes (Orbax)"
            raise CheckpointError("\n".join([head, *lines]))


def open_orbax(directory: Path) -> Saved:
    """What a checkpoint holds, once every file of it is there. Raises `CheckpointError` for one that is not whole."""
    import orbax.checkpoint.experimental.v1 as ocp  # half a second

    _check_files(directory)
    found: Any = None
    try:
        found = ocp.metadata(_at(directory)).metadata
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}
    except Exception as error:  # of many kinds
        reason = "its description of the arrays is damaged" if found is None else error
        raise CheckpointError(f"{directory / PARAMS}: not readable as an Orbax checkpoint: {reason}") from None
    towers = {name: arrays.pop(name) for name in list(arrays) if is_tower(name)}
    return Saved(directory, arrays, towers)


def _check_files(directory: Path) -> None:
    if not (directory / LIST).exists():
        raise CheckpointError(f"{directory}: half-written: {LIST}, which is written last, is missing")
    files = read_json(directory / LIST).get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{directory / LIST}: files should be an object from names to sizes")
    wrong = []
    for name, size in files.items():
        file = directory / PARAMS / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            wrong.append(f"{PARAMS}/{name}: " + ("missing" if found is None else f"{found} bytes of {size}"))
    if wrong:
        raise CheckpointError(f"{directory}: half-written, or damaged since:\n  " + "\n  ".join(wrong))


def write_list(directory: Path) -> None:
    """List the files of a checkpoint whose `params` are complete."""
    params = directory / PARAMS
    files = {str(path.relative_to(params)): path.stat().st_size for path in params.rglob("*") if path.is_file()}
    write_json(directory / LIST, {"files": dict(sorted(files.items()))})


def groups_of(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in their order, as many together as are held at a time; a larger array alone."""
    group: list[str] = []
    room = _GROUP_BYTES
    for name, size in sizes.items():
        if group and size > room:
            yield group
            group, room = [], _GROUP_BYTES
        group.append(name)
        room -= size
    if group:
        yield group


def start_writing(directory: Path, params: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Begin to write arrays as one tree, every process its own part of them; what is returned waits for the end."""
    import orbax.checkpoint.experimental.v1 as ocp

    context = _context(params.values())
    context.memory.is_prioritized_key_fn = lambda key: False  # arrays are copied from devices as room becomes free
    with context:
        return ocp.save_async(_at(directory), dict(params)).result


def write_params(directory: Path, groups: Iterable[Mapping[str, np.ndarray]], bar: tqdm) -> None:
    """Write arrays of the host, one group after the other, as one tree."""
    import orbax.checkpoint.experimental.v1 as ocp

    for group in groups:
        with _context(group.values()):
            ocp.partial.save(_at(directory), dict(group))
        bar.update(sum(array.nbytes for array in group.values()))
    ocp.partial.finalize(_at(directory))


def read_params(
    saved: Saved, abstract: Mapping[str, jax.ShapeDtypeStruct], bar: tqdm
) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter of `abstract`, in its dtype and with its sharding; weights in 4 bits unpacked if it has them so.

    Raises `CheckpointError` where what is on disk cannot be read.
    """
    packed = {path: _packed_specs(saved, path, spec) for path, spec in abstract.items() if path not in saved.arrays}
    sizes = {path: in_memory(spec) for path, spec in abstract.items()}
    for group in groups_of(sizes):
        specs = {name: spec for path in group for name, spec in packed.get(path, {path: abstract[path]}).items()}
        found = _load(saved, specs)
        for path in group:
            if path in packed:
                leaves = {name.rpartition(".")[2]: found.pop(name) for name in packed[path]}
                yield path, _unpack(saved, abstract[path], leaves)
            else:
                array = found.pop(path)
                yield path, jax.device_put(array) if isinstance(array, np.ndarray) else array
            bar.update(sizes[path])


def read_arrays(saved: Saved, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays as they were saved, in host memory."""
    known = saved.arrays | saved.towers
    return {name: np.asarray(array) for name, array in _load(saved, {name: known[name] for name in names}).items()}


def in_memory(spec: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of an array that are in this process's devices, each part counted once for every device with it."""
    devices = 1 if spec.sharding is None else len(spec.sharding.addressable_devices)
    shape = spec.shape if spec.sharding is None else spec.sharding.shard_shape(spec.shape)
    return devices * math.prod(shape) * spec.dtype.itemsize


def _load(saved: Saved, specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    import orbax.checkpoint.experimental.v1 as ocp

    tree: dict[str, Any] = dict.fromkeys([*saved.arrays, *saved.towers], ocp.PLACEHOLDER)
    for name, spec in specs.items():
        # Without a sharding, an array of the host: what was saved may have been on devices that are not here.
        tree[name] = spec if spec.sharding else np.broadcast_to(np.zeros((), spec.dtype), spec.shape)
    try:
        with _context(specs.values()):
            found: Any = ocp.load(_at(saved.directory), tree)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{saved.directory / PARAMS}: cannot be read: {error}") from None
    return {name: jax.block_until_ready(found[name]) for name in specs}


def _packed_specs(saved: Saved, path: str, spec: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a weight in 4 bits, split over devices as the weight is where that divides them."""
    found = {}
    for leaf in ("codes", "scales", "expert_scale"):
        if (on_disk := saved.arrays.get(f"{path}.{leaf}")) is not None:
            sharding = spec.sharding
            if isinstance(sharding, NamedSharding):
                sharding = _fitting(sharding, on_disk.shape)
            found[f"{path}.{leaf}"] = jax.ShapeDtypeStruct(on_disk.shape, on_disk.dtype, sharding=sharding)
    return found


def _fitting(sharding: NamedSharding, shape: Shape) -> NamedSharding:
    """A sharding of an array like the one it is of, less what does not divide."""
    axes = []
    for size, names in zip(shape, (*sharding.spec, *[None] * len(shape)), strict=False):
        names = (names,) if isinstance(names, str) else names or ()
        axes.append(names if size % math.prod(sharding.mesh.shape[name] for name in names) == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _unpack(saved: Saved, spec: jax.ShapeDtypeStruct, leaves: dict[str, Any]) -> jax.Array:
    assert saved.quantization is not None
    packed = FP4(leaves["codes"], leaves["scales"], leaves.get("expert_scale"), saved.quantization.format)
    return jax.jit(dequantize, static_argnums=1, out_shardings=spec.sharding)(packed, spec.dtype)


def _at(directory: Path) -> str:
    return str((directory / PARAMS).absolute())


def _context(arrays: Iterable[jax.ShapeDtypeStruct | jax.Array | np.ndarray]) -> Any:
    """Limits for these arrays: Orbax refuses one that, in whole chunks, is no smaller than what may be under way."""
    import orbax.checkpoint.experimental.v1 as ocp

    most = max([_GROUP_BYTES, *(1 + 2 * array.dtype.itemsize * math.prod(array.shape) for array in arrays)])
    context = ocp.Context()
    context.asynchronous.timeout_secs = 24 * 3600  # terabytes onto a shared disk
    context.memory.write_concurrent_bytes = most
    context.memory.read_concurrent_bytes = most
    context.memory.transfer_concurrent_bytes = most
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False  # weights shrink little and take long
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    context.array.saving.storage_options.shard_axes = (0,)  # experts, rows
    return context
