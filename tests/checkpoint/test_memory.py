"""Loading needs no more host memory beyond the model than the largest tensor and a few pieces."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from inkling_jax.checkpoint import save_checkpoint
from inkling_jax.nn import abstract_parameters

from . import tiny

# About 260 MB in one file; the largest tensor is the routed experts' w13 of one layer.
CONFIG = replace(tiny.CONFIG, hidden_size=512, expert_size=512, num_experts=80, dense_size=512)
PIECE = 1 << 20
SLACK = 16 << 20  # what the process itself takes while it loads; an extra copy of the largest tensor is 84 MB

MEASURE = """
import json, resource, sys, threading, time
import jax
from inkling_jax.checkpoint import files, load_parameters
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters

files._PIECE_BYTES = int(sys.argv[2])
config = InklingConfig.from_path(sys.argv[1])
abstract = abstract_parameters(config)
jax.block_until_ready(jax.device_put(jax.numpy.ones(3)))

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

before = peak = resident()
done = False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
params = load_parameters(sys.argv[1], config, abstract, progress=False)
done = True
thread.join()
print(json.dumps({"peak": peak - before, "model": sum(a.nbytes for a in params.values())}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_peak_memory(tmp_path: Path) -> None:
    abstract = abstract_parameters(CONFIG)
    params = {path: jnp.ones(spec.shape, spec.dtype) for path, spec in abstract.items()}
    save_checkpoint(tmp_path / "model", CONFIG, params, layout="original", max_shard_bytes=10**12)
    sizes = [array.nbytes for array in params.values()]
    del params
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "model"), str(PIECE)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["model"] == sum(sizes) > 3 * max(sizes)
    assert found["peak"] >= 0.9 * found["model"]  # the measurement sees the arrays
    assert found["peak"] < found["model"] + max(sizes) + SLACK
