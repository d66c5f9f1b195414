"""Quantising a checkpoint: expert by expert, into the original layout, and on from where it was stopped."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inkling_jax.errors import CheckpointError
from inkling_jax.quantization import FORMATS, Format, Quantization

from .converting import Original
from .files import INDEX, Outgoing, in_shards, write_json, write_shards
from .hub import resolve
from .write import MAX_SHARD_BYTES, free_target, quantization_json, take_place

try:
    import fcntl
except ImportError:
    fcntl = None

_CHUNK = 16 << 20


def quantize(
    src: str | Path,
    dst: str | Path,
    format: Format,
    *,
    progress: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Quantization:
    """Write a checkpoint again with its routed experts in 4 bits, but for the first layer that has any; returns which.

    `src` is a directory, a hub id or "nano", in either layout; what is written has the original one: NVFP4 as ModelOpt
    spells it, MXFP4 as Quark does. Shared experts, attention and everything else stay as they are. Holds one expert,
    or one parameter that stays as it is, in memory at a time.

    The destination appears only when it is complete. Until then files gather in ".NAME-unfinished" beside it, and the
    same call goes on from there: shards that were finished are checked and kept, others are written again.

    Raises `CheckpointError` as loading does, for a source in 4 bits, without experts to quantise or of widths that are
    not whole blocks, for weights that are not finite, and when the destination exists and is not empty.
    """
    if format not in FORMATS:
        raise CheckpointError(f"format = {format!r}: expected {' or '.join(FORMATS)}")
    source = Original.open(resolve(src))
    quantization = _choose(source, format)
    target = free_target(Path(dst))
    tensors = source.outgoing("original", quantization)
    shards = in_shards(tensors, max_shard_bytes)
    work = target.parent / f".{target.name}-unfinished"
    with _alone_in(work):
        journal = _Journal(work, _task(source, format, shards))
        index = write_shards(work, shards, progress, label="quantising", journal=journal)
        source.write_rest(work, "original", quantization_json(quantization, tensors))
        write_json(work / INDEX, index)
        take_place(work, target)
        (target / _Journal.NAME).unlink()
    return quantization


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold a directory, made if need be, against other processes; a process that dies lets go of it.

    Raises `CheckpointError` where another one holds it. Where there are no such locks (Windows), nobody is kept out.
    """
    directory.mkdir(exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(f"{directory}: another process is writing there") from None
    finally:
        os.close(handle)


def _choose(source: Original, format: Format) -> Quantization:
    try:
        return Quantization.of_model(source.config, format)
    except ValueError as error:
        raise CheckpointError(f"{source.directory}: {error}") from None


def _task(source: Original, format: Format, shards: list[list[Outgoing]]) -> str:
    """What is being done, as a digest: the same source, unchanged, into the same shards."""
    files = {tensor.file for found in source.plan.sources.values() for tensor in found.tensors}
    files |= {tensor.file for tensor in source.plan.towers}
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    specs = [[(spec.name, spec.shape) for outgoing in shard for spec in outgoing.specs] for shard in shards]
    return hashlib.sha256(json.dumps([format, stats, specs]).encode()).hexdigest()


class _Journal:
    """An unfinished directory, and which of its shards are finished: their sizes and checksums, in a file in it.

    A directory of another task is emptied.
    """

    NAME = "quantising.json"

    def __init__(self, directory: Path, task: str):
        self.directory, self._task = directory, task
        finished = self._read()
        for file in directory.iterdir() if finished is None else ():
            file.unlink()
        self._shards = finished or {}

    def _read(self) -> dict[str, list[int]] | None:
        """The finished shards, or None where there is no directory of this task."""
        try:
            found = json.loads((self.directory / self.NAME).read_text(encoding="utf-8"))
            return found["shards"] if found["task"] == self._task else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def holds(self, file: Path) -> bool:
        return file.exists() and self._shards.get(file.name) == _fingerprint(file)

    def add(self, file: Path) -> None:
        _to_disk(file)
        self._shards[file.name] = _fingerprint(file)
        new = self.directory / f"{self.NAME}.new"
        write_json(new, {"task": self._task, "shards": self._shards})
        _to_disk(new)
        new.replace(self.directory / self.NAME)


def _to_disk(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _fingerprint(file: Path) -> list[int]:
    """Size and CRC-32."""
    crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return [file.stat().st_size, crc]
