"""One of two processes of four devices each: `one_of_two.py INDEX PORT`. Run by `test_meshes.py`."""

import sys

import jax
import numpy as np
import pytest

from inkling_jax.decode import engine
from inkling_jax.decode.session import Session
from inkling_jax.sharding import AXES
from tests import reference
from tests.decode.tiny import request
from tests.sharding.on_eight import CONFIG, DRAFTS, NEW, alone, engine_on

PROMPTS = (2, 37, 20)


def completions(steps) -> list[list[int]]:
    prompts = [reference.random_tokens(CONFIG, length, seed) for seed, length in enumerate(PROMPTS)]
    session = Session(steps, [request(tokens, NEW) for tokens in prompts], DRAFTS, None)
    while not session.finished:
        session.advance(4, seconds=60.0 * jax.process_index())  # as if one process had the faster clock
    return [session.completion(b).tokens for b in range(len(PROMPTS))]


def main(index: int, port: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    steps = engine_on("2x2x2")
    assert steps.mesh is not None and steps.mesh.axis_names == AXES
    assert not any(leaf.is_fully_addressable for leaf in steps.leaves)
    with pytest.raises(ValueError, match="prompts and settings: process 1 has others than process 0"):
        steps.start([request([1 + index], NEW)], DRAFTS)
    engine.free_memory = lambda array: [10**9, 0][index]
    with pytest.raises(MemoryError, match=["^process 1: the cache of", "^the cache of"][index]):
        steps.start([request([1], NEW)], DRAFTS)
    engine.free_memory = lambda array: None
    found = completions(steps)
    assert all(map(len, found))
    if index == 0:
        np.testing.assert_equal(found, completions(alone()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
