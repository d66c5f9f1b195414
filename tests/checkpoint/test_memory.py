"""Loading needs a little memory beyond the model, whatever the sizes of its tensors; quantising, an expert."""

import json
import os
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
PIECE = 1 << 20  # read at a time; 4 of them go to a device together, and 16 are on their way at most
SLACK = 24 << 20  # what the process itself takes while it loads, compiled programs too; the largest tensor is 84 MB

MEASURE = """
import json, resource, sys, threading, time
import jax
from inkling_jax.checkpoint import files, find_quantization, load_parameters, quantize, read
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from pallas_kernels import fp4

action, path = sys.argv[1:3]
files._PIECE_BYTES = int(sys.argv[3])
read._PART_BYTES, read._AHEAD_BYTES = 4 * files._PIECE_BYTES, 16 * files._PIECE_BYTES
config = InklingConfig.from_path(path)
abstract = abstract_parameters(config, quantization=find_quantization(path, config) if action == "keep" else None)
jax.block_until_ready(read._write(jax.numpy.ones((3, 3)), jax.numpy.ones((1, 3)), 1))
for shape in ((1, 2, 512, 512), (1, 512, 512)) if action == "quantise" else ():  # compiling is not counted
    jax.block_until_ready(fp4.quantize(jax.numpy.ones(shape, "bfloat16"), "nvfp4"))

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
if action == "quantise":
    quantize(path, path + "-nvfp4", "nvfp4", progress=False)
    size = 0
else:
    params = load_parameters(path, config, abstract, progress=False)
    size = sum(a.nbytes for a in params.values())
done = True
thread.join()
print(json.dumps({"peak": peak - before, "model": size}))
"""


def measure(action: str, path: Path) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, action, str(path), str(PIECE)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # the tests' are slow to run
    env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)  # glibc gives back what is freed at once, or one run in 20 has more
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_peak_memory(tmp_path: Path) -> None:
    abstract = abstract_parameters(CONFIG)
    params = {path: jnp.ones(spec.shape, spec.dtype) for path, spec in abstract.items()}
    save_checkpoint(tmp_path / "model", CONFIG, params, layout="original", max_shard_bytes=10**12)
    sizes = [array.nbytes for array in params.values()]
    del params
    plain = measure("load", tmp_path / "model")
    assert plain["model"] == sum(sizes) > 3 * max(sizes)
    assert plain["peak"] >= 0.9 * plain["model"]  # the measurement sees the arrays
    assert plain["peak"] < plain["model"] + 16 * PIECE + SLACK

    assert measure("quantise", tmp_path / "model")["peak"] < 0.8 * max(sizes)  # 36 MB, with 20 experts and with 200
    packed = tmp_path / "model-nvfp4"
    kept = measure("keep", packed)
    assert kept["model"] < 0.7 * plain["model"]
    assert kept["peak"] < kept["model"] + 16 * PIECE + SLACK
    unpacked = measure("unpack", packed)
    assert unpacked["model"] == plain["model"]
    assert unpacked["peak"] < unpacked["model"] + 16 * PIECE + SLACK
