"""What is free on this machine's devices, and whether a model fits there."""

from typing import Any

import jax
import psutil
from jax.sharding import Mesh
from jax.typing import DTypeLike

from .config import InklingConfig
from .planning import held
from .quantization import Quantization


def free_bytes(device: Any) -> int | None:
    """Bytes free on a device, or None where it does not say."""
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_memory(
    config: InklingConfig, dtype: DTypeLike, quantization: Quantization | None, mesh: Mesh | None, cache: int = 0
) -> None:
    """Raises MemoryError where weights, and a cache of so many bytes a device, exceed what a device has free."""
    sizes = None if mesh is None else dict(mesh.shape)
    weights = sum(held(config, sizes, quantization, dtype).values())
    devices = jax.device_put(0).devices() if mesh is None else mesh.local_devices
    free = min((n for n in map(free_bytes, devices) if n is not None), default=weights + cache)
    if weights + cache > free:
        beside = f" and the cache {cache / 2**30:.2f} GiB" if cache else ""
        raise MemoryError(
            f"the weights need {weights / 2**30:.2f} GiB{beside} on each device, and {free / 2**30:.2f} GiB are free: "
            f"let go of other models first, take more devices (mesh), experts in 4 bits or a smaller model, or give "
            f"JAX more of a GPU than three quarters with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )
