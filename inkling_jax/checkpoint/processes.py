"""Several processes at one checkpoint: points where they meet, and errors that all of them hear of."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import jax
import numpy as np
from jax.experimental import multihost_utils

from inkling_jax.errors import CheckpointError

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
def agreed(several: bool) -> Iterator[None]:
    """A block that ends well in all processes or in none: where it raises in one, the others raise `CheckpointError`.

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
            raise CheckpointError(f"process {process}: {text}")
