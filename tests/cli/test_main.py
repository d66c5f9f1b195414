"""The command as a whole: help, interruption, a reader that goes away, errors that nobody foresaw."""

import os
import signal
import subprocess
import sys
import time

import jax
import pytest

import inkling_jax
from inkling_jax.cli import generate

COMMANDS = ("generate", "chat", "inspect", "convert", "quantize", "bench", "doctor")
# A test run that a shell put into the background ignores Ctrl-C, and a process inherits that: hence the handler.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from inkling_jax.cli import main
print("ready", file=sys.stderr, flush=True)
sys.exit(main())
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command in a process of its own; returns when its imports are done."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.stderr
    while (line := process.stderr.readline()) != "ready\n":
        assert line, "the process ended early"
    return process


def test_help_teaches_by_example(command):
    done = command("--help")
    assert done.code == 0
    assert all(f"inkling-jax {name}" in done.out for name in COMMANDS)


def test_the_version_is_told(command):
    done = command("--version")
    assert (done.code, done.out) == (0, f"inkling-jax {inkling_jax.__version__}, jax {jax.__version__}\n")


@pytest.mark.parametrize(("closed", "words"), [(">&-", "standard output is closed"), ("<&-", "no prompt: give")])
def test_a_closed_stream_is_one_line(closed, words):
    shell = f"exec {sys.executable} -c 'from inkling_jax.cli import main; raise SystemExit(main())' generate {closed}"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {words}")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command, name):
    done = command(name, "--help")
    assert done.code == 0
    assert f"usage: inkling-jax {name}" in done.out and "example" in done.out.lower()


@pytest.mark.parametrize(("arguments", "words"), [((), "COMMAND"), (("dance",), "invalid choice: 'dance'")])
def test_a_wrong_command_is_one_line(command, arguments, words):
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and words in done.err and done.err.count("\n") == 1


def test_ctrl_c_ends_a_real_process_without_a_traceback():
    process = start("generate")  # waits for a prompt on standard input
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\ninterrupted\n")


def test_ctrl_c_while_loading(command, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load", interrupted)
    done = command("generate", "--prompt", "x")
    assert (done.code, done.out, done.err) == (130, "", "\ninterrupted\n")


def test_a_reader_that_goes_away_is_no_error(checkpoint):
    with start("inspect", checkpoint) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_an_unforeseen_error_is_one_line_unless_the_traceback_is_asked_for(command, monkeypatch):
    def broken(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr(generate, "load", broken)
    done = command("generate", "--prompt", "x")
    assert (done.code, done.err) == (2, "error: KeyError: 'surprise' (--traceback shows where)\n")
    assert "Traceback (most recent call last)" in command("generate", "--prompt", "x", "--traceback").err


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(command, checkpoint, tmp_path):
    text = (checkpoint / "config.json").read_text().replace('"hidden_size"', '"novelty": 1, "hidden_size"')
    (tmp_path / "config.json").write_text(text)
    done = command("inspect", tmp_path / "config.json")
    assert done.code == 0
    assert done.err.startswith("warning: ") and "novelty" in done.err and done.err.count("\n") == 1
