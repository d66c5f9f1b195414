"""Checkpoints in 4 bits load to the right values, packed and unpacked; whatever is wrong with one is named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from inkling_jax.checkpoint import CheckpointError, convert, find_quantization, inspect, load_parameters
from inkling_jax.checkpoint.metadata import Metadata
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Quantization
from pallas_kernels.fp4 import FP4, dequantize

from . import handmade, tiny
from .handmade import EXPERTS, LAYER

SPELLINGS = ("modelopt", "compressed", "quark")


def load(directory: Path, dtype: str = "float32", keep: bool = False) -> dict[str, jax.Array]:
    quantization = find_quantization(directory, tiny.WIDE) if keep else None
    abstract = abstract_parameters(tiny.WIDE, dtype, quantization)
    return load_parameters(directory, tiny.WIDE, abstract, progress=False)


def unpacked(params: dict[str, jax.Array], format: str) -> dict[str, np.ndarray]:
    """The same parameters with the packed ones unpacked."""
    found = {path: np.asarray(x) for path, x in params.items() if path.rpartition(".")[2] in ("w13", "w2", "weight")}
    for path in [path.removesuffix(".codes") for path in params if path.endswith(".codes")]:
        w = FP4(params[f"{path}.codes"], params[f"{path}.scales"], params.get(f"{path}.expert_scale"), format)
        found[path] = np.asarray(dequantize(w))
    return found


def assert_same(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    for path, array in found.items():
        np.testing.assert_array_equal(np.asarray(array), expected[path].astype(array.dtype), err_msg=path)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_files_written_by_hand_load_to_their_values(tmp_path: Path, spelling: str) -> None:
    made = handmade.make(spelling)
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw, shards=3)
    format = handmade.FORMATS[spelling]
    assert find_quantization(directory, tiny.WIDE) == Quantization(format, (LAYER,))  # type: ignore[arg-type]
    assert_same(load(directory), made.params)
    assert_same(load(directory, "bfloat16"), made.params)
    kept = load(directory, keep=True)
    assert_same(unpacked(kept, format), made.params)
    assert {x.dtype.name for path, x in kept.items() if f"{LAYER}.mlp.experts" in path} <= {
        "uint32",
        "uint8",
        "float32",
    }


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_metadata_may_have_a_file_of_their_own(tmp_path: Path, spelling: str) -> None:
    made = handmade.make(spelling)
    metadata = made.raw.pop("quantization_config")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    metadata["exclude_modules"] = metadata.pop("ignore", [])
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": metadata}))
    assert_same(load(directory), made.params)


@pytest.mark.parametrize("stem", ["_weight.weight_", "_weight_"])
def test_other_joints_in_the_names_of_packed_tensors(tmp_path: Path, stem: str) -> None:
    made = handmade.make("compressed")
    tensors = {
        name.replace(".weight_", stem) if name.startswith(EXPERTS) else name: x for name, x in made.tensors.items()
    }
    assert_same(load(tiny.write(tmp_path / "model", tensors, made.raw)), made.params)


@pytest.mark.parametrize("names", ["model.language_model", "model"])
def test_the_other_layout_with_gate_rows_first(tmp_path: Path, names: str) -> None:
    """Rows of the weights and of their scales in the order of transformers' layout."""
    made = handmade.make("compressed")
    plain = {path: x.astype(ml_dtypes.bfloat16) for path, x in made.params.items()}
    tensors = tiny.transformers(plain, text_only=names == "model")
    for ours, theirs in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        del tensors[f"{names}.layers.{LAYER}.mlp.experts.{theirs}"]
        for part in ("weight_packed", "weight_scale", "weight_global_scale"):
            array = made.tensors[f"{EXPERTS}{ours}.{part}"]
            if ours == "w13" and part != "weight_global_scale":
                array = np.concatenate([array[:, 0::2], array[:, 1::2]], axis=1)
            tensors[f"{names}.layers.{LAYER}.mlp.experts.{theirs}.{part}"] = array
    directory = tiny.write(tmp_path / "model", tensors, made.raw)
    assert_same(load(directory), {path: x if "experts" in path else plain[path] for path, x in made.params.items()})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_activation_scales_are_ignored_and_said_to_be(
    tmp_path: Path, spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = handmade.make(spelling)
    load(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert len(caplog.records) == (spelling != "quark")
    unused = {"modelopt": "w13_weight.input_amax", "compressed": "w13.input_global_scale", "quark": None}[spelling]
    if unused:
        assert "ignoring 2 scales of activations" in caplog.records[0].getMessage()
        assert caplog.records[0].levelno == logging.WARNING
        assert EXPERTS + unused in inspect(tmp_path / "model").unused


def test_inspection(tmp_path: Path) -> None:
    made = handmade.make("quark")
    found = inspect(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert found.fits and found.quantization == Quantization("mxfp4", (LAYER,))
    weights = 3 * tiny.WIDE.num_experts * tiny.WIDE.hidden_size * tiny.WIDE.expert_size
    assert found.parts["experts"].parameters == 2 * weights
    assert found.parts["experts"].bytes == 2 * weights + weights // 2 + weights // 32
    assert found.saved == 2 * weights - weights // 2 - weights // 32
    assert json.loads(json.dumps(found.to_dict()))["quantization"] == {"format": "mxfp4", "layers": [LAYER]}


def failure(directory: Path) -> str:
    """What loading says, packed or unpacked; inspection must find a misfit too."""
    for keep in (False, True):
        with pytest.raises(CheckpointError) as caught:
            load(directory, keep=keep)
    with pytest.raises(CheckpointError) as again:
        convert(directory, directory.parent / "converted", "original", progress=False)
    assert len({str(caught.value), str(again.value)}) == 1
    assert not inspect(directory).fits
    return str(caught.value)


LEAVES = [
    ("modelopt", "w13_weight.scale"),
    ("modelopt", "w2_weight.scale2"),
    ("compressed", "w2.weight_scale"),
    ("compressed", "w13.weight_global_scale"),
    ("quark", "w13_weight_scale"),
]


@pytest.mark.parametrize(("spelling", "leaf"), LEAVES)
def test_a_missing_scale(tmp_path: Path, spelling: str, leaf: str) -> None:
    made = handmade.make(spelling)
    del made.tensors[EXPERTS + leaf]
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert f"1 missing tensors:\n    {EXPERTS}{leaf}" in message
    assert "unexpected" not in message and "cannot be read" not in message


@pytest.mark.parametrize(("spelling", "leaf"), LEAVES)
def test_a_scale_of_the_wrong_shape(tmp_path: Path, spelling: str, leaf: str) -> None:
    made = handmade.make(spelling)
    scale = made.tensors[EXPERTS + leaf]
    made.tensors[EXPERTS + leaf] = np.concatenate([scale, scale], axis=-1)
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    found = [*scale.shape[:-1], 2 * scale.shape[-1]]
    assert f"{EXPERTS}{leaf}: {found} in model.safetensors, expected {list(scale.shape)}" in message


@pytest.mark.parametrize(("spelling", "leaf"), LEAVES)
def test_a_scale_of_the_wrong_dtype(tmp_path: Path, spelling: str, leaf: str) -> None:
    made = handmade.make(spelling)
    made.tensors[EXPERTS + leaf] = made.tensors[EXPERTS + leaf].astype(np.float16)
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    expected = "F32" if leaf.endswith(("scale2", "global_scale")) else "U8" if spelling == "quark" else "F8_E4M3"
    assert f"{EXPERTS}{leaf} (F16, expected {expected})" in message


def _codes(spelling: str) -> str:
    return EXPERTS + ("w13.weight_packed" if spelling == "compressed" else "w13_weight")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_packed_tensors_without_metadata(tmp_path: Path, spelling: str) -> None:
    made = handmade.make(spelling)
    del made.raw["quantization_config"]
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert f"{_codes(spelling)} (packed, but neither config.json nor hf_quant_config.json says how)" in message
    assert "missing" not in message and "unexpected" not in message


UNKNOWN = [
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "group_size": 32}}},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
    "yes",
]


