"""Conversion changes names and order, never a byte, and takes along what is not the model's."""

import json
from pathlib import Path

import numpy as np
import pytest

from inkling_jax.checkpoint import convert
from inkling_jax.config import InklingConfig, Layout

from . import tiny

PARAMS = tiny.random_parameters()


def complete(layout: Layout) -> tiny.Tensors:
    """A multimodal checkpoint's tensors."""
    return (tiny.original(PARAMS) if layout == "original" else tiny.transformers(PARAMS)) | tiny.towers()[
        layout == "transformers"
    ]


@pytest.mark.parametrize("target", ["original", "transformers"])
@pytest.mark.parametrize("source", ["original", "transformers"])
def test_with_towers(tmp_path: Path, source: Layout, target: Layout) -> None:
    src = tiny.write(tmp_path / "src", complete(source), tiny.nested_config(source), shards=3, mtp_file=True)
    convert(src, tmp_path / "dst", target, progress=False)
    assert tiny.same(tiny.read(tmp_path / "dst"), complete(target))
    raw = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert raw["audio_config"] == {"n_mel_bins": 80} and raw["vision_config"] == {"patch_size": 40}
    assert raw["image_token_id"] == 5 and raw["model_type"] == "inkling_mm_model"
    assert InklingConfig.from_dict(raw) == tiny.CONFIG


def test_text_only(tmp_path: Path) -> None:
    src = tiny.write(tmp_path / "src", tiny.original(PARAMS))
    convert(src, tmp_path / "dst", "transformers", progress=False)
    assert tiny.same(tiny.read(tmp_path / "dst"), tiny.transformers(PARAMS, text_only=True))
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["model_type"] == "inkling_text"
    convert(tmp_path / "dst", tmp_path / "back", "original", progress=False)
    assert tiny.same(tiny.read(tmp_path / "back"), tiny.original(PARAMS))
    assert InklingConfig.from_path(tmp_path / "back") == tiny.CONFIG


def test_unpadded_head_and_float32_convolutions_stay_so(tmp_path: Path) -> None:
    tensors = tiny.original(PARAMS)
    tensors["model.llm.unembed.weight"] = tensors["model.llm.unembed.weight"][:33].copy()
    tensors |= {name: array.astype(np.float32) for name, array in tensors.items() if "sconv" in name}
    src = tiny.write(tmp_path / "src", tensors)
    convert(src, tmp_path / "dst", "transformers", progress=False)
    assert tiny.read(tmp_path / "dst")["lm_head.weight"].shape == (33, 12)
    convert(tmp_path / "dst", tmp_path / "back", "original", progress=False)
    assert tiny.same(tiny.read(tmp_path / "back"), tensors)


def test_small_files_come_along_and_code_does_not(tmp_path: Path) -> None:
    src = tiny.write(tmp_path / "src", tiny.original(PARAMS), shards=2)
    kept = ["LICENSE", "README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in [*kept, "modeling.py", "weights.bin", "training_args.pt"]:
        (src / name).write_text(name)
    convert(src, tmp_path / "dst", "transformers", progress=False)
    others = sorted(path.name for path in (tmp_path / "dst").iterdir() if path.suffix != ".safetensors")
    assert others == sorted([*kept, "config.json", "model.safetensors.index.json"])
    assert all((tmp_path / "dst" / name).read_text() == name for name in kept)
