"""What is saved is complete, the same bytes, readable by others, or not there at all."""

import json
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.checkpoint import CheckpointError, convert, load_parameters, save_checkpoint
from inkling_jax.checkpoint import files as files_module
from inkling_jax.checkpoint import write as write_module
from inkling_jax.config import InklingConfig, Layout

from . import tiny

PARAMS = {path: jnp.asarray(array) for path, array in tiny.random_parameters().items()}
LAYOUTS: tuple[Layout, Layout] = ("original", "transformers")


def format_of(layout: Layout) -> tiny.Tensors:
    params = tiny.random_parameters()
    return tiny.original(params) if layout == "original" else tiny.transformers(params, text_only=True)


@pytest.mark.parametrize("piece", [1, 10**9])
@pytest.mark.parametrize("shard", [1, 3000, 10**9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_of_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, shard: int, piece: int
) -> None:
    monkeypatch.setattr(files_module, "_PIECE_BYTES", piece)
    save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout=layout, max_shard_bytes=shard)
    assert tiny.same(tiny.read(tmp_path / "out"), format_of(layout))
    assert InklingConfig.from_path(tmp_path / "out") == tiny.CONFIG


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index(tmp_path: Path, layout: Layout) -> None:
    save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout=layout, max_shard_bytes=3000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = tiny.read(tmp_path / "out")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout="original")
    [file] = (tmp_path / "out").glob("*.safetensors")
    (size,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = json.loads(file.read_bytes()[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    for spec in header.values():
        width = {"F32": 4, "BF16": 2}[spec["dtype"]]
        assert (8 + size + spec["data_offsets"][0]) % width == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_save_then_load(tmp_path: Path, layout: Layout, dtype: str) -> None:
    params = {path: array if array.dtype == np.float32 else array.astype(dtype) for path, array in PARAMS.items()}
    save_checkpoint(tmp_path / "out", tiny.CONFIG, params, layout=layout)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["torch_dtype" if layout == "original" else "dtype"] == dtype
    specs: Any = {path: write_module.jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in params.items()}
    assert tiny.same(load_parameters(tmp_path / "out", tiny.CONFIG, specs, progress=False), params)


def test_original_then_load_then_save_gives_the_same_bytes(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", tiny.original(tiny.random_parameters()), shards=2, mtp_file=True)
    loaded = load_parameters(source, tiny.CONFIG, tiny.ABSTRACT, progress=False)
    save_checkpoint(tmp_path / "out", tiny.CONFIG, loaded, layout="original")
    assert tiny.same(tiny.read(tmp_path / "out"), tiny.read(source))


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt", "config.json"):
        (source / name).write_text(name)
    save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout="original", tokenizer_dir=source)
    others = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert others == {
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert InklingConfig.from_path(tmp_path / "out") == tiny.CONFIG


def test_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="out: exists and is not an empty directory"):
        save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout="original")
    with pytest.raises(CheckpointError, match="precious: exists and is not an empty directory"):
        save_checkpoint(tmp_path / "out" / "precious", tiny.CONFIG, PARAMS, layout="original")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


def test_empty_and_nested_targets_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout="original")
    save_checkpoint(tmp_path / "a" / "b", tiny.CONFIG, PARAMS, layout="original")
    monkeypatch.chdir(tmp_path)
    save_checkpoint("relative", tiny.CONFIG, PARAMS, layout="original")
    for name in ("out", "a/b", "relative"):
        assert len(tiny.read(tmp_path / name)) == len(format_of("original"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out", "relative"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
@pytest.mark.parametrize("existing", [False, True])
def test_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, existing: bool
) -> None:
    target = tmp_path / "out"
    if existing:
        target.mkdir()
    source = tiny.write(tmp_path / "source", tiny.original(tiny.random_parameters()))
    calls = iter(range(20))

    def failing(*args: Any, real: Any = files_module._write_tensors) -> None:
        if next(calls, None) is None:
            raise error
        real(*args)

    monkeypatch.setattr(files_module, "_write_tensors", failing)
    with pytest.raises((KeyboardInterrupt, OSError)):
        save_checkpoint(target, tiny.CONFIG, PARAMS, layout="original", max_shard_bytes=1000)
    with pytest.raises((KeyboardInterrupt, OSError)):
        convert(source, target, "transformers", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"][not existing :]
    assert not existing or not list(target.iterdir())


def test_parameters_that_do_not_fit_are_listed_together(tmp_path: Path) -> None:
    params = dict(PARAMS)
    del params["norm.weight"]
    params["extra"] = params["embed.weight"]
    params["embed.weight"] = params["embed.weight"][:-1]
    params["unembed.weight"] = params["unembed.weight"].astype(jnp.int8)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "out", tiny.CONFIG, params, layout="original")
    for line in ("norm.weight is missing", "extra is not a parameter", "embed.weight has shape (39, 12)", "is int8"):
        assert line in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_target_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_module.free_target(Path("~/saved/model")) == tmp_path.resolve() / "saved" / "model"


def test_a_target_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: the directory cannot be made: File exists"):
        write_module.free_target(tmp_path / "file" / "model")


def test_a_target_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    taken = pytest.raises(CheckpointError, match="model: taken by something else meanwhile")
    with taken, write_module.new_directory(tmp_path / "model"):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "theirs"]


def test_unknown_layout(tmp_path: Path) -> None:
    bad: Any = "gguf"
    with pytest.raises(ValueError, match="layout"):
        save_checkpoint(tmp_path / "out", tiny.CONFIG, PARAMS, layout=bad)
    with pytest.raises(ValueError, match="layout"):
        convert(tmp_path, tmp_path / "out", bad)
