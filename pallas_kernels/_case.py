"""A shape at which an op is timed. Each op's `shapes.py` exports `CASES: tuple[Case, ...]`; `bench.py` runs them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels._dispatch import Implementation


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of a real model.

    `make(key, copies)` gives that many variants (state, inputs), apart in memory so that they can rotate through the
    cache; a table of several GB may be shared. `run(implementation, state, inputs)` gives (state, output): the state,
    `()` where there is none, is what the op updates in place. `bytes_moved` is what one call must read and write.
    `rival` names what users would run instead, where that is not "xla"; `run` takes it for an implementation too.
    """

    shape: str
    make: Callable[[jax.Array, int], list[tuple[Any, Any]]]
    run: Callable[[Implementation | str, Any, Any], tuple[Any, Any]]
    bytes_moved: int
    flops: int = 0
    rival: str | None = None


def apart(make_one: Callable[[jax.Array], tuple[Any, Any]]) -> Callable[[jax.Array, int], list[tuple[Any, Any]]]:
    """A `make` whose variants share nothing."""
    return lambda key, copies: [make_one(k) for k in jax.random.split(key, copies)]
