"""Compilation, as a user meets it: kept from one run to the next, and announced when it takes long."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax import monitoring

CACHE_VARIABLE = "INKLING_JAX_CACHE_DIR"
CACHE_BYTES = 4 * 2**30
"""Where the cache forgets its oldest programs."""
PATIENCE_SECONDS = 3.0
"""A compile shorter than this is not worth a line."""

# JAX reports a stage when it ends. The end of lowering is the last word before the backend starts.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def default_cache_dir() -> Path | None:
    """Where compiled programs are kept; None when `INKLING_JAX_CACHE_DIR` is empty, "0" or "off"."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "0", "off") else Path(chosen).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "inkling_jax" / "compilation"


def enable_cache() -> Path | None:
    """Turn the persistent compilation cache on and return its directory, or None where it stays off.

    A directory that JAX already has (`JAX_COMPILATION_CACHE_DIR`, `jax.config`) is kept, and so is a
    cache switched off in JAX's configuration. A directory that cannot be made leaves the cache off:
    programs then compile again in every process, and nothing else changes.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    directory = default_cache_dir()
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if jax.config.jax_compilation_cache_max_size == -1:
        # Besides the disk, a bound guards the entries: JAX locks a bounded cache against other processes, no other.
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    return directory


@contextmanager
def announce(what: str) -> Iterator["Watch"]:
    """Say on stderr that `what` is compiling, when a compile inside this block takes long, and how long it took.

    Put it around one jitted call. The time counts tracing, lowering and the backend; what the block yields has it as
    `seconds`. Blocks nest, and other threads are not heard: JAX calls its listeners on the thread that compiles.
    """
    _listen()
    outer, _active.watch = _active.watch, Watch(what)
    try:
        yield _active.watch
    finally:
        _active.watch.stop()
        _active.watch = outer


class Watch:
    """The clock of one announced block. `seconds`: what compiling has taken in it so far."""

    def __init__(self, what: str):
        self.seconds = 0.0
        self._what = what
        self._since = time.monotonic()
        self._timer: threading.Timer | None = None
        self._said = False

    def lowered(self) -> None:
        self.stop()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._say, args=[f"compiling {self._what} ..."])
        self._timer.daemon = True
        self._timer.start()

    def compiled(self) -> None:
        self.stop()
        now = time.monotonic()
        if self._said:
            self._say(f"compiled {self._what} in {now - self._since:.1f} s")
        self._said = False
        self.seconds += now - self._since
        self._since = now

    def stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()  # else a line that is just being said could follow the one that ends it

    def _say(self, line: str) -> None:
        self._said = True
        print(line, file=sys.stderr, flush=True)


class _Active(threading.local):
    watch: Watch | None = None


_active = _Active()
_listening = threading.Lock()


def _listen() -> None:
    """Register the one listener, the first time that anything is announced."""
    if _listening.acquire(blocking=False):
        monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    watch = _active.watch
    if watch is None:
        return
    if event == _LOWERED:
        watch.lowered()
    elif event == _COMPILED:
        watch.compiled()
