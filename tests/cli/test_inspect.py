"""`inkling-jax inspect`: figures against sums made here from the files and shapes."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from inkling_jax.cache import cache_bytes

from .conftest import TEXT_CONFIG
from .test_generate import assert_one_error


def stored(checkpoint):
    return {name: array for file in checkpoint.glob("*.safetensors") for name, array in load_file(file).items()}


def test_json_agrees_with_the_files(command, checkpoint):
    done = command("inspect", checkpoint, "--batch", 3, "--context", 200, "--draft-tokens", 1, "--json")
    found = json.loads(done.out)
    tensors = stored(checkpoint)
    assert done.code == 0 and done.err == ""
    assert found["layout"] == "original" and found["fits"] is True
    assert found["total"]["parameters"] == sum(array.size for array in tensors.values())
    assert found["total"]["bytes"] == sum(array.nbytes for array in tensors.values())
    assert sum(found["dtypes"].values()) == len(tensors)
    memory = found["memory"]
    assert (memory["batch"], memory["context"], memory["draft_tokens"], memory["dtype"]) == (3, 200, 1, "bfloat16")
    cache = cache_bytes(TEXT_CONFIG, 3, 200, 1, "bfloat16")
    assert memory["bytes"]["weights"] == found["total"]["bytes"]
    assert memory["bytes"]["total"] == memory["bytes"]["weights"] + cache["total"]


def test_the_report_says_the_same_in_words(command, checkpoint):
    done = command("inspect", checkpoint)
    total = sum(array.size for array in stored(checkpoint).values())
    assert done.code == 0
    assert f"{checkpoint}: original layout" in done.out
    assert f"{total:,}" in done.out
    assert "local, dense" in done.out and "global, experts" in done.out and "MTP depths" in done.out
    assert "memory for 1 sequence of 512 tokens, 1 drafts, bfloat16" in done.out


def test_float32_weights_take_twice_the_memory(command, checkpoint):
    reports = [command("inspect", checkpoint, "--dtype", dtype, "--json").out for dtype in ("bfloat16", "float32")]
    weights = [json.loads(report)["memory"]["bytes"]["weights"] for report in reports]
    assert weights[0] < weights[1] <= 2 * weights[0]


def test_tensors_that_do_not_fit_are_listed_and_the_exit_code_says_so(command, checkpoint, tmp_path):
    tensors = stored(checkpoint)
    tensors["model.llm.surprise"] = tensors.pop("model.llm.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    done = command("inspect", tmp_path)
    assert done.code == 1
    assert "1 tensors missing\n  model.llm.norm.weight" in done.out
    assert "1 tensors unexpected\n  model.llm.surprise" in done.out
    assert json.loads(command("inspect", tmp_path, "--json").out)["missing"] == ["model.llm.norm.weight"]


def test_a_config_alone_is_enough(command, checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    full = json.loads(command("inspect", checkpoint, "--json").out)
    for alone in (tmp_path, tmp_path / "config.json"):
        found = json.loads(command("inspect", alone, "--json").out)
        assert found["layout"] is None
        assert found["total"]["parameters"] == full["total"]["parameters"]
        assert found["memory"] == full["memory"]


def test_a_published_size_by_name(command):
    """The published 265,956,439,090 parameters of Inkling-Small less those of its vision and audio towers."""
    h = 4096
    towers = 80 * 16 * h + h  # audio
    towers += 128 * 75 + 320 * 512 + 4800 * 5120 + h * 9600 + 128 + 320 + 4800 + h  # vision
    done = command("inspect", "inkling-small", "--json")
    assert json.loads(done.out)["total"]["parameters"] == 265_956_439_090 - towers


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "argument --batch: '0' is not a whole number from 1 up"),
        (["--context", "513"], "argument --context: 513 is more than this model's 512"),
        (["--draft-tokens", "2"], "argument --draft-tokens: 2 is more than this model's 1"),
        (["--dtype", "int8"], "argument --dtype"),
    ],
)
def test_wrong_arguments(command, checkpoint, arguments, words):
    assert_one_error(command("inspect", checkpoint, *arguments), words)


def test_wrong_checkpoints(command, tmp_path):
    assert_one_error(command("inspect", tmp_path / "none"), "no such directory")
    assert_one_error(command("inspect", tmp_path), "a checkpoint needs config.json")
    (tmp_path / "config.json").write_text("{")
    assert_one_error(command("inspect", tmp_path), "not valid JSON")


def test_a_plan_for_a_mesh(command, checkpoint):
    """Of a model that is here, on devices that are not; without drafts and with."""
    done = command("inspect", "inkling", "--mesh", "tensor=2,expert=32", "--quantization", "mxfp4", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and [one["draft_tokens"] for one in found["plans"]] == [0, 8]
    assert found["plans"][0]["mesh"] == {"data": 1, "expert": 32, "tensor": 2}
    assert found["plans"][1]["gpus"]["H100"]["fits"] is True
    assert found["memory"]["bytes"]["weights"] < found["total"]["bytes"] / 3
    done = command("inspect", checkpoint, "--mesh", "data=2", "--batch", 4, "--draft-tokens", 0)
    assert "each of 2 devices (data=2) holds" in done.out
    assert "and reads in a round, with 2 sequences of 512 tokens" in done.out
    assert all(name in done.out for name in ("H100", "H200", "B200", "MI300X", "MI355X"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "tensor"], "argument --mesh: mesh: 'tensor'; expected each axis once with its size"),
        (["--mesh", "model=2"], "mesh: there is no axis 'model'"),
        (["--quantization", "int4"], "argument --quantization"),
    ],
)
def test_plans_that_cannot_be(command, checkpoint, arguments, words):
    assert_one_error(command("inspect", checkpoint, *arguments), words)


def test_a_mesh_that_does_not_divide_the_model(command, checkpoint):
    done = command("inspect", checkpoint, "--mesh", "expert=1024")
    assert done.code == 2 and done.out == ""
    assert "num_experts = 5 does not divide by 1024 (expert)" in done.err
