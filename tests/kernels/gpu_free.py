"""Compile kernels for cards that are not here: to Triton IR with plain jax, to machine code with the triton wheel."""

import functools
import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA compiles the kernels; triton 3.9 warns where unset
# Where the wheel exists the dev extra installs it: there, a missing one is a failure.
HAS_TRITON = (sys.platform, platform.machine()) == ("linux", "x86_64")
DEVICES = {  # jax knows NVIDIA's cards by name and AMD's by architecture
    "sm_80": "NVIDIA A100",
    "sm_89": "NVIDIA L4",
    "sm_90": "NVIDIA H200",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA RTX PRO 6000",
    "gfx942": "gfx942",
    "gfx950": "gfx950",
}


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel of a lowered program: its IR and what it is launched with."""

    name: str
    ir: str
    num_warps: int
    num_stages: int


def device(arch: str):
    """A context in which code is traced for a card of that architecture."""
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(DEVICES[arch], None, platform)))


def lower(function, args, arch: str):
    """The function lowered for that card; it needs no plugin."""
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    with device(arch):
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))


def kernels(lowered) -> list[Kernel]:
    """Every Triton kernel of a lowered program. Its IR is in private corners of jax, at both ends of the range."""
    from jax._src.pallas.triton import lowering
    from jaxlib.mlir import ir

    found: list[Kernel] = []

    def visit(operation) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    attributes = inner.operation.attributes
                    if "call_target_name" in attributes and "triton" in str(attributes["call_target_name"]):
                        key = next(k for k in ("mhlo.backend_config", "backend_config") if k in attributes)
                        found.append(read(ir.DictAttr(attributes[key])))
                    visit(inner.operation)

    def read(config: ir.DictAttr) -> Kernel:
        with lowering._new_ir_context():
            module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            text = str(module.operation.get_asm(enable_debug_info=False))
        number = lambda key: ir.IntegerAttr(config[key]).value  # noqa: E731
        return Kernel(ir.StringAttr(config["name"]).value, text, number("num_warps"), number("num_stages"))

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


@dataclass(frozen=True)
class MachineCode:
    """What the compiled kernel needs: bytes of shared memory, loads by width in bytes, spilled registers."""

    shared: int
    loads: dict[int, int]
    spills: int

    @classmethod
    @functools.cache  # shapes that differ in their grid alone are one kernel
    def of(cls, kernel: Kernel, arch: str) -> "MachineCode":
        import triton
        from triton.backends.compiler import GPUTarget

        amd = arch.startswith("gfx")
        target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.ttir")
            path.write_text(simplified(kernel.ir, target, path))
            options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
            compiled = triton.compile(str(path), target=target, options=options)
        text = compiled.asm["amdgcn" if amd else "ptx"]
        spills = amd_spills(text) if amd else nvidia_spills(compiled.asm["cubin"])
        return cls(compiled.metadata.shared, (amd_loads if amd else nvidia_loads)(text), spills)


def simplified(text: str, target, path: Path) -> str:
    """The IR after the passes that Triton and XLA run first; compiling from a file leaves them out."""
    from triton._C.libtriton import ir, passes
    from triton.compiler.compiler import make_backend

    path.write_text(text)
    context = ir.context()
    ir.load_dialects(context)
    make_backend(target).load_dialects(context)
    module = ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = ir.pass_manager(context)
    for add in (
        passes.common.add_inliner,
        passes.common.add_canonicalizer,
        passes.ttir.add_combine,
        passes.ttir.add_reorder_broadcast,
        passes.common.add_cse,
        passes.common.add_symbol_dce,
        passes.ttir.add_loop_unroll,
    ):
        add(manager)
    manager.run(module, "simplify")
    return str(module)


def nvidia_loads(ptx: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for vector, bits in re.findall(r"ld\.global[\w:]*(?:\.\w+::\w+)*(?:\.v(\d))?\.b(\d+)", ptx):
        width = int(vector or 1) * int(bits) // 8
        found[width] = found.get(width, 0) + 1
    asynchronous = len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, (?:0x10|16)", ptx))
    return found | ({16: found.get(16, 0) + asynchronous} if asynchronous else {})


def amd_loads(asm: str) -> dict[int, int]:
    widths = {"ubyte": 1, "ushort": 2, "short_d16": 2, "short_d16_hi": 2, "dword": 4, "dwordx2": 8, "dwordx4": 16}
    found: dict[int, int] = {}
    for name in re.findall(r"(?:global|buffer)_load(?:_lds)?_(\w+)", asm):
        width = widths.get(name, 0)
        found[width] = found.get(width, 0) + 1
    return found


def amd_spills(asm: str) -> int:
    return sum(int(n) for n in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s+(\d+)", asm))


def nvidia_spills(cubin: bytes) -> int:
    """Bytes of stack a thread, by the tool that the wheel carries; a kernel that spills nothing has none."""
    import subprocess

    import triton

    tool = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
