"""Checkpoints in 4 bits, written by hand from the description of the formats, and the weights that they stand for."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import tiny

Tensors = tiny.Tensors

LAYER = 2  # the second of two with routed experts; the first stays bf16
EXPERTS = f"model.llm.layers.{LAYER}.mlp.experts."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
FIRST = "model.llm.layers.1.mlp.experts"  # what is left out of quantisation by its exact name
OTHERS = [r"re:.*\.attn\..*", "re:model.llm.(un)?embed", r"re:.*shared_experts.*", "model.mtp", "lm_head"]

METADATA: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": [FIRST, *OTHERS]},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": [FIRST, *OTHERS],
    },
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
        "exclude": [r"re:model\.llm\.layers\.1\.mlp\..*", *OTHERS],
    },
}
FORMATS = {"modelopt": "nvfp4", "compressed": "nvfp4", "quark": "mxfp4"}


@dataclass(frozen=True)
class Handmade:
    """The tensors of a checkpoint, and its parameters unpacked, float32 where they were packed."""

    tensors: Tensors
    params: dict[str, np.ndarray]
    raw: dict[str, Any]


def make(spelling: str, seed: int = 0) -> Handmade:
    """A checkpoint in one of the spellings, every code and every scale at random."""
    rng = np.random.default_rng(seed)
    params: dict[str, np.ndarray] = dict(tiny.random_parameters(config=tiny.WIDE))
    tensors = tiny.original(params)
    e, h, f = tiny.WIDE.num_experts, tiny.WIDE.hidden_size, tiny.WIDE.expert_size
    for name, rows, width in (("w13", 2 * f, h), ("w2", h, f)):
        del tensors[f"{EXPERTS}{name}_weight"]
        codes = rng.integers(0, 256, (e, rows, width // 2), np.uint8)
        pack = _quark if spelling == "quark" else _modelopt if spelling == "modelopt" else _compressed
        added, scales = pack(f"{EXPERTS}{name}", codes, width, rng)
        tensors |= added
        weights = np.float32(_values(codes) * scales[0]) * scales[1]
        if name == "w13":  # rows gate 0, up 0, gate 1, up 1, ...
            weights = np.stack([weights[:, 0::2], weights[:, 1::2]], axis=1)
        params[f"layers.{LAYER}.mlp.experts.{name}"] = weights
    raw = tiny.WIDE.to_dict("original") | {"quantization_config": METADATA[spelling]}
    return Handmade(tensors, params, raw)


def _values(codes: np.ndarray) -> np.ndarray:
    """Two a byte along the input, the low nibble first."""
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)


def _float8(codes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Block scales [.., in/16], and for every weight its own."""
    bits = rng.integers(0, 0x7F, (*codes.shape[:2], codes.shape[2] // 8), np.uint8)
    scale = bits.view(ml_dtypes.float8_e4m3fn)
    return scale, np.repeat(scale.astype(np.float64), 16, axis=-1)


def _modelopt(stem: str, codes: np.ndarray, width: int, rng: np.random.Generator) -> tuple[Tensors, Any]:
    scale, each = _float8(codes, rng)
    expert = rng.uniform(1e-4, 1e-2, len(codes)).astype(np.float32)
    name = f"{stem}_weight"
    tensors = {
        name: codes,
        f"{name}.scale": scale,
        f"{name}.scale2": expert,
        f"{name}.input_amax": np.ones(1, np.float32),
        f"{name}.original_shape": np.array([*codes.shape[:2], width], np.int64),
    }
    return tensors, (each, expert[:, None, None])


def _compressed(stem: str, codes: np.ndarray, width: int, rng: np.random.Generator) -> tuple[Tensors, Any]:
    scale, each = _float8(codes, rng)
    divisor = rng.uniform(1e2, 1e4, (len(codes), 1)).astype(np.float32)
    tensors = {
        f"{stem}.weight_packed": codes,
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_global_scale": divisor,
        f"{stem}.input_global_scale": np.ones((len(codes), 1), np.float32),
    }
    return tensors, (each, (np.float32(1) / divisor)[:, :, None])


def _quark(stem: str, codes: np.ndarray, width: int, rng: np.random.Generator) -> tuple[Tensors, Any]:
    bits = rng.integers(100, 130, (codes.shape[0] * codes.shape[1], width // 32), np.uint8)
    each = np.repeat(2.0 ** (bits.astype(int) - 127), 32, axis=-1).reshape(*codes.shape[:2], width)
    return {f"{stem}_weight": codes, f"{stem}_weight_scale": bits}, (each, np.float32(1))
