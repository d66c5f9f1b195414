"""What every op shares: which implementation runs, on which card, and whether the arguments are fit for it.

The kernels are written for Pallas' Triton backend, the one Pallas backend that reaches NVIDIA and AMD. The class of
`compiler_params` selects the backend, so `pallas_call` always passes Triton's: no card ever gets Mosaic.
"""

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

Implementation = Literal["xla", "triton", "interpret"]

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
DEPRECATION = "The Pallas Triton backend is deprecated"  # raised at lowering; still whole in jax 0.12
warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)

KIB = 1024
# What one block may use. sm_86, sm_89 and sm_120 are people's own cards and have the least of NVIDIA's.
SHARED_MEMORY = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_103": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
    "gfx942": 64 * KIB,
    "gfx950": 160 * KIB,
}
LEAST_SHARED_MEMORY = {"cuda": 99 * KIB, "rocm": 64 * KIB}


@dataclass(frozen=True, slots=True)
class Target:
    """The device that traced code is meant for: platform "cpu", "cuda", "rocm", ..., arch "sm_90", "gfx942", ..."""

    platform: str
    arch: str

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a block may use; the least of the platform where the card is unknown."""
        return SHARED_MEMORY.get(self.arch, LEAST_SHARED_MEMORY.get(self.platform, 0))

    @property
    def capability(self) -> int:
        """80 for sm_80, 120 for sm_120; 0 where the card is not NVIDIA's."""
        return int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else 0


def target() -> Target:
    """The target of the code being traced: the abstract device of `use_abstract_mesh`, else the default device."""
    if plt.is_gpu_device():
        info = plt.get_gpu_info()
        if info.compute_capability:
            return Target("cuda", f"sm_{info.compute_capability}")
        return Target("rocm", info.arch_name)
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return Target(abstract.platform if abstract is not None else jax.default_backend(), "")


def resolve(op: str, implementation: str | None) -> Implementation:
    """The implementation that runs for the asked one; None takes "triton" on CUDA and ROCm, else "xla".

    Raises ValueError for an unknown name, NotImplementedError for "triton" where no Triton kernel can run.
    """
    if implementation in ("xla", "interpret"):
        return implementation
    if implementation not in (None, "triton"):
        raise ValueError(
            f"{op}: implementation is {implementation!r}; expected None or one of {get_args(Implementation)}"
        )
    reason = why_not_triton(target())
    if reason is None:
        return "triton"
    if implementation == "triton":
        raise NotImplementedError(f"{op}: implementation='triton' {reason}; 'xla' and 'interpret' run anywhere")
    return "xla"


def why_not_triton(where: Target) -> str | None:
    """Why a Triton kernel cannot run there, or None when it can."""
    if where.platform not in ("cuda", "rocm"):
        return f"needs an NVIDIA or AMD GPU, and this program runs on {where.platform!r}"
    if where.platform == "cuda" and where.capability < 80:
        return f"needs compute capability 8.0 or newer, and this card is {where.arch}"
    return None


