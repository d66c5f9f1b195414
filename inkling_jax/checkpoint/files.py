"""Safetensors files: what is in them, reading a tensor and writing shards, both in pieces of bounded size."""

import io
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from inkling_jax.config import read_json
from inkling_jax.errors import CheckpointError

from .windows import Window, runs, whole

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # may stand beside an index that does not name it

# What this version reads, and how it writes it.
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
# The same and what quantised weights are made of, which is read as the bytes that it is.
STORED = DTYPES | {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
}
_CODES = {dtype: code for code, dtype in STORED.items()}

_PIECE_BYTES = 32 << 20
_READERS = 4  # threads that read a tensor: copies inside the host's memory take as long as reading


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file: its name, dtype code as the format spells it, shape, and where its first byte is."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes an element; 1 for a dtype that is not read."""
        return STORED[self.dtype].itemsize if self.dtype in STORED else 1


def _validate(file: Path) -> None:
    """Raises `CheckpointError` unless the header is sound and the file as long as it says."""
    try:
        with safe_open(file, framework="numpy"):
            pass
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
    _validate(file)
    with file.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
    for name, spec in header.items():
        if name != "__metadata__":
            yield Tensor(name, file, spec["dtype"], tuple(spec["shape"]), 8 + size + spec["data_offsets"][0])


def read_into(view: np.ndarray, tensor: Tensor, window: Window | None = None) -> None:
    """Copy a tensor, or a window of it, into a view whose elements are in its order, converting the dtype.

    The window has the axes of the view. Where the view is of bytes, the bits are copied as they are. Nothing else is
    read than the window, in pieces, several at a time, and not mapped: pages of a mapping count as this process's
    memory for as long as it lives. Raises `CheckpointError` when the file cannot be read or has become shorter than its
    header said.
    """
    first, *rest = window or whole(view.shape)
    as_it_is = view.dtype in (np.uint8, STORED[tensor.dtype])
    step = max(1, _PIECE_BYTES * len(view) // max(1, view.size * tensor.itemsize))

    def read(start: int) -> None:
        target = view[start : start + step]
        part = first._replace(start=first.start + start, stop=first.start + start + len(target))
        straight = as_it_is and target.flags.c_contiguous
        piece = target.reshape(-1).view(np.uint8) if straight else np.empty(target.size * tensor.itemsize, np.uint8)
        with tensor.file.open("rb", buffering=0) as file:
            _fill(piece.data, file, tensor, (part, *rest))
        if not straight:
            target[...] = piece.view(view.dtype if as_it_is else STORED[tensor.dtype]).reshape(target.shape)

    starts = range(0, len(view), step)
    try:
        if len(starts) == 1:
            read(0)
        else:
            with ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(read, starts))
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: cannot be read: {error.strerror}") from None


def _fill(piece: memoryview, file: io.FileIO, tensor: Tensor, window: Window) -> None:
    """Read a window, run by run."""
    at = 0
    for start, count in runs(window):
        file.seek(tensor.offset + start * tensor.itemsize)
        end = at + count * tensor.itemsize
        while at < end:
            found = file.readinto(piece[at:end])
            if not found:
                raise CheckpointError(f"{tensor.file}: cut short within {tensor.name}")
            at += found


@dataclass(frozen=True, slots=True)
class Spec:
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors that are made together, and so stand in one file.

    `load` yields what comes next of each, as often as it takes: arrays whose bytes are in the tensors' order.
    """

    specs: tuple[Spec, ...]
    load: Callable[[], Iterator[tuple[np.ndarray, ...]]]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


class Journal(Protocol):
    """Remembers which shards are finished, so that writing can go on after it was cut off."""

    def holds(self, file: Path) -> bool:
        """Whether a shard was finished, and is as it was then."""
        ...

    def add(self, file: Path) -> None:
        """Note that a shard is finished."""
        ...


def write_shards(
    directory: Path,
    shards: list[list[Outgoing]],
    progress: bool,
    *,
    label: str = "writing",
    journal: Journal | None = None,
) -> dict[str, Any]:
    """Write tensors as numbered shards; the index, for the caller to write last. Holds what one `load` yields.

    The library's own writer wants every tensor of a file in memory at once, hence this one.
    """
    total = sum(outgoing.nbytes for shard in shards for outgoing in shard)
    weight_map: dict[str, str] = {}
    with progress_bar(label, total, progress) as bar:
        for i, shard in enumerate(shards):
            file = directory / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            if journal is not None and journal.holds(file):
                bar.update(sum(outgoing.nbytes for outgoing in shard))
            else:
                _write_shard(file, shard, bar)
                if journal is not None:
                    journal.add(file)
            weight_map |= {spec.name: file.name for outgoing in shard for spec in outgoing.specs}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def in_shards(tensors: list[Outgoing], max_shard_bytes: int) -> list[list[Outgoing]]:
    """Tensors in their order, as many in a shard as fit; a larger one has a shard of its own."""
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
    specs = sorted((spec for outgoing in tensors for spec in outgoing.specs), key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entry = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape)}
        header[spec.name] = entry | {"data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for outgoing in tensors:
            begins = [8 + len(text) + header[spec.name]["data_offsets"][0] for spec in outgoing.specs]
            _write_tensors(file, outgoing, begins, bar)


def _write_tensors(file: BinaryIO, outgoing: Outgoing, begins: list[int], bar: tqdm) -> None:
    """Write tensors that are made together, each from its own byte on."""
    places = list(begins)
    for arrays in outgoing.load():
        for i, array in enumerate(arrays):
            file.seek(places[i])
            for piece in _pieces(array):
                file.write(piece.data)
                places[i] += piece.nbytes
                bar.update(piece.nbytes)
    written = [place - begin for place, begin in zip(places, begins, strict=True)]
    assert written == [spec.nbytes for spec in outgoing.specs], (outgoing.specs, written)


def _pieces(view: np.ndarray) -> Iterator[np.ndarray]:
    """The bytes of an array, in order and a few at a time."""
    step = max(1, _PIECE_BYTES * len(view) // max(1, view.nbytes))
    for start in range(0, len(view), step):
        yield np.ascontiguousarray(view[start : start + step]).view(np.uint8)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def progress_bar(label: str, total: int, enabled: bool) -> tqdm:
    """A bar in bytes, where someone watches: a terminal or a notebook."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(desc=label, total=total, unit="B", unit_scale=True, disable=not (enabled and watched), leave=False)


def watch_files(directory: Path, bar: tqdm, wait: Callable[[], None], every: float = 0.5) -> None:
    """Moves a bar by what comes to lie in a directory, whoever writes it, until `wait` returns."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(every):
            bar.update(min(_bytes_in(directory), bar.total) - bar.n)

    if bar.disable:
        return wait()
    thread = threading.Thread(target=look)
    thread.start()
    try:
        wait()
        bar.update(bar.total - bar.n)
    finally:
        done.set()
        thread.join()


def _bytes_in(directory: Path) -> int:
    """Bytes of all files there; one that is moved meanwhile counts the next time."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total
