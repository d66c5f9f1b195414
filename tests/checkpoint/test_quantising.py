"""Quantising a checkpoint: the files, what they hold, and going on after a kill."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from inkling_jax import Inkling, load, save
from inkling_jax.checkpoint import CheckpointError, files, inspect, load_parameters, quantize
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Quantization
from pallas_kernels import fp4

from . import handmade, tiny

PARAMS = tiny.random_parameters(config=tiny.WIDE)
RAW = tiny.WIDE.to_dict("original")
EXPERTS = handmade.EXPERTS
FORMATS = ("nvfp4", "mxfp4")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "source", tiny.original(PARAMS), RAW, shards=2)


def raw_tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of every tensor in a directory, read without any library."""
    found = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, spec in header.items():
            begin, end = (8 + size + offset for offset in spec["data_offsets"])
            found[name] = (spec["dtype"], spec["shape"], data[begin:end])
    return found


def test_nvfp4_files(tmp_path: Path, source: Path) -> None:
    """Names, dtypes and shapes of the description; values as a reader of it would compute them."""
    assert quantize(source, tmp_path / "out", "nvfp4", progress=False) == Quantization("nvfp4", (2,))
    found, plain = raw_tensors(tmp_path / "out"), raw_tensors(source)
    packed = {name for name in found if name.startswith(EXPERTS)}
    parts = ("", ".scale", ".scale2", ".original_shape")
    assert packed == {f"{EXPERTS}{name}_weight{part}" for name in ("w13", "w2") for part in parts}
    assert {name: x for name, x in found.items() if name not in packed} == {
        name: x for name, x in plain.items() if not name.startswith(EXPERTS)
    }
    for name, rows, width in ((f"{EXPERTS}w13_weight", 128, 32), (f"{EXPERTS}w2_weight", 32, 64)):
        dtype, shape, codes = found[name]
        assert (dtype, shape) == ("U8", [5, rows, width // 2])
        assert found[f"{name}.scale"][:2] == ("F8_E4M3", [5, rows, width // 16])
        assert found[f"{name}.scale2"][:2] == ("F32", [5])
        assert np.frombuffer(found[f"{name}.original_shape"][2], "<i8").tolist() == [5, rows, width]
        scales = np.frombuffer(found[f"{name}.scale"][2], ml_dtypes.float8_e4m3fn).reshape(5, rows, -1)
        expert = np.frombuffer(found[f"{name}.scale2"][2], "<f4")[:, None, None]
        values = handmade._values(np.frombuffer(codes, np.uint8).reshape(shape))
        weights = values * np.repeat(scales.astype(float), 16, axis=-1) * expert
        original = np.frombuffer(plain[name][2], ml_dtypes.bfloat16).reshape(weights.shape).astype(float)
        assert 0.07 < np.linalg.norm(weights - original) / np.linalg.norm(original) < 0.087


def test_mxfp4_files(tmp_path: Path, source: Path) -> None:
    quantize(source, tmp_path / "out", "mxfp4", progress=False)
    found, plain = raw_tensors(tmp_path / "out"), raw_tensors(source)
    packed = {name for name in found if name.startswith(EXPERTS)}
    assert packed == {f"{EXPERTS}{name}_weight{part}" for name in ("w13", "w2") for part in ("", "_scale")}
    for name, rows, width in ((f"{EXPERTS}w13_weight", 128, 32), (f"{EXPERTS}w2_weight", 32, 64)):
        dtype, shape, codes = found[name]
        assert (dtype, shape) == ("U8", [5, rows, width // 2])
        dtype, flat, bits = found[f"{name}_scale"]
        assert (dtype, flat) == ("U8", [5 * rows, width // 32])
        scales = 2.0 ** (np.frombuffer(bits, np.uint8).reshape(5, rows, -1).astype(int) - 127)
        weights = handmade._values(np.frombuffer(codes, np.uint8).reshape(shape)) * np.repeat(scales, 32, axis=-1)
        original = np.frombuffer(plain[name][2], ml_dtypes.bfloat16).reshape(weights.shape).astype(float)
        assert 0.10 < np.linalg.norm(weights - original) / np.linalg.norm(original) < 0.115


@pytest.mark.parametrize("format", FORMATS)
def test_metadata(tmp_path: Path, source: Path, format: Any) -> None:
    quantize(source, tmp_path / "out", format, progress=False)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    metadata = raw["quantization_config"]
    assert metadata["quant_method"] == {"nvfp4": "modelopt", "mxfp4": "quark"}[format]
    excluded = metadata[{"nvfp4": "ignore", "mxfp4": "exclude"}[format]]
    for module in ("layers.1.mlp.experts", "layers.2.mlp.shared_experts", "layers.2.mlp.gate", "layers.2.attn.wq_du"):
        assert f"model.llm.{module}" in excluded
    assert {"model.llm.unembed", "model.mtp.layers.1.input_proj"} <= set(excluded)
    assert EXPERTS.removesuffix(".") not in excluded
    assert InklingConfig.from_dict(raw) == tiny.WIDE
    found = inspect(tmp_path / "out")
    assert found.fits and found.quantization == Quantization(format, (2,))
    assert not found.unused


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_either_layout_with_towers_gives_the_same(tmp_path: Path, layout: str) -> None:
    tensors = tiny.original(PARAMS) if layout == "original" else tiny.transformers(PARAMS)
    raw = tiny.WIDE.to_dict(layout)  # type: ignore[arg-type]
    if layout == "transformers":
        raw = {"model_type": "inkling_mm_model", "text_config": raw}
    towers = tiny.towers()
    source = tiny.write(tmp_path / layout, tensors | towers[layout == "transformers"], raw | {"audio_config": {}}, 3)
    (source / "tokenizer.json").write_text("{}")
    quantize(source, tmp_path / "out", "mxfp4", progress=False)
    found = raw_tensors(tmp_path / "out")
    quantize(tiny.write(tmp_path / "plain", tiny.original(PARAMS), RAW), tmp_path / "expected", "mxfp4", progress=False)
    expected = raw_tensors(tmp_path / "expected")
    assert {name: x for name, x in found.items() if name not in towers[0]} == expected
    assert towers[0].keys() <= found.keys()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["audio_config"] == {}


@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_the_unpacked_twin(tmp_path: Path, format: Any) -> None:
    model = Inkling(tiny.WIDE, {path: jnp.asarray(x) for path, x in PARAMS.items()})
    save(model, tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "out", format, progress=False)
    packed = load(tmp_path / "out", "float32", progress=False)
    twin = load(tmp_path / "out", "float32", progress=False, quantization="none")
    assert packed.quantization == Quantization(format, (2,)) and twin.quantization is None
    assert f"experts in {format}" in repr(packed) and format not in repr(twin)
    assert repr(packed).split()[0] == repr(twin).split()[0]  # the number of parameters
    tokens = np.random.default_rng(2).integers(0, tiny.WIDE.real_vocab_size, (2, 9))
    np.testing.assert_allclose(packed.logits(tokens), twin.logits(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_save_and_load_keep_every_bit(tmp_path: Path, source: Path, format: Any) -> None:
    quantize(source, tmp_path / "out", format, progress=False)
    model = load(tmp_path / "out", progress=False)
    save(model, tmp_path / "again")
    assert raw_tensors(tmp_path / "again") == raw_tensors(tmp_path / "out")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    with pytest.raises(CheckpointError, match="weights in 4 bits can be saved as original or orbax only"):
        save(model, tmp_path / "other", layout="transformers")


def test_nano_writes_on(tmp_path: Path) -> None:
    quantize("nano", tmp_path / "out", "nvfp4", progress=False)
    model = load(tmp_path / "out", progress=False)
    assert model.quantization == Quantization("nvfp4", (2, 3, 4))
    text = model.generate("def mean(values):\n    return ", max_new_tokens=12, draft_tokens=0).text
    assert text and text.isascii() and text.strip()


# Writing some groups of tensors, then death without notice in the midst of one.
KILLED = """
import os, signal, sys
from inkling_jax.checkpoint import files, quantize
real, left = files._write_tensors, int(sys.argv[3])

def write(file, *arguments):
    global left
    left -= 1
    if not left:
        file.write(b"half of a tensor")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    real(file, *arguments)

files._write_tensors = write
quantize(sys.argv[1], sys.argv[2], "nvfp4", progress=False, max_shard_bytes=4000)
"""


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_a_kill_loses_only_the_shard_at_hand(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, work = tmp_path / "out", tmp_path / ".out-unfinished"
    command = [sys.executable, "-c", KILLED, str(source), str(out), "40"]
    killed = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not out.exists()
    shards = sorted(work.glob("*.safetensors"))
    finished = sorted(json.loads((work / "quantising.json").read_text())["shards"])
    assert finished == [file.name for file in shards[:-1]] and len(finished) > 5
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        load(work)
    spoil: list[Callable[[Path], None]] = [flip, truncate, Path.unlink]
    for file, act in zip(shards, spoil, strict=False):
        act(file)
    written = []
    real = files._write_shard
    monkeypatch.setattr(files, "_write_shard", lambda file, *rest: (written.append(file.name), real(file, *rest)))
    quantize(source, out, "nvfp4", progress=False, max_shard_bytes=4000)
    assert written[:4] == [file.name for file in [*shards[:3], shards[-1]]]
    assert not set(written) & set(finished[3:])
    monkeypatch.undo()
    quantize(source, tmp_path / "whole", "nvfp4", progress=False, max_shard_bytes=4000)
    contents = [{f.name: f.read_bytes() for f in d.iterdir()} for d in (out, tmp_path / "whole")]
    assert contents[0] == contents[1]
    assert not list(tmp_path.glob(".*"))


def test_two_at_once_are_not_let_in(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, second = files._write_shard, []

    def meanwhile(file: Path, *rest: Any) -> None:
        if not second:
            with pytest.raises(CheckpointError, match=r"\.out-unfinished: another process is writing there") as caught:
                second.append("begun")
                quantize(source, tmp_path / "out", "mxfp4", progress=False)
            second.append(str(caught.value))
        real(file, *rest)

    monkeypatch.setattr(files, "_write_shard", meanwhile)
    quantize(source, tmp_path / "out", "nvfp4", progress=False)
    assert len(second) == 2 and inspect(tmp_path / "out").quantization == Quantization("nvfp4", (2,))


@pytest.mark.parametrize("change", ["format", "source", "journal"])
def test_work_on_something_else_is_not_taken_up(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    real, calls = files._write_shard, []

    def failing(file: Path, *rest: Any) -> None:
        calls.append(file.name)
        if len(calls) == 4:
            raise OSError("No space left on device")
        real(file, *rest)

    monkeypatch.setattr(files, "_write_shard", failing)
    with pytest.raises(OSError, match="No space"):
        quantize(source, tmp_path / "out", "nvfp4", progress=False, max_shard_bytes=4000)
    assert (tmp_path / ".out-unfinished").exists() and not (tmp_path / "out").exists()
    if change == "source":
        os.utime(next(source.glob("*.safetensors")), ns=(1, 1))
    if change == "journal":
        (tmp_path / ".out-unfinished" / "quantising.json").write_text("{")
    calls[:] = [""] * 4
    format: Any = "mxfp4" if change == "format" else "nvfp4"
    quantize(source, tmp_path / "out", format, progress=False, max_shard_bytes=4000)
    assert len(calls) - 4 == len(list((tmp_path / "out").glob("*.safetensors")))
    assert inspect(tmp_path / "out").quantization == Quantization(format, (2,))


def test_refusals(tmp_path: Path, source: Path) -> None:
    def refused(words: str, src: Path, format: Any = "nvfp4", dst: str = "new") -> None:
        with pytest.raises(CheckpointError, match=words):
            quantize(src, tmp_path / dst, format, progress=False)
        assert not (tmp_path / "new").exists()

    refused("format = 'int4': expected nvfp4 or mxfp4", source, format="int4")
    refused("no such directory", tmp_path / "nowhere")
    refused("source: exists and is not an empty directory", source, dst="source")
    small = tiny.write(tmp_path / "small", tiny.original(tiny.random_parameters()))
    refused("hidden_size = 12: mxfp4 needs a multiple of 32", small, format="mxfp4")
    made = handmade.make("quark")
    refused("w13_weight is in 4 bits already", tiny.write(tmp_path / "packed", made.tensors, made.raw))
    assert not list(tmp_path.glob(".*"))
    infinite = tiny.original(PARAMS)
    infinite[f"{EXPERTS}w2_weight"] = infinite[f"{EXPERTS}w2_weight"].copy()
    infinite[f"{EXPERTS}w2_weight"][3, 1, 2] = np.inf
    refused("w2_weight: expert 3 has weights that are not finite", tiny.write(tmp_path / "inf", infinite, RAW))


def test_every_expert_has_a_scale_of_its_own(tmp_path: Path) -> None:
    """Experts are quantised one by one: one that is a million times larger does not spoil the others."""
    tensors = tiny.original(PARAMS)
    weights = tensors[f"{EXPERTS}w13_weight"].astype(np.float32)
    weights[1] *= 1e6
    tensors[f"{EXPERTS}w13_weight"] = weights.astype(ml_dtypes.bfloat16)
    quantize(tiny.write(tmp_path / "source", tensors, RAW), tmp_path / "out", "nvfp4", progress=False)
    loaded = load_parameters(tmp_path / "out", tiny.WIDE, abstract_parameters(tiny.WIDE, "float32"), progress=False)
    found = np.asarray(loaded["layers.2.mlp.experts.w13"], float)
    for e in range(5):
        exact = np.stack([weights[e, 0::2], weights[e, 1::2]]).astype(float)
        assert np.linalg.norm(found[e] - exact) < 0.09 * np.linalg.norm(exact)


def test_packed_parameters_of_the_wrong_kind_are_not_saved(tmp_path: Path, source: Path) -> None:
    quantize(source, tmp_path / "out", "nvfp4", progress=False)
    model = load(tmp_path / "out", progress=False)
    model.params["layers.2.mlp.experts.w2.scales"] = model.params["layers.2.mlp.experts.w2.scales"].astype(jnp.uint16)
    with pytest.raises(CheckpointError, match=r"w2.scales is uint16, expected uint8"):
        save(model, tmp_path / "again")
    assert fp4.BLOCK_OF == {"nvfp4": 16, "mxfp4": 32}