def pallas_call(
    kernel: Callable[..., None],
    *,
    op: str,
    implementation: Implementation,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    num_warps: int = 4,
    threads: int | None = None,
    num_stages: int = 2,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., jax.Array]:
    """`pl.pallas_call` over whole arrays, for Triton or, with "interpret", its interpreter.

    `kernel` is a function of the refs, or a functools.partial that binds hashable keywords to a module's function.
    `threads` of a block may be given instead of `num_warps`: AMD's warps have 64 of them, NVIDIA's 32.
    `aliases` maps operands to the outputs written in place. On a card, the kernel is compiled once by itself when it
    is first traced: a kernel that fails to compile raises RuntimeError with its own name and the way out. A kernel that
    a program calls for many layers is traced and lowered once for all of them: 42 layers, 460 calls, take 85 s of one
    core otherwise (jax 0.12.0.1, 2026-11-30).
    """
    if threads is not None:
        num_warps = max(threads // (64 if target().platform == "rocm" else 32), 1)
    outputs = out_shape if isinstance(out_shape, jax.ShapeDtypeStruct) else tuple(out_shape)
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=outputs,
        input_output_aliases=dict(aliases or {}),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=implementation == "interpret",
    )

    key = (kernel_key(kernel), grid, num_warps, num_stages)

    def run(*operands: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if implementation == "triton" and mesh.empty and mesh.abstract_device is None:  # a real card, not a shard
            compile_alone(op, key, tuple((x.shape, x.dtype) for x in operands), Uncompared(call))
        same = (key, outputs, tuple((aliases or {}).items()), implementation, target())
        return shared(op, same, Uncompared(call))(*operands)

    return run


def kernel_key(kernel: Callable[..., None]) -> tuple:
    """What makes two kernels the same: the function and the keywords that were bound to it."""
    if isinstance(kernel, functools.partial):
        return kernel.func, kernel.args, tuple(sorted(kernel.keywords.items()))
    return kernel, (), ()


@dataclass(frozen=True, slots=True)
class Uncompared:
    """A value that rides along with a cache key and is no part of it."""

    value: Callable[..., jax.Array]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uncompared)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=1024)
def shared(op: str, key: tuple, call: Uncompared) -> Callable[..., jax.Array]:
    """The one jitted function of all calls that are the same, so that JAX knows them again."""
    del key
    run = lambda *operands: call.value(*operands)  # noqa: E731
    run.__name__ = op
    return jax.jit(run)


@functools.cache
def compile_alone(op: str, key: tuple, operands: tuple, call: Uncompared) -> None:
    """Compile one kernel by itself, so that a failure names the kernel and not the model around it."""
    del key
    warn_of_command_buffers(target())
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    try:
        jax.jit(call.value).lower(*shapes).compile()
    except Exception as error:
        raise RuntimeError(
            f"{op}: the Triton kernel does not compile for {target().arch} with operands "
            f"{', '.join(f'{s.dtype}{list(s.shape)}' for s in shapes)}; choose implementation='xla' for {op}: {error}"
        ) from error


def warn_of_command_buffers(where: Target) -> None:
    """gfx950 crashes when a command buffer holds a while loop (openxla/xla#46952); only an XLA flag avoids it."""
    if where.arch == "gfx950" and "--xla_gpu_enable_command_buffer=" not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            "set XLA_FLAGS=--xla_gpu_enable_command_buffer= before JAX starts: gfx950 crashes on loops in them",
            stacklevel=2,
        )


def fence(on_a_card: bool) -> None:
    """Keep the loads before this point ahead of those behind it: the compiler would move them down to their uses."""
    if on_a_card:
        plt.debug_barrier()


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n: the size of a tile that covers n columns."""
    return 1 << max(n - 1, 0).bit_length()


def check_shape(op: str, name: str, array: jax.Array, expected: Sequence[int | None]) -> None:
    """Raise ValueError unless the array has the expected shape; None stands for any size."""
    fits = array.ndim == len(expected) and all(e is None or s == e for s, e in zip(array.shape, expected, strict=False))
    if not fits:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{op}: {name} has shape {list(array.shape)}; expected [{wanted}]")


def check_dtype(op: str, name: str, array: jax.Array, expected: Sequence[jax.typing.DTypeLike]) -> None:
    """Raise ValueError unless the array's dtype is one of the expected ones."""
    if array.dtype not in [jnp.dtype(d) for d in expected]:
        wanted = " or ".join(jnp.dtype(d).name for d in expected)
        raise ValueError(f"{op}: {name} is {array.dtype}; expected {wanted}")


def check_float(op: str, name: str, array: jax.Array, like: jax.Array | None = None) -> None:
    """Raise ValueError unless the array is bfloat16, float16 or float32, and of the dtype of `like` if given."""
    check_dtype(op, name, array, FLOATS if like is None else (like.dtype,))


def check_index(op: str, name: str, array: jax.Array) -> None:
    """Raise ValueError unless the array holds int32: ids, page numbers, lengths and positions all do."""
    check_dtype(op, name, array, (jnp.int32,))
