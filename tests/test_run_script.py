"""The script `run` finds a Python that fits, and says what is missing where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "dirname", "cat", "cksum")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder to be the whole PATH, with the tools that the script needs and no Python."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    for name in ("run", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(machine: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": str(machine / "bin"), "HOME": str(machine)} | environment
    return subprocess.run([machine / "run", *arguments], env=clean, capture_output=True, text=True)


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def fake_python(path: Path, fits: bool) -> None:
    """Answers the trial as a Python that fits or not, says its name, and fails when asked to make an environment."""
    answer = os.EX_OK if fits else 1
    program(path, f'case $1 in -c) exit {answer};; -V) echo "Python of {path.parent.name}";; *) exit 9;; esac')


def test_without_any_python_it_says_what_is_missing(machine: Path):
    done = run(machine, "install")
    assert done.returncode == 1
    assert "Python 3.12 or newer is missing" in done.stderr and "PYTHON=" in done.stderr


def test_an_old_python_is_passed_over_for_one_in_pyenv(machine: Path):
    fake_python(machine / "bin" / "python3", fits=False)
    fake_python(machine / "bin" / "python3.13", fits=False)  # a pyenv shim that refuses
    assert "is missing" in run(machine, "install").stderr
    fake_python(machine / ".pyenv" / "versions" / "3.13.0" / "bin" / "python3", fits=True)
    done = run(machine, "install")
    assert done.returncode == 9
    assert f"({machine}/.pyenv/versions/3.13.0/bin/python3)" in done.stderr


def test_a_chosen_python_that_does_not_fit_is_named(machine: Path):
    done = run(machine, "install", PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python is not Python 3.12" in done.stderr


def test_this_python_passes_the_trial(machine: Path):
    """The trial itself, against a real interpreter: it passes and only then is asked to make an environment."""
    program(machine / "bin" / "python3", f'[ "$1" = -m ] && exit 9; exec "{sys.executable}" "$@"')
    done = run(machine, "install")
    assert done.returncode == 9
    assert "installing into .venv with Python 3." in done.stderr


def test_an_environment_is_used_again_until_pyproject_changes(machine: Path):
    make = f'mkdir -p "$4/bin"; ln -sf "{machine}/bin/true" "$4/bin/python"'
    for name in ("mkdir", "ln", "true"):
        (machine / "bin" / name).symlink_to(str(shutil.which(name)))
    program(machine / "bin" / "python3", f'case $1 in -c) exit 0;; -V) echo Python;; -m) {make};; esac')
    installs = ["installing" in run(machine, "install").stderr for _ in range(2)]
    (machine / "pyproject.toml").write_text("changed")
    installs += ["installing" in run(machine, "install").stderr for _ in range(2)]
    assert installs == [True, False, True, False]


def test_an_unknown_command_shows_the_usage(machine: Path):
    done = run(machine, "dance")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command: dance\nusage:")