@pytest.mark.parametrize("metadata", UNKNOWN, ids=str)
@pytest.mark.parametrize("spelling", ["modelopt", "quark"])
def test_an_unknown_format(tmp_path: Path, spelling: str, metadata: Any) -> None:
    made = handmade.make(spelling)
    raw = made.raw | {"quantization_config": metadata}
    message = failure(tiny.write(tmp_path / "model", made.tensors, raw))
    method = metadata["quant_method"] if isinstance(metadata, dict) else "an unnamed method"
    assert f"{_codes(spelling)} (quantised by {method}" in message
    assert "config.json: quantization_config" in message


@pytest.mark.parametrize(("spelling", "other"), [("compressed", "quark"), ("quark", "modelopt")])
def test_metadata_of_another_format(tmp_path: Path, spelling: str, other: str) -> None:
    made = handmade.make(spelling)
    raw = made.raw | {"quantization_config": handmade.METADATA[other]}
    message = failure(tiny.write(tmp_path / "model", made.tensors, raw))
    if spelling == "compressed":
        assert f"{_codes(spelling)} (packed as nvfp4, but " in message
    else:
        assert f"missing tensors:\n    {_codes(spelling)}.scale" in message
        assert f"{_codes(spelling)}_scale" in message


@pytest.mark.parametrize(
    "entry",
    [
        _codes("modelopt"),
        EXPERTS.removesuffix("."),
        f"model.llm.layers.{LAYER}",
        f"model.llm.layers.{LAYER}*",
        r"re:.*\.layers\.2\.mlp\..*",
    ],
)
def test_packed_tensors_that_the_metadata_leave_out(tmp_path: Path, entry: str) -> None:
    made = handmade.make("modelopt")
    metadata = made.raw["quantization_config"] | {"ignore": [entry]}
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw | {"quantization_config": metadata}))
    assert f"{_codes('modelopt')} (packed, but " in message and "leaves it out)" in message


