"""How fast a checkpoint loads: one of Inkling-Small's widths is written, and loaded onto one device or a mesh.

    python -m inkling_jax.benchmark.loading ./checkpoint --mesh tensor=2

The checkpoint has the published layout, in several files: three layers with all of their experts, random, and in NVFP4
unless asked otherwise (11 GB, of which 3.3 GB are the embedding and the LM head). It is loaded twice, from the disk and
from the memory where the system keeps files, and compared with what was written. At last the files are only read, which
is what the disk allows.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jaxtyping import Array

from ..checkpoint import save_checkpoint
from ..checkpoint.files import Tensor, read_into
from ..checkpoint.write import free_target
from ..config import PRESETS, InklingConfig
from ..model import load
from ..quantization import FORMATS, Format, Quantization
from ..sharding import MeshLike, check_mesh, make_mesh, parse_mesh
from .weights import random_parameters

FILE_BYTES = 2 * 10**9


def cut(config: InklingConfig, layers: int) -> InklingConfig:
    """The model with so many layers, the first one dense and the last one global, and without depths."""
    if not 2 <= layers <= config.num_layers:
        raise ValueError(f"layers: expected 2 to {config.num_layers}, found {layers}")
    config = replace(config, mtp_depths=0, mtp_local=(), chain_norm=False)
    return replace(config, num_layers=layers, dense_layers=(0,), local_layers=tuple(range(layers - 1)))


def loading(
    directory: str | os.PathLike[str],
    config: InklingConfig,
    quantization: Quantization | None = None,
    mesh: MeshLike = None,
    file_bytes: int = FILE_BYTES,
    progress: bool = False,
) -> dict[str, Any]:
    """Writes a checkpoint of random weights to a new directory, loads it twice, and says what that took.

    `progress`: bars while it is written and loaded.
    "loads" has for each the seconds, the bytes of the files a second, and the most bytes of host memory in use beyond
    what was before. Before the first the system is asked to let go of the files (which Linux does), and once more
    before they are only read, as loading reads them, for "disk_bytes_per_second".

    Raises ValueError for a mesh that does not suit the model, CheckpointError where the directory is not empty, and
    RuntimeError where what is loaded is not what was written.
    """
    devices = make_mesh(mesh)
    check_mesh(config, devices, quantization)
    directory = free_target(Path(directory))
    written = jax.block_until_ready(random_parameters(config, "bfloat16", 0, quantization, devices))
    begin = time.perf_counter()
    options: dict[str, Any] = dict(layout="original", max_shard_bytes=file_bytes, progress=progress)
    save_checkpoint(directory, config, written, **options)
    files = sorted(directory.glob("*.safetensors"))
    _onto_disk(files)
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "mesh": dict(devices.shape),
        "quantization": None if quantization is None else quantization.format,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "bytes_on_a_device": sum(x.addressable_shards[0].data.nbytes for x in written.values()),
        "largest_parameter": max(x.nbytes for x in written.values()),
        "write_seconds": time.perf_counter() - begin,
        "loads": [],
    }
    for cold in (True, False):
        if cold:
            _forget(files)
        with _host_memory() as held:
            begin = time.perf_counter()
            params = jax.block_until_ready(load(directory, progress=progress, mesh=devices).params)
            seconds = time.perf_counter() - begin
        _compare(params, written)
        row = {"cold": cold, "seconds": seconds, "bytes_per_second": report["bytes"] / seconds, "host_bytes": held[0]}
        report["loads"].append(row)
    _forget(files)
    begin = time.perf_counter()
    _read(files)
    report["disk_bytes_per_second"] = report["bytes"] / (time.perf_counter() - begin)
    return report


def _compare(found: Mapping[str, Array], exact: Mapping[str, Array]) -> None:
    wrong = [path for path, x in exact.items() if not bool(jnp.array_equal(found[path], x))]
    if wrong or found.keys() != exact.keys():
        raise RuntimeError(f"what was loaded is not what was written: {', '.join(wrong)}")


@contextmanager
def _host_memory() -> Iterator[list[int]]:
    """The most bytes that the process holds inside of the block beyond what it does at its start."""
    process, done = psutil.Process(), threading.Event()
    before, most = process.memory_info().rss, [0]

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def _onto_disk(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _forget(files: Iterable[Path]) -> None:
    """Asks the system to keep none of the files in memory, where it can be asked."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: Iterable[Path]) -> None:
    for file in files:
        size = file.stat().st_size
        read_into(np.empty(size, np.uint8), Tensor(file.name, file, "U8", (size,), 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m inkling_jax.benchmark.loading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help="a new one; it stays there")
    parser.add_argument("--config", choices=PRESETS, default="inkling-small", help="whose widths and experts")
    parser.add_argument("--layers", metavar="N", type=int, default=3, help="how many, the first dense (default 3)")
    parser.add_argument("--quantization", choices=(*FORMATS, "none"), default="nvfp4", help="of the routed experts")
    parser.add_argument("--mesh", metavar="SIZES", type=parse_mesh, help="over so many devices: tensor=2,expert=4")
    arguments = parser.parse_args()
    format: Format | None = None if arguments.quantization == "none" else arguments.quantization
    try:
        config = cut(InklingConfig.from_name(arguments.config), arguments.layers)
        packed = None if format is None else Quantization(format, tuple(range(1, config.num_layers)))
        report = loading(arguments.directory, config, packed, arguments.mesh, progress=True)
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f"error: {error}\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
