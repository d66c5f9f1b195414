"""A tiny model and its tensors in both layouts, spelled out one by one from the description of the formats."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters

Tensors = dict[str, np.ndarray]

CONFIG = InklingConfig(
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    local_num_heads=6,
    local_num_kv_heads=3,
    local_head_dim=2,
    window=5,
    rel_dim=3,
    rel_extent=7,
    local_layers=(0, 2),
    dense_layers=(0,),
    dense_size=10,
    expert_size=6,
    num_experts=5,
    num_shared_experts=2,
    experts_per_token=2,
    route_scale=2.0,
    vocab_size=40,
    real_vocab_size=33,
    logits_divisor=2.0,
    norm_eps=1e-6,
    log_scaling_floor=64,
    log_scaling_alpha=0.1,
    conv_width=4,
    max_context=256,
    eos_token_ids=(1,),
    mtp_depths=2,
    mtp_local=(1,),
    chain_norm=True,
)
ABSTRACT = abstract_parameters(CONFIG)
# The same with widths that are whole blocks of 4-bit weights.
WIDE = replace(CONFIG, hidden_size=32, expert_size=64)


def random_parameters(seed: int = 0, config: InklingConfig = CONFIG) -> Tensors:
    """Every parameter by dotted path, in the dtype it has in a checkpoint, no two alike."""
    rng = np.random.default_rng(seed)
    params = {path: rng.normal(size=x.shape).astype(x.dtype) for path, x in abstract_parameters(config).items()}
    params["unembed.weight"][CONFIG.real_vocab_size :] = 0
    return params


def _interleave(w13: np.ndarray) -> np.ndarray:
    """[.., 2, F, H] to rows gate 0, up 0, gate 1, up 1, ..."""
    rows = [w13[..., kind, row, :] for row in range(w13.shape[-2]) for kind in (0, 1)]
    return np.stack(rows, axis=-2)


def _layers(params: Tensors) -> Iterator[tuple[str, str, str, bool]]:
    """Of each decoder layer: its prefix in paths, in the original and the other layout, and whether it is dense."""
    for i in range(CONFIG.num_layers):
        yield f"layers.{i}.", f"model.llm.layers.{i}.", f"layers.{i}.", CONFIG.is_dense(i)
    for d in range(CONFIG.mtp_depths):
        yield f"mtp.{d}.layer.", f"model.mtp.layers.{d}.transformer_block.", f"mtp.layers.{d}.mtp_block.", True


def original(params: Tensors) -> Tensors:
    """The tensors of the original layout."""
    out = {
        "model.llm.embed.weight": params["embed.weight"],
        "model.llm.embed_norm.weight": params["embed.norm.weight"],
        "model.llm.norm.weight": params["norm.weight"],
        "model.llm.unembed.weight": params["unembed.weight"],
        "model.mtp.chain_norm.weight": params["mtp_chain_norm.weight"],
    }
    for d in range(CONFIG.mtp_depths):
        for ours, theirs in (("hidden_norm", "hidden_norm"), ("embed_norm", "embed_norm"), ("proj", "input_proj")):
            out[f"model.mtp.layers.{d}.{theirs}.weight"] = params[f"mtp.{d}.{ours}.weight"]
    for ours, theirs, _, dense in _layers(params):
        for name in ("attn_norm", "mlp_norm", "attn.q_norm", "attn.k_norm"):
            out[f"{theirs}{name}.weight"] = params[f"{ours}{name}.weight"]
        for short, long in (("wq", "wq_du"), ("wk", "wk_dv"), ("wv", "wv_dv"), ("wr", "wr_du"), ("wo", "wo_ud")):
            out[f"{theirs}attn.{long}.weight"] = params[f"{ours}attn.{short}.weight"]
        for name in ("attn.k_", "attn.v_", "attn_", "mlp_"):
            out[f"{theirs}{name}sconv.weight"] = params[f"{ours}{name}conv.weight"].reshape(-1, 1, 4)
        out[f"{theirs}attn.rel_logits_proj.proj"] = params[f"{ours}attn.rel_proj"].T
        if dense:
            out[f"{theirs}mlp.w13_dn.weight"] = _interleave(params[f"{ours}mlp.w13"])
            out[f"{theirs}mlp.w2_md.weight"] = params[f"{ours}mlp.w2"]
            out[f"{theirs}mlp.global_scale"] = params[f"{ours}mlp.scale"]
            continue
        out[f"{theirs}mlp.gate.weight"] = params[f"{ours}mlp.router.weight"]
        out[f"{theirs}mlp.gate.bias"] = params[f"{ours}mlp.router.bias"]
        out[f"{theirs}mlp.gate.global_scale"] = params[f"{ours}mlp.router.scale"]
        out[f"{theirs}mlp.experts.w13_weight"] = _interleave(params[f"{ours}mlp.experts.w13"])
        out[f"{theirs}mlp.experts.w2_weight"] = params[f"{ours}mlp.experts.w2"]
        out[f"{theirs}mlp.shared_experts.shared_w13_weight"] = _interleave(params[f"{ours}mlp.shared.w13"])
        out[f"{theirs}mlp.shared_experts.shared_w2_weight"] = params[f"{ours}mlp.shared.w2"]
    return {name: np.ascontiguousarray(array) for name, array in out.items()}


def transformers(params: Tensors, text_only: bool = False) -> Tensors:
    """The tensors of transformers' layout, of a text-only or a multimodal model."""
    text = "model." if text_only else "model.language_model."
    out = {
        f"{text}embed_tokens.weight": params["embed.weight"],
        f"{text}embed_tokens.embed_norm.weight": params["embed.norm.weight"],
        f"{text}norm.weight": params["norm.weight"],
        "lm_head.weight": params["unembed.weight"],
        "model.mtp.shared_post_norm.weight": params["mtp_chain_norm.weight"],
    }
    for d in range(CONFIG.mtp_depths):
        for ours, theirs in (("hidden_norm", "hnorm"), ("embed_norm", "enorm"), ("proj", "eh_proj")):
            out[f"model.mtp.layers.{d}.{theirs}.weight"] = params[f"mtp.{d}.{ours}.weight"]
    for ours, _, suffix, dense in _layers(params):
        theirs = f"model.{suffix}" if suffix.startswith("mtp.") else f"{text}{suffix}"
        out[f"{theirs}input_layernorm.weight"] = params[f"{ours}attn_norm.weight"]
        out[f"{theirs}post_attention_layernorm.weight"] = params[f"{ours}mlp_norm.weight"]
        for letter in "qkvro":
            out[f"{theirs}self_attn.{letter}_proj.weight"] = params[f"{ours}attn.w{letter}.weight"]
        for letter in "qk":
            out[f"{theirs}self_attn.{letter}_norm.weight"] = params[f"{ours}attn.{letter}_norm.weight"]
        for letter in "kv":
            taps = params[f"{ours}attn.{letter}_conv.weight"]
            out[f"{theirs}self_attn.{letter}_sconv.conv1d.weight"] = taps.reshape(-1, 1, 4)
        for stream in ("attn", "mlp"):
            taps = params[f"{ours}{stream}_conv.weight"]
            out[f"{theirs}{stream}_sconv.conv1d.weight"] = taps.reshape(-1, 1, 4)
        out[f"{theirs}self_attn.rel_logits_proj.proj"] = params[f"{ours}attn.rel_proj"].T
        if dense:
            out[f"{theirs}mlp.gate_proj.weight"], out[f"{theirs}mlp.up_proj.weight"] = params[f"{ours}mlp.w13"]
            out[f"{theirs}mlp.down_proj.weight"] = params[f"{ours}mlp.w2"]
            out[f"{theirs}mlp.global_scale"] = params[f"{ours}mlp.scale"]
            continue
        out[f"{theirs}mlp.gate.weight"] = params[f"{ours}mlp.router.weight"]
        out[f"{theirs}mlp.gate.e_score_correction_bias"] = params[f"{ours}mlp.router.bias"]
        out[f"{theirs}mlp.gate.global_scale"] = params[f"{ours}mlp.router.scale"]
        w13 = params[f"{ours}mlp.experts.w13"]
        out[f"{theirs}mlp.experts.gate_up_proj"] = np.concatenate([w13[:, 0], w13[:, 1]], axis=1)
        out[f"{theirs}mlp.experts.down_proj"] = params[f"{ours}mlp.experts.w2"]
        out[f"{theirs}mlp.shared_experts.gate_proj"] = params[f"{ours}mlp.shared.w13"][:, 0]
        out[f"{theirs}mlp.shared_experts.up_proj"] = params[f"{ours}mlp.shared.w13"][:, 1]
        out[f"{theirs}mlp.shared_experts.down_proj"] = params[f"{ours}mlp.shared.w2"]
    return {name: np.ascontiguousarray(array) for name, array in out.items()}


