"""Reads the golden folders, by a mapping of names of its own: the package's table of names is under test elsewhere."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from inkling_jax.config import InklingConfig

HERE = Path(__file__).parent
NAMES = sorted(path.parent.name for path in HERE.glob("*/config.json"))

RENAMED = {
    "model.embed_tokens.weight": "embed.weight",
    "model.embed_tokens.embed_norm.weight": "embed.norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "unembed.weight",
    "model.mtp.shared_post_norm.weight": "mtp_chain_norm.weight",
}
PARTS = {
    "model.mtp.layers.": "mtp.",
    "model.layers.": "layers.",
    ".mtp_block.": ".layer.",
    ".hnorm.": ".hidden_norm.",
    ".enorm.": ".embed_norm.",
    ".eh_proj.": ".proj.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".self_attn.": ".attn.",
    ".q_proj.": ".wq.",
    ".k_proj.": ".wk.",
    ".v_proj.": ".wv.",
    ".r_proj.": ".wr.",
    ".o_proj.": ".wo.",
    ".rel_logits_proj.proj": ".rel_proj",
    "_sconv.conv1d.": "_conv.",
    ".mlp.gate.": ".mlp.router.",
    ".e_score_correction_bias": ".bias",
    ".global_scale": ".scale",
    ".shared_experts.": ".shared.",
}


def folder(name: str) -> Path:
    return HERE / name


def read(name: str) -> tuple[InklingConfig, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The config, the parameters by dotted path, and what transformers computed (`tokens`, `logits`, `depth_d`)."""
    raw = load_file(folder(name) / "model.safetensors")
    with np.load(folder(name) / "expected.npz") as expected:
        found = dict(expected)
    config = InklingConfig.from_dict(json.loads((folder(name) / "config.json").read_text()))
    return config, joined({path_of(key): array for key, array in raw.items()}), found


def path_of(name: str) -> str:
    if name in RENAMED:
        return RENAMED[name]
    for old, new in PARTS.items():
        name = name.replace(old, new)
    return name


def joined(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate and up become one array with an axis of two; the middle axis of convolution weights goes; rel_proj turns."""
    out = {}
    for path, array in params.items():
        stem, _, last = path.removesuffix(".weight").rpartition(".")
        if last == "gate_proj":
            up = params[path.replace("gate_proj", "up_proj")]
            out[f"{stem}.w13"] = np.stack([array, up], axis=-3)
        elif last == "gate_up_proj":
            experts, rows, hidden = array.shape
            out[f"{stem}.w13"] = array.reshape(experts, 2, rows // 2, hidden)
        elif last == "down_proj":
            out[f"{stem}.w2"] = array
        elif last == "rel_proj":
            out[path] = array.T
        elif last.endswith("_conv"):
            out[path] = array[:, 0, :]
        elif last != "up_proj":
            out[path] = array
    return out
