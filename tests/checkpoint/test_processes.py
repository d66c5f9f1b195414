"""Two processes of four devices: each reads its own slices, and both together save and load one Orbax checkpoint."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from . import tiny
from .test_orbax import CONFIG, PARAMS

PROCESS = """
import json, sys
from pathlib import Path
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 4)
port, index, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, index)
from inkling_jax.checkpoint import CheckpointError, files, load_parameters, save_checkpoint, save_in_background
from inkling_jax.checkpoint import write
from inkling_jax.processes import agreed
from inkling_jax.sharding import make_mesh
from tests.checkpoint.test_orbax import CONFIG, PARAMS, on

read = 0
fill = files._fill
def counting(piece, *others):
    global read
    read += len(piece)
    fill(piece, *others)
files._fill = counting

def check(params):
    for path, array in params.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, PARAMS[path][shard.index], err_msg=path)
    return params

def load(name, sizes):
    return check(load_parameters(directory / name, CONFIG, on(sizes), progress=False))

params = load("original", {"expert": 2, "tensor": 4})
experts = sum(PARAMS[path].nbytes for path in PARAMS if ".experts." in path)
print(json.dumps({"read": read, "experts": experts}))
save_in_background(directory / "one", CONFIG, params).result()
assert (directory / "one" / "orbax.json").exists()
save_checkpoint(directory / "two", CONFIG, load("one", {"tensor": 8}), layout="orbax")
load("two", {"data": 2, "expert": 4})
for layout, words in (("original", "several processes can be saved as orbax only"), ("orbax", "is not an empty")):
    try:
        save_checkpoint(directory / "two", CONFIG, params, layout=layout)
    except CheckpointError as error:
        assert words in str(error), error
    else:
        raise AssertionError(layout)

def expect(words, kind, call):
    try:
        call()
    except kind as error:
        assert words[index] in str(error), error
    else:
        raise AssertionError(words)

own = directory / str(index)  # as on two machines that do not share a disk
own.mkdir()
if index == 0:
    (own / "original").symlink_to(directory / "original")
lacks = f"{directory / '1' / 'original'}: "
def load_own():
    load_parameters(own / "original", CONFIG, on({"tensor": 8}), progress=False)
expect([f"process 1: {lacks}", lacks], CheckpointError, load_own)
write.SIGHT = 5
unseen = ["another process did not come as far in 5 s", "process 1 does not see what the first writes there"]
expect(unseen, CheckpointError, lambda: save_checkpoint(own / "saved", CONFIG, params, layout="orbax"))
with agreed(True):
    pass
expect(["mesh: expert=4 leaves process 1 without a device"] * 2, ValueError, lambda: make_mesh({"expert": 4}))
expect(["leaves process 1 without a device"] * 2, ValueError, lambda: make_mesh({"tensor": 4}))
assert make_mesh(jax.sharding.Mesh(np.array(jax.local_devices()), ("tensor",))).size == 4
"""


def test_two_processes(tmp_path: Path) -> None:
    tensors = tiny.original(PARAMS)
    tiny.write(tmp_path / "original", tensors, CONFIG.to_dict("original"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROCESS, port]
    started = [
        subprocess.Popen([*command, str(i), str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    told = [json.loads(re.search(r"^{.*}$", text, re.MULTILINE)[0]) for text in printed]
    total = sum(array.nbytes for array in tensors.values())
    for one in told:  # half of the experts; of what is split over tensor the first half of the devices hold all
        assert one["read"] <= total - one["experts"] // 2
    assert sum(one["experts"] for one in told) == 2 * told[0]["experts"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "one", "original", "two"]
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["original"]