@pytest.mark.parametrize(
    "entry", ["model.llm.layers.22", "model.llm.layers", "re:model.llm.layers.2.ml", "re:layers", "*layers.1*"]
)
def test_names_are_compared_as_a_whole(tmp_path: Path, entry: str) -> None:
    """An entry for another layer, or a part of a name, leaves nothing out."""
    made = handmade.make("modelopt")
    if entry == "model.llm.layers":
        entry = "model.llm.layer"
    metadata = made.raw["quantization_config"] | {"ignore": [entry]}
    load(tiny.write(tmp_path / "model", made.tensors, made.raw | {"quantization_config": metadata}))


def test_layer_2_is_not_layer_20() -> None:
    def excludes(entry: str, name: str) -> bool:
        return Metadata("config.json", "modelopt", "nvfp4", (entry,)).excludes(name)

    layer = "model.llm.layers.2"
    for entry in (layer, f"{layer}*", f"{layer}.*", f"re:{layer}", "*.2.*", "*layers.2*experts*"):
        assert excludes(entry, "model.llm.layers.2.mlp.experts.w13_weight")
        assert not excludes(entry, "model.llm.layers.20.mlp.experts.w13_weight")
        assert not excludes(entry, "model.llm.layers.12.mlp.experts.w13_weight")
    assert not excludes("model.llm.layers.2.mlp.*.bias", "model.llm.layers.2.mlp.experts.w13_weight")
    assert not excludes("modelXllm*", "model.llm.embed.weight")


def test_a_list_of_names_that_is_none(tmp_path: Path) -> None:
    made = handmade.make("modelopt")
    for ignore, words in (("lm_head", "expected a list of names"), (["re:("], "is not a regular expression")):
        metadata = made.raw["quantization_config"] | {"ignore": ignore}
        directory = tiny.write(tmp_path / "model", made.tensors, made.raw | {"quantization_config": metadata})
        with pytest.raises(CheckpointError, match=f"config.json: quantization_config: .*{words}"):
            load(directory)


