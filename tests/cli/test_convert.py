"""`inkling-jax convert`: there and back gives the same bytes; a refusal leaves nothing behind."""

import json

import numpy as np
from safetensors.numpy import load_file

from .test_generate import assert_one_error


def tensors(directory):
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def test_there_and_back(command, checkpoint, tmp_path):
    there = command("convert", checkpoint, tmp_path / "there", "--layout", "transformers")
    assert there.code == 0
    assert there.out.startswith(f"wrote {tmp_path / 'there'}: transformers layout, ")
    assert json.loads(command("inspect", tmp_path / "there", "--json").out)["layout"] == "transformers"
    assert command("convert", tmp_path / "there", tmp_path / "back", "--layout", "original").code == 0
    before, after = tensors(checkpoint), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].view(np.uint8), after[name].view(np.uint8)) for name in before)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_refusals(command, checkpoint, tmp_path):
    assert_one_error(command("convert", checkpoint, tmp_path / "new"), "--layout")
    assert_one_error(command("convert", checkpoint, tmp_path / "new", "--layout", "gguf"), "argument --layout")
    nowhere = command("convert", tmp_path / "none", tmp_path / "new", "--layout", "original")
    assert_one_error(nowhere, "no such directory")
    assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    done = command("convert", checkpoint, tmp_path / "full", "--layout", "transformers")
    assert_one_error(done, "exists and is not an empty directory")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]
