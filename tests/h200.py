"""Compile whole programs for an H200 that is not here: XLA's GPU pipeline, from the wheels of JAX's CUDA plugin."""

import os
import platform
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

# Where the wheels exist the dev extra installs them: there, a missing one is a failure.
HAS_PLUGIN = (sys.platform, platform.machine()) == ("linux", "x86_64")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin without NVIDIA's own wheels
# What XLA asks a card for, as an H200 answers.
CARD = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 149929347584
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
"""


@dataclass(frozen=True)
class Collective:
    """Its kind, the arrays it makes on each device, as in "bf16[2,512]", and whether a branch of the program has it."""

    kind: str
    makes: tuple[str, ...]
    in_branch: bool


@dataclass(frozen=True)
class Program:
    """A compiled program: its optimised HLO, the launches that run it, and the bytes of its buffers."""

    hlo: str
    launches: str
    memory: Any

    def copies(self) -> list[int]:
        """The bytes of every array that the program copies."""
        shapes = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* copy(?:-start)?\(", self.hlo)
        bits = {"pred": 8, "bf16": 16}
        sizes = (np.prod([int(n) for n in dims.split(",") if n], dtype=np.int64) for _, dims in shapes)
        widths = [bits.get(dtype, int(re.sub(r"\D", "", dtype) or 8)) for dtype, _ in shapes]
        return [int(n) * width // 8 for n, width in zip(sizes, widths, strict=True)]

    def collectives(self) -> list["Collective"]:
        """What the devices of a mesh send each other, in the order of the program text."""
        found = []
        kinds = "all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|collective-broadcast"
        for line in self.hlo.splitlines():
            if match := re.search(rf"= (.*?) ({kinds})(-start)?\(", line):
                shapes = re.findall(r"\w+\[[\d,]*\]", match[1])
                if match[3]:  # operands, then results
                    shapes = shapes[len(shapes) // 2 :]
                [name] = re.findall(r'op_name="([^"]*)"', line)[:1] or [""]
                found.append(Collective(match[2], tuple(shapes), "/cond/" in name))
        return found

    def loop_body(self) -> list[str]:
        """The launches of the outermost loop's body, each indented below what holds it."""
        lines = [line for line in self.launches.splitlines() if line.strip() != "condition:"]  # not indented
        begin = next(i for i, line in enumerate(lines) if re.match(r"\s+body:", line))
        depth = len(lines[begin]) - len(lines[begin].lstrip())
        end = next((i for i in range(begin + 1, len(lines)) if indent(lines[i]) <= depth), len(lines))
        return lines[begin + 1 : end]


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def cards(count: int) -> list[Any]:
    """So many H200s of one machine, for a mesh to be compiled for."""
    return topologies.get_topology_desc(platform="cuda", target_config=CARD, topology=f"1x1x{count}").devices


def compiled(function: Any, args: tuple, folder: Path, mesh: Mesh | None = None, **static: Any) -> Program:
    """The jitted function compiled for arguments of these shapes; XLA leaves its notes in `folder`.

    On a mesh the arguments must say where they live.
    """
    shapes = args
    if mesh is None:
        sharding = NamedSharding(Mesh(np.array(cards(1)), ("x",)), PartitionSpec())
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    device = AbstractDevice("NVIDIA H200", None, "cuda")
    target = AbstractMesh((), (), abstract_device=device) if mesh is None else mesh.abstract_mesh
    with use_abstract_mesh(target):
        lowered = function.trace(*shapes, **static).lower(lowering_platforms=("cuda",))
    with warnings.catch_warnings():  # what a persistent cache has of it cannot be read back without the card
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
        program = lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
    *_, launches = sorted(folder.glob("*.thunk_sequence*.txt"))  # the last: after all passes, where one changed it
    return Program(program.as_text(), launches.read_text(), program.memory_analysis())
