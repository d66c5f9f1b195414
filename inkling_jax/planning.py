"""What a model takes of each device of a mesh: memory, and the bytes that a round of decoding reads and sends.

Computed from shapes and the sharding table alone: the devices need not exist, and nothing is allocated.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from .cache import cache_bytes, padded
from .collectives import gathers, sums_whole
from .config import InklingConfig
from .nn import abstract_parameters
from .quantization import Format, Quantization
from .sharding import AXES, shardings

HEADROOM = 0.9  # of a device's memory; the rest is for activations, the compiler's scratch space and the runtime


@dataclass(frozen=True, slots=True)
class GPU:
    """Memory in bytes and its bandwidth in bytes a second, as the vendor gives them."""

    memory: float
    bandwidth: float


GPUS = {
    "H100": GPU(80e9, 3.35e12),
    "H200": GPU(141e9, 4.8e12),
    "B200": GPU(180e9, 8.0e12),  # of a DGX or HGX B200; the chip carries 192 GB
    "MI300X": GPU(192e9, 5.3e12),
    "MI355X": GPU(288e9, 8.0e12),
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a device reads in one round: every sequence a target row and its drafts.

    dense: attention, norms, convolutions, router, dense and shared experts. experts: of the routed experts that are
    hit. head: the LM head, once for the target and once for each depth. depths: the weights of the depths that draft.
    kv: keys and values of all sequences at the full context, those of the depths with them.
    """

    dense: int
    experts: int
    head: int
    depths: int
    kv: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.head + self.depths + self.kv


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One device's share. `sequences` of the batch are its own; `hit` is how many of a layer's experts are hit there.

    `weights` and `cache` are bytes; the cache is by part, as in `cache_bytes`. `received` is what other devices send it
    in a round, in bytes.
    """

    mesh: dict[str, int]
    sequences: int
    context: int
    draft_tokens: int
    weights: int
    cache: dict[str, int]
    hit: float
    traffic: Traffic
    received: int

    @property
    def memory(self) -> int:
        """Bytes of weights and cache."""
        return self.weights + self.cache["total"]

    def fits(self, gpu: GPU) -> bool:
        """Whether it leaves a tenth of the device's memory free."""
        return self.memory <= HEADROOM * gpu.memory

    def seconds(self, gpu: GPU) -> float:
        """The least time of a round: its traffic at the full bandwidth, with nothing for arithmetic and collectives."""
        return self.traffic.total / gpu.bandwidth

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        gpus = {
            name: {"fits": self.fits(gpu), "least_milliseconds": 1e3 * self.seconds(gpu)} for name, gpu in GPUS.items()
        }
        return asdict(self) | {"memory": self.memory, "traffic_total": self.traffic.total, "gpus": gpus}


