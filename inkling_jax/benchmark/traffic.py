"""The bytes that a step must read, counted from the model's shapes: the memory limit is these at the copy rate.

On a mesh they are those of one device: its shards, and what every device has whole; of sequences its part, rounded up.
Left out is what is a thousandth of the whole: activations, conv rings, and the key and value rows that are written.
"""

import re
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..config import AttentionShape, InklingConfig
from ..nn import abstract_parameters
from ..planning import held, own_heads
from ..quantization import Quantization

MeshSizes = Mapping[str, int] | None

_PARTS = {
    r"layers\.\d+\.attn\.": "attention",
    r"layers\.\d+\.mlp\.experts\.": "experts",
    r"layers\.\d+\.mlp\.shared\.": "shared_experts",
    r"layers\.\d+\.mlp\.router\.": "router",
    r"layers\.\d+\.mlp\.": "dense",
    r"mtp": "depths",
    r"unembed\.": "lm_head",
    r"embed\.weight": "embedding",
    r"": "norms_and_convs",
}


def part(path: str) -> str:
    """What a parameter belongs to. Norms and convolutions inside attention and the depths count with those."""
    return next(name for pattern, name in _PARTS.items() if re.match(pattern, path))


def uniform_hits(config: InklingConfig, rows: int, mesh: MeshSizes = None) -> float:
    """Distinct experts of a device that `rows` rows are expected to hit in a layer, were all choices equally likely."""
    experts = config.num_experts
    return experts * (1 - (1 - config.experts_per_token / experts) ** rows) / _size(mesh, "expert")


def decode_bytes(
    config: InklingConfig,
    dtype: DTypeLike,
    sequences: int,
    length: float,
    drafts: int,
    hits: Sequence[float],
    mesh: MeshSizes = None,
    quantization: Quantization | None = None,
) -> dict[str, float]:
    """Bytes of one round by part: `length` tokens committed in each sequence, `hits[i]` experts hit in MoE layer i.

    On a mesh `hits` are of a device's own experts, those of the device that hits the most.
    The verify runs drafts + 1 rows through the layers and the LM head; each drafting depth as many through its layer,
    and one through the LM head.
    """
    here = held(config, mesh, quantization, dtype)
    own, here_sequences = own_heads(config, _size(mesh, "tensor")), -(-sequences // _size(mesh, "data"))
    sizes = _backbone(config, here, hits, mesh)
    sizes["depths"] = sum(size for path, size in here.items() if _drafts(path, drafts))
    row = config.hidden_size * jnp.dtype(dtype).itemsize
    lm_head = min(here["unembed.weight"], config.real_vocab_size * row)  # the first devices have no padding
    sizes["lm_head"] = (1 + drafts) * lm_head
    sizes["embedding"] = here_sequences * (1 + drafts) ** 2 * row
    verified = sum(_kv(shape, length + drafts, drafts + 1) for shape in _attentions(own))
    drafted = sum(_kv(shape, length - 1, drafts + 1) for shape in _depth_attentions(own, drafts))
    sizes["kv"] = here_sequences * (verified + drafted) * jnp.dtype(dtype).itemsize
    return sizes


def prefill_bytes(
    config: InklingConfig,
    dtype: DTypeLike,
    tokens: int,
    chunks: Sequence[int],
    drafts: int,
    mesh: MeshSizes = None,
    quantization: Quantization | None = None,
) -> dict[str, float]:
    """Bytes of a prefill of one sequence in steps of so many rows, by part: each reads all weights but the LM head.

    A step is taken to hit as many experts as its real rows would under uniform routing.
    """
    here = held(config, mesh, quantization, dtype)
    own, starts = own_heads(config, _size(mesh, "tensor")), [sum(chunks[:i]) for i in range(len(chunks))]
    moe_layers = config.num_layers - len(config.dense_layers)
    sizes: dict[str, float] = dict.fromkeys(_PARTS.values(), 0.0)
    for start, chunk in zip(starts, chunks, strict=True):
        hits = [uniform_hits(config, min(chunk, tokens - start), mesh)] * moe_layers
        for name, size in _backbone(config, here, hits, mesh).items():
            sizes[name] += size
        sizes["depths"] += sum(size for path, size in here.items() if _drafts(path, drafts))
    sizes["embedding"] = tokens * (1 + drafts) * config.hidden_size * jnp.dtype(dtype).itemsize
    shapes = _attentions(own) + _depth_attentions(own, drafts)
    rows = sum(_kv(shape, start, 0) for shape in shapes for start in starts)
    sizes["kv"] = rows * jnp.dtype(dtype).itemsize
    return sizes


def prefill_flops(config: InklingConfig, tokens: int) -> float:
    """Multiplications and additions of a prefill: the weights that each token meets, scores and weighted values."""
    abstract = abstract_parameters(config)
    experts = config.experts_per_token / config.num_experts
    used = {"attention": 1.0, "dense": 1.0, "shared_experts": 1.0, "router": 1.0, "experts": experts}
    weights = sum(used.get(part(path), 0.0) * x.size for path, x in abstract.items())
    pairs = 0.0
    for shape in _attentions(config):
        reach = min(tokens, shape.window or tokens)
        visible = reach * (reach + 1) / 2 + (tokens - reach) * reach
        pairs += shape.heads * shape.head_dim * visible
    return 2 * weights * tokens + 4 * pairs


def _backbone(
    config: InklingConfig, here: Mapping[str, int], hits: Sequence[float], mesh: MeshSizes
) -> dict[str, float]:
    """Bytes of the layers' weights and the final norm by part, experts as far as they are hit."""
    moe = [i for i in range(config.num_layers) if not config.is_dense(i)]
    experts = config.num_experts / _size(mesh, "expert")
    share = {f"layers.{i}": hit / experts for i, hit in zip(moe, hits, strict=True)}
    sizes: dict[str, float] = dict.fromkeys(_PARTS.values(), 0.0)
    for path, size in here.items():
        name = part(path)
        if name == "experts":
            sizes[name] += share[".".join(path.split(".")[:2])] * size
        elif name not in ("depths", "lm_head", "embedding"):
            sizes[name] += size
    return sizes


def _kv(shape: AttentionShape, length: float, queries: int) -> float:
    """Elements of keys and values that a sequence of `length` rows reads: the last `queries` of them attend together.

    With no query among them (a chunk, whose own rows are not cached yet) the window of the next row counts.
    """
    visible = length if shape.window is None else min(length, shape.window - 1 + queries)
    return 2 * shape.kv_heads * shape.head_dim * visible


def _attentions(config: InklingConfig) -> list[AttentionShape]:
    return [config.attention(config.is_local(i)) for i in range(config.num_layers)]


def _depth_attentions(config: InklingConfig, drafts: int) -> list[AttentionShape]:
    return [config.attention(config.mtp_is_local(d)) for d in range(drafts)]


def _drafts(path: str, drafts: int) -> bool:
    """Whether a parameter belongs to one of the first `drafts` depths, or to all of them."""
    if not path.startswith("mtp") or drafts == 0:
        return False
    return path.startswith("mtp_") or int(path.split(".")[1]) < drafts


def _size(mesh: MeshSizes, axis: str) -> int:
    return (mesh or {}).get(axis, 1)
