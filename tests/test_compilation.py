"""The persistent cache and the announcements, against JAX's own events and configuration."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from inkling_jax import compilation


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilation, "PATIENCE_SECONDS", 0.02)


def compile_for(seconds: float):
    """What JAX reports of a compile that takes this long."""
    jax.monitoring.record_event_duration_secs(compilation._LOWERED, 0.0)
    time.sleep(seconds)
    jax.monitoring.record_event_duration_secs(compilation._COMPILED, seconds)


def test_a_real_compile_is_announced_once(capsys):
    @jax.jit
    def step(x):
        for i in range(200):
            x = jnp.sin(x @ x) + i
        return x

    x = jnp.ones((8, 8))
    for _ in range(2):
        with compilation.announce("the toy step"):
            step(x)
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first == "compiling the toy step ..."
    assert second.startswith("compiled the toy step in ") and second.endswith(" s")


def test_long_work_without_a_compile_is_quiet(capsys):
    with compilation.announce("nothing"):
        time.sleep(0.08)
    assert capsys.readouterr().err == ""


def test_a_short_compile_is_quiet(capsys, monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE_SECONDS", 5.0)
    with compilation.announce("a trifle"):
        compile_for(0.0)
    assert capsys.readouterr().err == ""


def test_the_inner_of_two_blocks_is_named_and_the_outer_returns(capsys):
    with compilation.announce("outer"):
        with compilation.announce("inner"):
            compile_for(0.1)
        compile_for(0.1)
    names = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert names == ["inner", "inner", "outer", "outer"]


def test_a_compile_of_another_thread_is_not_heard(capsys):
    with compilation.announce("mine"):
        other = threading.Thread(target=compile_for, args=[0.1])
        other.start()
        other.join()
    assert capsys.readouterr().err == ""


def test_an_error_stops_the_clock(capsys):
    with pytest.raises(RuntimeError, match="broken"), compilation.announce("a failure"):
        jax.monitoring.record_event_duration_secs(compilation._LOWERED, 0.0)
        raise RuntimeError("broken")
    time.sleep(0.08)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["", "0", "off", "OFF"])
def test_the_variable_disables_the_cache(monkeypatch, value):
    monkeypatch.setenv(compilation.CACHE_VARIABLE, value)
    assert compilation.default_cache_dir() is None


def test_the_default_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv(compilation.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation.default_cache_dir() == tmp_path / "inkling_jax" / "compilation"


ENABLE = """
import jax
from inkling_jax import compilation
print(compilation.enable_cache(), jax.config.jax_compilation_cache_dir)
"""


def enabled(script: str = ENABLE, **environment: str) -> str:
    """What a fresh process says of its cache: JAX's configuration is one for a whole process."""
    clean = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_cache_is_on_by_default_and_in_the_chosen_place(tmp_path):
    default = tmp_path / "home/.cache/inkling_jax/compilation"
    assert enabled(HOME=str(tmp_path / "home")) == f"{default} {default}"
    chosen = tmp_path / "chosen"
    assert enabled(HOME=str(tmp_path), INKLING_JAX_CACHE_DIR=str(chosen)) == f"{chosen} {chosen}"


def test_programs_are_kept_also_when_something_was_compiled_before(tmp_path):
    script = """
import jax, os
jax.jit(lambda x: x + 1)(1.0)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from inkling_jax import compilation
directory = compilation.enable_cache()
jax.jit(lambda x: x * 7)(1.0)
print(any("cache" in name for name in os.listdir(directory)), jax.config.jax_compilation_cache_max_size)
"""
    assert enabled(script, INKLING_JAX_CACHE_DIR=str(tmp_path)) == f"True {compilation.CACHE_BYTES}"


def test_a_cache_that_jax_already_has_is_kept(tmp_path):
    assert enabled(HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR="/elsewhere") == "/elsewhere /elsewhere"


def test_a_cache_switched_off_stays_off(tmp_path):
    assert enabled(HOME=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="false") == "None None"
    assert enabled(HOME=str(tmp_path), INKLING_JAX_CACHE_DIR="off") == "None None"


def test_a_directory_that_cannot_be_made_leaves_the_cache_off(tmp_path):
    (tmp_path / "file").touch()
    assert enabled(HOME=str(tmp_path), INKLING_JAX_CACHE_DIR=str(tmp_path / "file" / "below")) == "None None"