def plan(
    config: InklingConfig,
    mesh: Mapping[str, int] | None = None,
    quantization: Format | Quantization | None = None,
    batch: int = 1,
    context: int | None = None,
    draft_tokens: int = 0,
    dtype: str = "bfloat16",
) -> DevicePlan:
    """What each device of a mesh of any size holds and reads, for `batch` sequences of `context` tokens (up to 8192).

    `mesh` has sizes by axis, as for `load`; `quantization` is "nvfp4" or "mxfp4" for experts in 4 bits, in the layers
    that `quantize` would choose; `dtype` is "bfloat16" or "float32", of the rest and of the cache. Experts are taken to
    be hit uniformly: of a layer's E, a round of n rows that choose k each hits E (1 - (1 - k/E)^n). Sequences fill one
    device of the data axis after the other; the plan is of the first.

    Raises ValueError where the mesh has another axis or does not divide the model, for another dtype or format, for a
    model without layers to hold in 4 bits, and for numbers out of range.
    """
    sizes = _sizes(mesh or {})
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype = {dtype!r}; expected bfloat16 or float32")
    if isinstance(quantization, str):
        quantization = Quantization.of_model(config, quantization)
    context = min(8192, config.max_context) if context is None else context
    _in_range("batch", batch, 1, None)
    _in_range("context", context, 1, config.max_context)
    _in_range("draft_tokens", draft_tokens, 0, config.mtp_depths)
    here = held(config, sizes, quantization, dtype)
    sequences = min(batch, padded(-(-batch // sizes["data"])))
    chosen = 1 - (1 - config.experts_per_token / config.num_experts) ** (sequences * (draft_tokens + 1))
    own = own_heads(config, sizes["tensor"])
    return DevicePlan(
        mesh=sizes,
        sequences=sequences,
        context=context,
        draft_tokens=draft_tokens,
        weights=sum(here.values()),
        cache=cache_bytes(own, sequences, context, draft_tokens, dtype),
        hit=chosen * config.num_experts / sizes["expert"],
        traffic=_traffic(own, here, chosen, sequences, context, draft_tokens, jnp.dtype(dtype).itemsize),
        received=_received(config, sizes, padded(sequences), draft_tokens, jnp.dtype(dtype).itemsize),
    )


def held(
    config: InklingConfig,
    mesh: Mapping[str, int] | None = None,
    quantization: Quantization | None = None,
    dtype: DTypeLike = "bfloat16",
) -> dict[str, int]:
    """Bytes of every parameter, by its dotted path, on each device of a mesh. Raises ValueError as `plan` does."""
    devices: Any = AbstractMesh(tuple(_sizes(mesh or {}).values()), AXES)
    where = shardings(config, devices, quantization)
    abstract = abstract_parameters(config, dtype, quantization)
    return {
        path: math.prod(where[path].shard_shape(spec.shape)) * spec.dtype.itemsize for path, spec in abstract.items()
    }


def _sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    for axis, size in mesh.items():
        if axis not in AXES:
            raise ValueError(f"mesh: there is no axis {axis!r}; expected {', '.join(AXES)}")
        _in_range(f"mesh: {axis}", size, 1, None)
    return {axis: mesh.get(axis, 1) for axis in AXES}


def _in_range(name: str, value: Any, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (value if most is None else most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} = {value!r}; expected an integer {wanted}")


def own_heads(config: InklingConfig, tensor: int) -> InklingConfig:
    """A config with the heads of one device; of KV heads fewer than there are devices, each has one."""
    heads = {name: getattr(config, name) // tensor for name in ("num_heads", "local_num_heads")}
    kv_heads = {name: max(1, getattr(config, name) // tensor) for name in ("num_kv_heads", "local_num_kv_heads")}
    return replace(config, **heads, **kv_heads)


def _traffic(
    own: InklingConfig,
    here: Mapping[str, int],
    chosen: float,
    sequences: int,
    context: int,
    drafts: int,
    itemsize: int,
) -> Traffic:
    sums = dict.fromkeys(("dense", "experts", "head", "depths"), 0)
    for path, size in here.items():
        if path.startswith("mtp."):
            sums["depths"] += size if int(path.split(".")[1]) < drafts else 0
        elif path == "unembed.weight":
            sums["head"] = size * (1 + drafts)
        elif ".experts." in path:
            sums["experts"] += size
        elif path != "embed.weight":  # a row for each token
            sums["dense"] += size
    local = [own.is_local(i) for i in range(own.num_layers)] + [own.mtp_is_local(d) for d in range(drafts)]
    kv = sum(_kv_elements(own, kind, context) for kind in local) * sequences * itemsize
    return Traffic(sums["dense"], round(chosen * sums["experts"]), sums["head"], sums["depths"], kv)


def _received(config: InklingConfig, sizes: Mapping[str, int], batch: int, drafts: int, itemsize: int) -> int:
    """The sums of all branches and the depths' inputs, as `collectives` moves them; what logits exchange is nothing."""
    rows = batch * (drafts + 1)
    numbers = rows * config.hidden_size
    heads, all_parts = sizes["tensor"], sizes["tensor"] * sizes["expert"]

    def summed(parts: int, size: int = 4) -> float:
        others = (parts - 1) / parts
        if not sums_whole(parts, rows):
            return 2 * others * numbers * itemsize
        return (parts - 1) * numbers * size if gathers(parts, numbers) else 2 * others * numbers * 4

    dense, mixtures = len(config.dense_layers) + drafts, config.num_layers - len(config.dense_layers)
    branches = (dense + mixtures) * summed(heads) + dense * summed(all_parts)
    branches += mixtures * summed(all_parts, itemsize if sizes["expert"] == 1 else 4)
    return round(branches + drafts * (all_parts - 1) / all_parts * numbers * itemsize)


def _kv_elements(own: InklingConfig, local: bool, context: int) -> int:
    """Elements of the keys and values that a row attends to in one layer."""
    shape = own.attention(local)
    return 2 * min(context, shape.window or context) * shape.kv_heads * shape.head_dim
