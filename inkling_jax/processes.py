"""Several processes with one model: where they meet, errors that all of them hear of, what they must agree on."""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .errors import CheckpointError

PATIENCE = 3600  # seconds that a process waits for the others
_MOST_SAID = 2048  # bytes of an error that the others hear
_agreements = count()


def together(what: str, operation: str, timeout: int = PATIENCE) -> None:
    """Wait until every process has come to the same point of the same operation, whatever else their devices do.

    Raises `CheckpointError` when one has not come after `timeout` seconds.
    """
    if jax.process_count() > 1:
        import orbax.checkpoint.experimental.v1 as ocp

        try:
            asyncio.run(ocp.multihost.sync_global_processes(what, operation_id=operation, timeout=timeout))
        except (TimeoutError, jax.errors.JaxRuntimeError):
            missing = f"another process did not come as far in {timeout} s; see what it says"
            raise CheckpointError(f"{operation}: {what}: {missing}") from None


@contextmanager
def agreed(several: bool, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """A block that ends well in all processes or in none: where it raises in one, the others raise `kind`.

    Without `several` processes it is the block alone.
    """
    error = None
    try:
        yield
    except Exception as raised:
        if not several:
            raise
        error = raised
    if not several:
        return
    said = "" if error is None else str(error) or type(error).__name__
    together("before long work", f"agreement {next(_agreements)}")
    line = np.frombuffer(said.encode()[:_MOST_SAID].ljust(_MOST_SAID, b"\0"), np.uint8)
    lines = multihost_utils.process_allgather(line)
    if error is not None:
        raise error
    for process, line in enumerate(lines):
        if text := bytes(line).rstrip(b"\0").decode(errors="replace"):
            raise kind(f"process {process}: {text}")


def check_same(what: str, value: Any) -> None:
    """Raises ValueError in all processes where one of them has another value, by its repr."""
    digest = np.frombuffer(hashlib.sha256(repr(value).encode()).digest(), np.uint8)
    others = multihost_utils.process_allgather(digest)
    if (wrong := np.flatnonzero((others != others[0]).any(axis=-1))).size:
        raise ValueError(f"{what}: process {wrong[0]} has others than process 0; all must ask for the same")
