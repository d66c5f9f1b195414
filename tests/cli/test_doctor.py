"""`inkling-jax doctor`: what it says of a sound machine, and that it notices a broken one."""

import jax
import pytest

import inkling_jax
from inkling_jax.cli import doctor

from .conftest import loaded


@pytest.fixture(autouse=True)
def the_tiny_model_is_nano(monkeypatch, checkpoint, tmp_path):
    monkeypatch.setattr(inkling_jax, "load", lambda path, dtype, progress: loaded(str(checkpoint), dtype))
    monkeypatch.setenv("INKLING_JAX_CACHE_DIR", str(tmp_path / "compiled"))


def test_a_sound_machine_is_ready(command):
    done = command("doctor")
    assert done.code == 0, done.out
    assert done.out.endswith("ready\n")
    assert f"jax {jax.__version__}" in done.out
    assert "cpu 0" in done.out
    assert "tokens on plain JAX, the same with drafts" in done.out
    assert "BROKEN" not in done.out


def test_a_model_that_cannot_be_loaded_is_broken(command, monkeypatch):
    def missing(*_, **__):
        raise inkling_jax.CheckpointError("nano: no safetensors files")

    monkeypatch.setattr(inkling_jax, "load", missing)
    done = command("doctor")
    assert done.code == 1
    assert "BROKEN CheckpointError: nano: no safetensors files" in done.out
    assert done.out.endswith("something is broken: see above\n")


def test_drafts_that_change_the_text_are_broken(command, monkeypatch, checkpoint):
    class Liar:
        def generate(self, prompts, max_new_tokens, draft_tokens):
            first = 1 if draft_tokens == 0 else 2
            completion = inkling_jax.Completion("text", [first], "length", [0], [None])
            return inkling_jax.Generation([completion], inkling_jax.Statistics(1, 1, [], 0.0, 0.0, 0.0))

    monkeypatch.setattr(inkling_jax, "load", lambda *_, **__: Liar())
    done = command("doctor")
    assert done.code == 1
    assert "BROKEN drafts changed the greedy text" in done.out


def test_a_failing_device_does_not_hide_the_rest(command, monkeypatch):
    def no_devices():
        raise RuntimeError("no devices today")

    monkeypatch.setattr(jax, "devices", no_devices)
    done = command("doctor")
    assert done.code == 1
    assert "BROKEN RuntimeError: no devices today" in done.out
    assert "compilation cache" in done.out and "small run" in done.out


@pytest.mark.parametrize("version", ["0.10.1", "0.11.1", "0.13.0"])
def test_an_unsupported_jax_is_broken(monkeypatch, version):
    monkeypatch.setattr(doctor, "version", lambda package: version)
    broken = [finding for finding in doctor._versions() if finding.state == "broken"]
    assert [finding.text for finding in broken] == [f"jax {version} is not supported"]
    assert broken[0].fix == 'pip install "jax>=0.11.2,<0.13"'


def test_a_cache_that_is_off_is_a_warning_with_a_fix(monkeypatch, tmp_path):
    monkeypatch.setattr("inkling_jax.compilation.enable_cache", lambda: None)
    monkeypatch.setenv("INKLING_JAX_CACHE_DIR", "off")
    [finding] = doctor._cache()
    assert finding.state == "warn" and "switched off" in finding.text
    assert finding.fix and "INKLING_JAX_CACHE_DIR" in finding.fix
