"""Safetensors files: what is in them, reading a tensor and writing shards, both in pieces of bounded size."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from inkling_jax.config import read_json
from inkling_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # may stand beside an index that does not name it

# What this version reads, and how it writes it.
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_PIECE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: its name, dtype code as the format spells it, and shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as handle:
            yield handle
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: truncated, or not a safetensors file: {error}") from None


def list_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name, from the headers alone.

    Reads the files that the index names, or every `*.safetensors` where there is no index, and `mtp.safetensors`.
    Raises `CheckpointError` with everything that is wrong: files missing or cut short, tensors the index names and its
    file lacks, tensors that stand in two files.
    """
    index = _read_index(directory)
    files = sorted({directory / file for file in index.values()} if index else directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no safetensors files")
    found: dict[str, Tensor] = {}
    problems: dict[str, list[str]] = {}
    for file in [*files, *({directory / MTP_FILE} - set(files))]:
        if file in files or file.exists():
            problems[file.name] = _add(found, index, file)
    broken = {file for file, lines in problems.items() if lines}
    for name, file in index.items():
        if name not in found and file not in broken:
            problems[file].append(f"{directory / file}: lacks {name}, which {INDEX} places there")
    lines = [line for file in problems.values() for line in file]
    if lines:
        raise CheckpointError("\n".join(lines))
    return found


def _read_index(directory: Path) -> dict[str, str]:
    """The file of each tensor, or nothing where there is no index."""
    path = directory / INDEX
    if not path.exists():
        return {}
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{path}: weight_map should be an object from tensor names to file names")
    outside = sorted(
        file for file in set(index.values()) if Path(file).name != file or not file.endswith(".safetensors")
    )
    if outside:
        raise CheckpointError(f"{path}: weight_map names {outside[0]!r}; expected a safetensors file beside the index")
    return index


def _add(found: dict[str, Tensor], index: dict[str, str], file: Path) -> list[str]:
    """Add the tensors of a file; what is wrong with it."""
    try:
        tensors = list(_headers(file))
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for tensor in tensors:
        if index.get(tensor.name, file.name) != file.name:
            continue  # the index prefers the copy of another file
        if tensor.name in found:
            problems.append(f"{file}: holds {tensor.name}, which {found[tensor.name].file.name} holds too")
        found[tensor.name] = tensor
    return problems


def _headers(file: Path) -> Iterator[Tensor]:
    with _opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            part = handle.get_slice(name)
            yield Tensor(name, file, part.get_dtype(), tuple(part.get_shape()))


def read_into(view: np.ndarray, tensor: Tensor) -> None:
    """Copy a tensor into a view whose elements are in its order, converting the dtype.

    The file is mapped anew for each piece: pages of a mapping count as this process's memory for as long as it lives.
    """
    rows = tensor.shape[0] // len(view)
    step = max(1, _PIECE_BYTES * len(view) // max(1, tensor.size * DTYPES[tensor.dtype].itemsize))
    for start in range(0, len(view), step):
        target = view[start : start + step]
        with _opened(tensor.file) as handle:
            piece = handle.get_slice(tensor.name)[start * rows : (start + len(target)) * rows]
            target[...] = piece.reshape(target.shape)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written: `load` yields a view whose elements are in the tensor's order."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(directory: Path, tensors: list[Outgoing], max_shard_bytes: int, progress: bool) -> None:
    """Write tensors as numbered shards with an index. Holds one tensor at a time.

    The library's own writer wants every tensor of a file in memory at once, hence this one.
    """
    shards = _sharded(tensors, max_shard_bytes)
    total = sum(tensor.nbytes for tensor in tensors)
    weight_map: dict[str, str] = {}
    with progress_bar("writing", total, progress) as bar:
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(directory / name, shard, bar)
            weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / INDEX, index)


def _sharded(tensors: list[Outgoing], max_shard_bytes: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: list[Outgoing], bar: tqdm) -> None:
    """Header, then the tensors back to back; the widest dtype first, so that every tensor is aligned."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        spec = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[tensor.name] = spec | {"data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            _write_tensor(file, tensor, bar)


def _write_tensor(file: Any, tensor: Outgoing, bar: tqdm) -> None:
    view = tensor.load()
    step = max(1, _PIECE_BYTES * len(view) // max(1, tensor.nbytes))
    for start in range(0, len(view), step):
        piece = np.ascontiguousarray(view[start : start + step]).view(np.uint8)
        file.write(piece.data)
        bar.update(piece.nbytes)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def progress_bar(label: str, total: int, enabled: bool) -> tqdm:
    """A bar in bytes, where someone watches: a terminal or a notebook."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(desc=label, total=total, unit="B", unit_scale=True, disable=not (enabled and watched), leave=False)