def towers() -> tuple[Tensors, Tensors]:
    """The tensors of small vision and audio towers, in the original and in transformers' names."""
    rng = np.random.default_rng(7)
    pairs = {
        "model.audio.encoder.weight": "model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight",
        "model.audio.final_norm.weight": "model.audio_tower.norm.weight",
        "model.visual.final_norm.weight": "model.vision_tower.final_norm.weight",
    }
    for i in range(4):
        pairs[f"model.visual.layers.linear_{i}.weight"] = f"model.vision_tower.encoder_layers.{i}.projection.weight"
    for i in range(3):
        pairs[f"model.visual.layers.norm_{i}.weight"] = f"model.vision_tower.encoder_layers.{i}.layer_norm.weight"
    arrays = {name: rng.normal(size=(3, 2)).astype(ml_dtypes.bfloat16) for name in pairs}
    return arrays, {pairs[name]: array for name, array in arrays.items()}


def nested_config(layout: str) -> dict[str, Any]:
    """The config of a multimodal model in either spelling."""
    raw = CONFIG.to_dict(layout)  # type: ignore[arg-type]
    if layout == "transformers":
        raw = {"model_type": "inkling_mm_model", "text_config": raw}
    return raw | {"audio_config": {"n_mel_bins": 80}, "vision_config": {"patch_size": 40}, "image_token_id": 5}


def write(
    directory: Path, tensors: Tensors, raw: dict[str, Any] | None = None, shards: int = 0, mtp_file=False
) -> Path:
    """A checkpoint of one file, or of numbered shards with an index; `mtp_file` gives the depths one of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw or CONFIG.to_dict("original")))
    if mtp_file:
        save_file({name: tensors[name] for name in tensors if ".mtp." in name}, directory / "mtp.safetensors")
        tensors = {name: array for name, array in tensors.items() if ".mtp." not in name}
    if not shards:
        save_file(tensors, directory / "model.safetensors")
        return directory
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in list(tensors)[i::shards]}, directory / file)
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def read(directory: Path) -> Tensors:
    """Every tensor in the files of a directory, by the library's own reader."""
    found: Tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as handle:
            for name in handle.keys():  # noqa: SIM118
                assert name not in found
                found[name] = handle.get_tensor(name)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two mappings hold the same arrays: names, dtypes, shapes and bytes."""
    if one.keys() != other.keys():
        return False
    pairs = [(np.asarray(one[name]), np.asarray(other[name])) for name in one]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)
