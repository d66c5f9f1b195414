"""Look at this machine: versions, devices, memory settings, the compilation cache, a small run. Says what to fix."""

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

HELP = "is this machine ready, and what to fix"
EXAMPLES = """\
example:
  inkling-jax doctor && inkling-jax generate --prompt "import"

The exit code is 1 when something is broken. A warning (!) costs speed or comfort, not results.
"""

_PACKAGES = ("jax", "jaxlib", "flax", "safetensors", "tokenizers", "huggingface_hub", "numpy")
_MEMORY_VARIABLES = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
)
_MARKS = {"ok": "ok", "warn": "!", "broken": "BROKEN"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix`, where there is one, says what to do."""

    state: Literal["ok", "warn", "broken"]
    text: str
    fix: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The machine is the only argument."""


def run(arguments: argparse.Namespace) -> int:
    broken = False
    for title, check in _CHECKS.items():
        print(title)
        for finding in _findings(check):
            broken |= finding.state == "broken"
            print(f"  {_MARKS[finding.state]:<7}{finding.text}", flush=True)
            if finding.fix:
                print(f"         -> {finding.fix}")
    print("something is broken: see above" if broken else "ready")
    return int(broken)


def _findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds; one that fails is a finding too, so that the others still run."""
    try:
        yield from check()
    except Exception as error:
        yield Finding("broken", f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    for package in ("inkling_jax", *_PACKAGES):
        try:
            yield Finding("ok", f"{package} {version(package)}")
        except PackageNotFoundError:
            yield Finding("broken", f"{package} is not installed", f"pip install {package}")
    release = tuple(int(part) for part in re.findall(r"\d+", version("jax"))[:3])
    if not (0, 11, 2) <= release < (0, 13):
        yield Finding("broken", f"jax {version('jax')} is not supported", 'pip install "jax>=0.11.2,<0.13"')


def _devices() -> Iterator[Finding]:
    import jax

    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 1e9:.1f} GB for JAX" if limit else ""
        yield Finding("ok", f"{device.platform} {device.id}: {device.device_kind}{memory}")
    if jax.default_backend() == "cpu":
        if Path("/dev/nvidiactl").exists():
            yield Finding("warn", "an NVIDIA GPU is here and JAX does not use it", 'pip install "inkling_jax[cuda13]"')
        if Path("/dev/kfd").exists():
            yield Finding("warn", "an AMD GPU is here and JAX does not use it", 'pip install "inkling_jax[rocm7]"')


def _memory() -> Iterator[Finding]:
    import jax

    for name in _MEMORY_VARIABLES:
        if name in os.environ:
            yield Finding("ok", f"{name}={os.environ[name]}")
    if jax.default_backend() == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        text = "JAX takes three quarters of a GPU's memory at its first array"
        yield Finding("warn", text, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for large models, set before Python starts")
    if jax.config.jax_enable_x64:
        yield Finding("warn", "64-bit mode is on: slower and larger", "unset JAX_ENABLE_X64")
    if sys.platform == "linux":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Finding("ok", f"{total / 1e9:.1f} GB of host memory")


def _cache() -> Iterator[Finding]:
    from inkling_jax.compilation import CACHE_VARIABLE, default_cache_dir, enable_cache

    directory = enable_cache()
    if directory is None:
        wanted = default_cache_dir()
        reason = f"{wanted} cannot be made" if wanted else "switched off"
        yield Finding("warn", f"off ({reason}): every process compiles again", f"set {CACHE_VARIABLE} to a directory")
        return
    if not os.access(directory, os.W_OK):
        yield Finding("warn", f"{directory} cannot be written", f"set {CACHE_VARIABLE} to another directory")
    files = [file for file in directory.glob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    yield Finding("ok", f"{directory}: {len(files)} files, {size / 1e6:.1f} MB")


def _small_run() -> Iterator[Finding]:
    from inkling_jax import load

    start = time.monotonic()
    model = load("nano", dtype="float32", progress=False)
    prompt, new = "def add(a, b):\n", 24
    plain, drafted = (model.generate([prompt], max_new_tokens=new, draft_tokens=n) for n in (0, None))
    seconds = time.monotonic() - start
    if list(plain[0].tokens) != list(drafted[0].tokens):
        text = f"drafts changed the greedy text: {plain[0].text!r} without, {drafted[0].text!r} with"
        yield Finding("broken", text, "report this with the lines above")
        return
    how = "plain JAX" if model.implementation == "xla" else "the kernels"
    text = f"nano wrote {len(plain[0].tokens)} tokens on {how}, the same with drafts"
    yield Finding("ok", f"{text} ({drafted.stats.tokens_per_round:.2f} a round); {seconds:.1f} s in all")


_CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "versions": _versions,
    "devices": _devices,
    "memory": _memory,
    "compilation cache": _cache,
    "small run": _small_run,
}
