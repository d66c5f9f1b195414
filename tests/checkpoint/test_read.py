"""Both layouts, in any arrangement of files, load to identical arrays."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from inkling_jax.checkpoint import files as files_module
from inkling_jax.checkpoint import load_parameters
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters

from . import tiny

PARAMS = tiny.random_parameters()


def tensors(layout: str) -> tiny.Tensors:
    if layout == "original":
        return tiny.original(PARAMS)
    return tiny.transformers(PARAMS, text_only=layout == "text-only")


def load(directory: Path) -> dict[str, Any]:
    return load_parameters(directory, InklingConfig.from_path(directory), tiny.ABSTRACT, progress=False)


@pytest.mark.parametrize("mtp_file", [False, True], ids=["indexed", "mtp.safetensors"])
@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("layout", ["original", "transformers", "text-only"])
def test_layouts_load_to_identical_arrays(tmp_path: Path, layout: str, shards: int, mtp_file: bool) -> None:
    raw = tiny.CONFIG.to_dict("transformers") if layout == "text-only" else tiny.nested_config(layout)
    directory = tiny.write(tmp_path / "model", tensors(layout), raw, shards, mtp_file)
    loaded = load(directory)
    assert all(isinstance(array, jax.Array) for array in loaded.values())
    assert tiny.same(loaded, PARAMS)


def test_depths_in_the_other_layout(tmp_path: Path) -> None:
    """transformers leaves the depths behind; the original file put beside its shards completes the model."""
    backbone = {name: array for name, array in tensors("transformers").items() if ".mtp." not in name}
    depths = {name: array for name, array in tensors("original").items() if ".mtp." in name}
    directory = tiny.write(tmp_path / "model", backbone | depths, tiny.nested_config("transformers"), 2, mtp_file=True)
    assert tiny.same(load(directory), PARAMS)


@pytest.mark.parametrize("layout", ["original", "text-only"])
@pytest.mark.parametrize("piece", [1, 100, 10**9])
def test_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, piece: int) -> None:
    monkeypatch.setattr(files_module, "_PIECE_BYTES", piece)
    assert tiny.same(load(tiny.write(tmp_path / "model", tensors(layout))), PARAMS)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_converted(tmp_path: Path, stored: Any, wanted: str) -> None:
    source = {name: array.astype(stored) for name, array in PARAMS.items()}
    directory = tiny.write(tmp_path / "model", tiny.original(source))
    abstract = abstract_parameters(tiny.CONFIG, wanted)
    loaded = load_parameters(directory, tiny.CONFIG, abstract, progress=False)
    assert tiny.same(loaded, {path: source[path].astype(spec.dtype) for path, spec in abstract.items()})
    assert loaded["layers.1.mlp.router.bias"].dtype == np.float32


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_unembedding_without_padding(tmp_path: Path, layout: str) -> None:
    found = tensors(layout)
    name = "lm_head.weight" if layout == "transformers" else "model.llm.unembed.weight"
    found[name] = found[name][: tiny.CONFIG.real_vocab_size].copy()
    assert tiny.same(load(tiny.write(tmp_path / "model", found)), PARAMS)


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_towers_are_left_out_with_one_line(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    extra = tiny.towers()[layout == "transformers"]
    directory = tiny.write(tmp_path / "model", tensors(layout) | extra, tiny.nested_config(layout))
    with caplog.at_level(logging.WARNING, "inkling_jax"):
        assert tiny.same(load(directory), PARAMS)
    [record] = caplog.records
    assert "10 tensors of the vision and audio towers" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_no_line_without_towers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tiny.write(tmp_path / "model", tensors("original")))
    assert not caplog.records


def test_the_index_decides_between_two_copies(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", tensors("original"), shards=2)
    stale = {name: array + 1 for name, array in tensors("original").items() if ".mtp." in name}
    save_file(stale, directory / "mtp.safetensors")
    assert tiny.same(load(directory), PARAMS)


def test_files_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", tensors("original"), shards=2)
    (directory / "consolidated.safetensors").write_bytes(b"not one")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert tiny.same(load(directory), PARAMS)


def test_arrays_go_to_the_place_that_is_asked_for(tmp_path: Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place) for path, spec in tiny.ABSTRACT.items()
    }
    loaded = load_parameters(tiny.write(tmp_path / "m", tensors("original")), tiny.CONFIG, abstract, progress=False)
    assert all(array.sharding == place for array in loaded.values())


def test_index_names_are_confined_to_the_directory(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path / "model", tensors("original"), shards=1)
    for file in ("../model.safetensors", "/etc/model.safetensors", "model.bin"):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(ValueError, match=r"index.json: weight_map names .*expected a safetensors file beside"):
            load(directory)