def test_half_of_a_layer(tmp_path: Path) -> None:
    made = handmade.make("quark")
    del made.tensors[f"{EXPERTS}w2_weight_scale"]
    made.tensors[f"{EXPERTS}w2_weight"] = np.zeros((5, 32, 64), ml_dtypes.bfloat16)
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert f"{EXPERTS}w13_weight (packed, but {EXPERTS}w2_weight is not)" in message


def test_only_routed_experts_may_be_packed(tmp_path: Path) -> None:
    made = handmade.make("modelopt")
    name = "model.llm.layers.2.attn.wq_du.weight"
    made.tensors[name] = np.zeros(made.tensors[name].shape, np.uint8)
    message = failure(tiny.write(tmp_path / "model", made.tensors, made.raw))
    assert f"{name} (U8)" in message and "routed experts in NVFP4 and MXFP4" in message


def test_metadata_of_nothing(tmp_path: Path) -> None:
    plain = tiny.original(tiny.random_parameters(config=tiny.WIDE))
    raw = tiny.WIDE.to_dict("original") | {"quantization_config": handmade.METADATA["modelopt"]}
    message = failure(tiny.write(tmp_path / "model", plain, raw))
    assert "are quantised by modelopt NVFP4, but no routed experts are packed" in message


def test_widths_that_are_not_whole_blocks(tmp_path: Path) -> None:
    tensors = tiny.original(tiny.random_parameters())
    tensors[f"{EXPERTS}w13_weight"] = np.zeros((5, 12, 6), np.uint8)
    raw = tiny.CONFIG.to_dict("original") | {"quantization_config": handmade.METADATA["modelopt"]}
    directory = tiny.write(tmp_path / "model", tensors, raw)
    with pytest.raises(CheckpointError, match="hidden_size = 12: nvfp4 needs a multiple of 16"):
        find_quantization(directory, tiny.CONFIG)
    with pytest.raises(CheckpointError, match="w13_weight: an input of 12 is not whole blocks of 16"):
        load_parameters(directory, tiny.CONFIG, tiny.ABSTRACT, progress=False)


def _zero_divisor(tensors: tiny.Tensors) -> tuple[str, str]:
    tensors[f"{EXPERTS}w2.weight_global_scale"][3] = 0
    return "compressed", "w2.weight_global_scale"


def _nan_scale(tensors: tiny.Tensors) -> tuple[str, str]:
    tensors[f"{EXPERTS}w13_weight.scale2"][0] = np.nan
    return "modelopt", "w13_weight.scale2"


@pytest.mark.parametrize(("spelling", "spoil"), [("compressed", _zero_divisor), ("modelopt", _nan_scale)])
def test_an_experts_scale_that_is_not_finite(
    tmp_path: Path, spelling: str, spoil: Callable[[tiny.Tensors], tuple[str, str]]
) -> None:
    made = handmade.make(spelling)
    _, leaf = spoil(made.tensors)
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    for keep in (False, True):
        with pytest.raises(CheckpointError, match=f"{leaf}: the scale of an expert is not a finite number"):
            load(directory, keep=keep)


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    made = handmade.make("modelopt")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    for quantization in (Quantization("mxfp4", (LAYER,)), Quantization("nvfp4", (1, LAYER))):
        with pytest.raises(CheckpointError, match="is asked for, and "):
            load_parameters(directory, tiny.WIDE, abstract_parameters(tiny.WIDE, "bfloat16", quantization))


def test_conversion_refuses_packed_weights(tmp_path: Path) -> None:
    made = handmade.make("quark")
    directory = tiny.write(tmp_path / "model", made.tensors, made.raw)
    with pytest.raises(CheckpointError, match=f"{EXPERTS}w13_weight is in 4 bits already"):
        convert(directory, tmp_path / "out", "transformers", progress=False)
    assert not (tmp_path / "out").exists()
