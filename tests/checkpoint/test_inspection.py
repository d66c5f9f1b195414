"""What `inspect` says of a checkpoint, and of a config alone."""

import json
from pathlib import Path

import pytest

from inkling_jax.checkpoint import PartSize, inspect
from inkling_jax.config import InklingConfig

from . import tiny

PARAMS = tiny.random_parameters()
SIZE = sum(array.size for array in PARAMS.values())
BYTES = sum(array.nbytes for array in PARAMS.values())


def test_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG.to_dict("transformers")))
    for path in (tmp_path, tmp_path / "config.json"):
        found = inspect(path)
        assert found.layout is None and found.fits and found.config == tiny.CONFIG
        assert found.total == PartSize(SIZE, BYTES)
        assert found.layers == [("local", "dense"), ("global", "experts"), ("local", "experts")]
        assert found.depths == [("global", "dense"), ("local", "dense")]


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_weights(tmp_path: Path, layout: str) -> None:
    tensors = tiny.original(PARAMS) if layout == "original" else tiny.transformers(PARAMS)
    towers = tiny.towers()[layout == "transformers"]
    found = inspect(tiny.write(tmp_path / "model", tensors | towers, tiny.nested_config(layout), shards=2))
    assert found.layout == layout and found.fits
    assert found.parts.pop("towers (not loaded)") == PartSize(60, 120)
    assert found.total == PartSize(SIZE, BYTES)
    moe = [i for i in range(3) if not tiny.CONFIG.is_dense(i)]
    assert found.dtypes == {"F32": 2 * len(moe), "BF16": len(tensors) + len(towers) - 2 * len(moe)}
    assert inspect(tmp_path / "model" / "config.json").parts == found.parts


def test_parts_are_those_of_the_shapes(tmp_path: Path) -> None:
    parts = inspect(tiny.write(tmp_path / "model", tiny.original(PARAMS))).parts
    h, f, e, s = 12, 6, 5, 2
    assert parts["embedding"].parameters == parts["unembedding"].parameters == 40 * h
    assert parts["experts"] == PartSize(2 * 3 * e * f * h, 2 * 2 * 3 * e * f * h)
    assert parts["shared experts"].parameters == 2 * 3 * s * f * h
    assert parts["router"] == PartSize(2 * ((e + s) * h + e + 1), 2 * (2 * (e + s) * h + 4 * (e + 1)))
    assert parts["dense mlp"].parameters == 3 * 10 * h + 1
    local, world = 6 * 2, 4 * 4
    attention = 2 * (2 * local * h + 2 * 3 * 2 * h + 6 * 3 * h + 3 * 5) + (
        2 * world * h + 2 * 2 * 4 * h + 4 * 3 * h + 3 * 7
    )
    assert parts["attention"].parameters == attention
    assert parts["mtp"].parameters == sum(array.size for path, array in PARAMS.items() if path.startswith("mtp"))


def test_misfits_are_listed(tmp_path: Path) -> None:
    tensors = tiny.original(PARAMS)
    del tensors["model.llm.norm.weight"]
    tensors["model.llm.other"] = tensors["model.llm.embed_norm.weight"]
    tensors["model.llm.embed_norm.weight"] = tensors["model.llm.embed_norm.weight"][:-1].copy()
    found = inspect(tiny.write(tmp_path / "model", tensors))
    assert not found.fits
    assert found.missing == ["model.llm.norm.weight"] and found.unexpected == ["model.llm.other"]
    assert found.misshapen == ["model.llm.embed_norm.weight: [11] in model.safetensors, expected [12]"]


def test_plain_data(tmp_path: Path) -> None:
    found = inspect(tiny.write(tmp_path / "model", tiny.original(PARAMS)))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["total"] == {"parameters": SIZE, "bytes": BYTES} and data["fits"] is True
    assert data["config"]["hidden_size"] == 12 and data["layers"][0] == ["local", "dense"]


def test_a_published_config_without_weights(tmp_path: Path) -> None:
    raw = InklingConfig.from_name("inkling-small").to_dict("original")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = inspect(tmp_path)
    assert found.total.parameters == 265_956_439_090 - 69_327_360  # without the towers
    assert found.parts["experts"].parameters == 40 * 256 * 3 * 2048 * 4096
