"""Every fault of a checkpoint is named, all of one kind at once, before any array is made."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from inkling_jax.checkpoint import CheckpointError, convert, inspect, load_parameters

from . import tiny

PARAMS = tiny.random_parameters()
INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors() -> tiny.Tensors:
    return tiny.original(PARAMS)


def failure(directory: Path) -> str:
    """What loading says; conversion must say the same and leave nothing behind."""
    with pytest.raises(CheckpointError) as caught:
        load_parameters(directory, tiny.CONFIG, tiny.ABSTRACT, progress=False)
    with pytest.raises(CheckpointError) as again:
        convert(directory, directory.parent / "converted", "transformers", progress=False)
    assert str(again.value) == str(caught.value)
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    return str(caught.value)


def test_no_weights(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG.to_dict("original")))
    assert failure(directory) == f"{directory}: no safetensors files"


def test_no_config(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors)
    (directory / "config.json").unlink()
    for act in (lambda: convert(directory, tmp_path / "converted", "original"), lambda: inspect(directory)):
        with pytest.raises(CheckpointError, match=r"config.json: no such file"):
            act()
    assert not (tmp_path / "converted").exists()


def test_broken_config(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors)
    (directory / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
        inspect(directory)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_broken_index(tmp_path: Path, tensors: tiny.Tensors, text: str) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=2)
    (directory / INDEX).write_text(text)
    assert failure(directory).startswith(f"{directory / INDEX}: ")


def test_missing_and_truncated_shards_are_listed_together(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=4)
    first, second, third, _ = sorted(directory.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(b"")
    lines = failure(directory).splitlines()
    assert len(lines) == 3
    assert lines[0] == f"{first}: no such file"
    assert lines[1].startswith(f"{second}: truncated, or not a safetensors file")
    assert lines[2].startswith(f"{third}: truncated, or not a safetensors file")


@pytest.mark.parametrize("keep", [0, 7, 8, 50, 1000])
def test_truncated_single_file(tmp_path: Path, tensors: tiny.Tensors, keep: int) -> None:
    directory = tiny.write(tmp_path / "model", tensors)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert failure(directory).startswith(f"{file}: truncated")


def test_truncated_mtp_file(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=1, mtp_file=True)
    (directory / "mtp.safetensors").write_bytes(b"12345678")
    assert failure(directory).startswith(f"{directory / 'mtp.safetensors'}: truncated")


def test_directory_in_place_of_a_shard(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=1)
    [file] = directory.glob("*.safetensors")
    file.unlink()
    file.mkdir()
    assert str(file) in failure(directory)


def test_index_names_tensors_the_file_lacks(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=2)
    index = json.loads((directory / INDEX).read_text())
    shard = "model-00001-of-00002.safetensors"
    index["weight_map"] |= {"model.llm.extra.weight": shard, "model.llm.more.weight": shard}
    (directory / INDEX).write_text(json.dumps(index))
    message = failure(directory)
    for name in ("model.llm.extra.weight", "model.llm.more.weight"):
        assert f"{directory / shard}: lacks {name}, which {INDEX} places there" in message


def test_two_copies_without_an_index(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors)
    save_file({"model.llm.norm.weight": tensors["model.llm.norm.weight"]}, directory / "other.safetensors")
    assert "other.safetensors: holds model.llm.norm.weight, which model.safetensors holds too" in failure(directory)


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_missing_unexpected_and_misshapen_are_listed_together(tmp_path: Path, layout: str) -> None:
    tensors = tiny.original(PARAMS) if layout == "original" else tiny.transformers(PARAMS)
    norms = [name for name in tensors if name.endswith("q_norm.weight")]
    experts = [name for name in tensors if ".experts." in name]
    for name in norms:
        del tensors[name]
    for name in experts:
        tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    extra = ["model.llm.layers.9.attn_norm.weight", "model.llm.layers.9.mlp.global_scale", "rope.inv_freq"]
    tensors |= {name: np.zeros(3, np.float32) for name in extra}
    message = failure(tiny.write(tmp_path / "model", tensors))
    assert f"not the model that config.json describes ({layout} layout)" in message
    assert f"  {len(norms)} missing tensors:\n" in message
    assert "  3 unexpected tensors:\n" in message
    assert f"  {len(experts)} tensors of the wrong shape:\n" in message
    for name in norms + extra:
        assert f"    {name}" in message.splitlines()
    for name in experts:
        found = list(tensors[name].shape)
        assert (
            f"    {name}: {found} in model.safetensors, expected {[found[0] + 1, *found[1:]]}" in message.splitlines()
        )
    assert "quantised" not in message


def test_half_of_a_pair(tmp_path: Path) -> None:
    tensors = tiny.transformers(PARAMS)
    del tensors["model.language_model.layers.0.mlp.up_proj.weight"]
    message = failure(tiny.write(tmp_path / "model", tensors))
    assert "1 missing tensors:\n    model.language_model.layers.0.mlp.up_proj.weight" in message
    assert "unexpected" not in message and "wrong shape" not in message


def test_the_same_parameter_in_both_layouts(tmp_path: Path, tensors: tiny.Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.llm.unembed.weight"]
    assert "1 unexpected tensors:\n    lm_head.weight" in failure(tiny.write(tmp_path / "model", tensors))


def test_gate_and_up_as_one_axis_short(tmp_path: Path, tensors: tiny.Tensors) -> None:
    """Right number of elements, wrong shape: never reshaped into place."""
    name = "model.llm.layers.0.mlp.w13_dn.weight"
    tensors[name] = tensors[name].reshape(2, 10, 12)
    assert f"{name}: [2, 10, 12] in model.safetensors, expected [20, 12]" in failure(
        tiny.write(tmp_path / "m", tensors)
    )


def test_missing_depths_say_where_they_may_be(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors, shards=1, mtp_file=True)
    (directory / "mtp.safetensors").unlink()
    message = failure(directory)
    assert "model.mtp.layers.1.input_proj.weight" in message
    assert "Only MTP tensors are missing" in message


@pytest.mark.parametrize("nested", [False, True])
def test_quantisation_in_the_config(tmp_path: Path, tensors: tiny.Tensors, nested: bool) -> None:
    raw = tiny.CONFIG.to_dict("original")
    (raw["text_config"] if nested else raw)["quantization_config"] = {"quant_method": "quark"}
    message = failure(tiny.write(tmp_path / "model", tensors, raw))
    what = "says that the weights are quantised by quark, but no routed experts are packed"
    assert f"config.json: quantization_config {what}" in message


def test_quantisation_in_a_file_of_its_own(tmp_path: Path, tensors: tiny.Tensors) -> None:
    directory = tiny.write(tmp_path / "model", tensors)
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "hf_quant_config.json: quantization says that the weights are quantised by NVFP4" in failure(directory)


def test_unreadable_dtype(tmp_path: Path, tensors: tiny.Tensors) -> None:
    tensors["model.llm.norm.weight"] = tensors["model.llm.norm.weight"].astype(np.float64)
    assert "model.llm.norm.weight (F64)" in failure(tiny.write(tmp_path / "model", tensors))
