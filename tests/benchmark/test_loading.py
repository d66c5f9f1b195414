"""The measurement of loading: what it writes, that it checks what is loaded, and what it counts."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from inkling_jax.benchmark import loading
from inkling_jax.checkpoint import CheckpointError
from inkling_jax.config import InklingConfig
from inkling_jax.quantization import Quantization
from tests import reference

CONFIG = replace(reference.BASE, hidden_size=64, expert_size=64)
PACKED = Quantization("nvfp4", (1, 2))


def test_three_layers_of_the_published_widths():
    config = loading.cut(InklingConfig.from_name("inkling-small"), 3)
    assert [(config.is_dense(i), config.is_local(i)) for i in range(3)] == [(True, True), (False, True), (False, False)]
    assert (config.num_experts, config.hidden_size, config.mtp_depths) == (256, 4096, 0)
    with pytest.raises(ValueError, match="layers: expected 2 to 42, found 1"):
        loading.cut(InklingConfig.from_name("inkling-small"), 1)


@pytest.mark.slow
def test_a_checkpoint_is_written_and_loaded_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("inkling_jax.model.enable_cache", lambda: None)
    config = loading.cut(CONFIG, 3)
    report = loading.loading(tmp_path / "new", config, PACKED, {"tensor": 2}, file_bytes=100_000)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == report["files"] > 1
    assert index.keys() >= {f"model.llm.layers.2.mlp.experts.{w}_weight.scale2" for w in ("w13", "w2")}
    assert [row["cold"] for row in report["loads"]] == [True, False]
    assert report["loads"][0]["bytes_per_second"] * report["loads"][0]["seconds"] == pytest.approx(report["bytes"])
    assert report["bytes_on_a_device"] < 0.8 * report["bytes"] < report["bytes"]
    assert 0 < report["disk_bytes_per_second"] < 1e12


def test_a_directory_that_is_taken_is_told_before_anything_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "random_parameters", None)
    (tmp_path / "other").touch()
    with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
        loading.loading(tmp_path, loading.cut(CONFIG, 3), PACKED)


def test_what_differs_is_told():
    one = {"a": jnp.ones(3), "b": jnp.zeros(2)}
    loading._compare(dict(one), one)
    with pytest.raises(RuntimeError, match="not what was written: b"):
        loading._compare(one | {"b": jnp.array([0.0, 1e-9])}, one)
