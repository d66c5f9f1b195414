"""`inkling-jax quantize`: what it says, what `inspect` and `generate` make of the result, and what it refuses."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax import Inkling, save
from inkling_jax.cli import quantize
from inkling_jax.model import load
from inkling_jax.nn import abstract_parameters

from .conftest import TEXT_CONFIG
from .test_generate import assert_one_error

CONFIG = replace(TEXT_CONFIG, hidden_size=32, expert_size=32, num_layers=3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose widths are whole blocks, with two layers of experts."""
    rng = np.random.default_rng(4)
    params = {
        path: jnp.asarray(rng.normal(size=spec.shape), spec.dtype) for path, spec in abstract_parameters(CONFIG).items()
    }
    directory = tmp_path_factory.mktemp("quantize") / "wide"
    save(Inkling(CONFIG, params), directory)
    return directory


@pytest.fixture(scope="module")
def sizes(wide):
    """Bytes in bf16, and of the experts of one layer, by which bits a weight."""
    weights = 3 * CONFIG.num_experts * CONFIG.hidden_size * CONFIG.expert_size
    return sum(x.nbytes for x in load(str(wide), progress=False).params.values()), weights


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_quantise_then_inspect(command, wide, sizes, tmp_path, format):
    done = command("quantize", wide, tmp_path / "out", "--format", format)
    assert done.code == 0
    total, weights = sizes
    packed = weights // 2 + weights // {"nvfp4": 16, "mxfp4": 32}[format]
    packed += {"nvfp4": 2 * 4 * CONFIG.num_experts, "mxfp4": 0}[format]  # the experts' scales of two weights
    size = total - 2 * weights + packed
    assert done.out == (
        f"wrote {tmp_path / 'out'}: experts of 1 layers in {format}, {size / 1000:.3g} kB, "
        f"{(total - size) / 1000:.3g} kB less than {total / 1000:.3g} kB in bf16\n"
    )
    report = command("inspect", tmp_path / "out")
    assert report.code == 0
    assert f"local, experts, {format}" in report.out or f"global, experts, {format}" in report.out
    assert f"experts in {format}: {(total - size) / 1000:.3g} kB saved" in report.out
    found = json.loads(command("inspect", tmp_path / "out", "--json").out)
    assert found["quantization"] == {"format": format, "layers": [2]}
    assert found["saved"] == total - size
    assert found["memory"]["bytes"]["weights"] == found["total"]["bytes"] == size
    assert found["total"]["parameters"] == json.loads(command("inspect", wide, "--json").out)["total"]["parameters"]


def test_inspect_lists_what_is_wrong_with_4_bits(command, wide, tmp_path):
    """Widths that are not whole blocks, too: the list, not an error about the memory."""
    assert command("quantize", wide, tmp_path / "out", "--format", "nvfp4").code == 0
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    raw["text_config"]["hidden_size"] = 36
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    done = command("inspect", tmp_path / "out")
    assert (done.code, done.err) == (1, "")
    lines = json.loads(command("inspect", tmp_path / "out", "--json").out)["misshapen"]
    assert "model.llm.layers.2.mlp.experts.w13_weight: an input of 36 is not whole blocks of 16" in lines


def test_generate_can_unpack(command, wide, tmp_path, monkeypatch):
    assert command("quantize", wide, tmp_path / "out", "--format", "nvfp4").code == 0
    asked = []

    def stop(path, dtype, quantization, **_):
        asked.append(quantization)
        raise ValueError("enough")

    monkeypatch.setattr("inkling_jax.cli.generate.load", stop)
    command("generate", "--model", tmp_path / "out", "--tokens", "1")
    command("generate", "--model", tmp_path / "out", "--tokens", "1", "--quantization", "none")
    assert asked == ["keep", "none"]
    assert load(tmp_path / "out", progress=False, quantization="none").quantization is None
    with pytest.raises(ValueError, match="quantization: expected one of keep, none, found 'nvfp4'"):
        load(tmp_path / "out", quantization="nvfp4")


def test_refusals(command, wide, checkpoint, tmp_path):
    assert_one_error(command("quantize", wide, tmp_path / "new"), "--format")
    assert_one_error(command("quantize", wide, tmp_path / "new", "--format", "int4"), "argument --format")
    assert_one_error(command("quantize", wide, wide, "--format", "nvfp4"), "exists and is not an empty directory")
    narrow = command("quantize", checkpoint, tmp_path / "new", "--format", "nvfp4")
    assert_one_error(narrow, "nothing to hold in 4 bits: the first layer with routed experts stays as it is")
    assert not list(tmp_path.iterdir())


def test_an_interruption_says_how_to_go_on(command, wide, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "quantize", interrupted)
    done = command("quantize", wide, tmp_path / "new", "--format", "nvfp4")
    assert done.code == 130
    assert "the same command goes on from the last finished file" in done.err
