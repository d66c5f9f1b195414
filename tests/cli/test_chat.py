"""`inkling-jax chat`: one question, and a conversation in the terminal; what goes where."""

import io
import json
import re

import pytest

from inkling_jax import Inkling, save
from inkling_jax.cli import chat
from tests import talking
from tests.talking import ANSWER, THOUGHT

from .test_generate import assert_one_error

FLOAT = ("--dtype", "float32", "--max-new-tokens", 60)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A checkpoint that can chat."""
    directory = tmp_path_factory.mktemp("chat") / "talker"
    save(talking.talking_model(), directory)
    talking.library().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def asked(monkeypatch):
    """Every conversation that the model is asked to go on with, and the settings."""
    found = []

    def watched(method):
        def spy(self, messages, **settings):
            found.append(([dict(message) for message in messages], settings))
            return method(self, messages, **settings)

        return spy

    for method in (Inkling.chat, Inkling.chat_stream):
        monkeypatch.setattr(Inkling, method.__name__, watched(method))
    return found


def terminal(monkeypatch, *lines):
    keyboard = io.StringIO("".join(f"{line}\n" for line in lines))
    keyboard.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", keyboard)


def test_the_answer_goes_to_stdout_and_all_else_to_stderr(command, talker):
    done = command("chat", "--model", talker, "--prompt", "What is 2 times 3?", *FLOAT)
    assert (done.code, done.out) == (0, f"{ANSWER}\n")
    said = [line for line in done.err.splitlines() if "compil" not in line]
    assert said[0] == THOUGHT
    assert re.match(r"\d+ tokens in \d+ rounds", said[1]) and len(said) == 2


def test_thinking_is_dim_in_a_terminal(command, talker, monkeypatch):
    monkeypatch.setattr(chat, "_style", lambda code: code)
    done = command("chat", "--model", talker, "--prompt", "What is 2 times 3?", *FLOAT)
    assert done.out == f"{ANSWER}\n"
    assert f"{chat.DIM}{THOUGHT}{chat.PLAIN}\n" in done.err
    done = command("chat", "--model", talker, "--prompt", "What?", "--dtype", "float32", "--max-new-tokens", 3)
    assert f"{chat.DIM}{THOUGHT[:2]}{chat.PLAIN}\n" in done.err


def test_a_file_and_standard_input_are_a_question_without_their_last_line_end(
    command, talker, tmp_path, monkeypatch, asked
):
    (tmp_path / "question.txt").write_text("What?\n")
    command("chat", "--model", talker, "--file", tmp_path / "question.txt", *FLOAT)
    for extra in ((), ("--file", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("What?\n"))
        assert command("chat", "--model", talker, *extra, *FLOAT).out == f"{ANSWER}\n"
    assert [messages for messages, _ in asked] == [[{"role": "user", "content": "What?"}]] * 3


def test_json_has_the_thinking_apart(command, talker):
    done = command("chat", "--model", talker, "--prompt", "What?", "--json", *FLOAT)
    result = json.loads(done.out)
    assert (done.code, result["text"], result["thinking"], result["finish_reason"]) == (0, ANSWER, THOUGHT, "stop")
    assert result["statistics"]["tokens"] == len(result["tokens"]) + 1


def test_every_option_reaches_the_library(command, talker, asked):
    options = {"max_new_tokens": 9, "draft_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 7}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    more = ("--stop", "zz", "--effort", "low", "--system", "Count.", "--dtype", "float32")
    for last in ((), ("--json",)):
        assert command("chat", "--model", talker, "--prompt", "What?", *words, *more, *last).code == 0
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "What?"}]
    assert asked == [(messages, options | {"stop": ["zz"], "effort": "low"})] * 2
    command("chat", "--model", talker, "--prompt", "What?", "--effort", "0.25", *FLOAT)
    assert asked[-1][1]["effort"] == 0.25


def test_a_conversation_is_remembered_until_ctrl_d(command, talker, monkeypatch, asked):
    terminal(monkeypatch, "One?", "", "Two?")
    done = command("chat", "--model", talker, "--system", "Count.", *FLOAT)
    assert (done.code, done.out) == (0, f"> {ANSWER}\n> > {ANSWER}\n> \n")
    reply = {"role": "assistant", "content": ANSWER, "thinking": THOUGHT}
    before = [{"role": "system", "content": "Count."}, {"role": "user", "content": "One?"}]
    assert [messages for messages, _ in asked] == [before, [*before, reply, {"role": "user", "content": "Two?"}]]


def test_a_turn_that_fails_or_is_broken_off_is_forgotten(command, talker, monkeypatch, asked):
    def broken(*_, **__):
        raise KeyboardInterrupt

    plain, turns = Inkling.chat_stream, iter([broken, None, None])
    monkeypatch.setattr(Inkling, "chat_stream", lambda *a, **k: (next(turns) or plain)(*a, **k))
    terminal(monkeypatch, "One?", "Two?" * 200, "Three?")
    done = command("chat", "--model", talker, *FLOAT)
    assert (done.code, done.out) == (0, f"> > > {ANSWER}\n> \n")
    said = [line for line in done.err.splitlines() if line and "compil" not in line]
    assert said[0] == "broken off" and re.match(r"error: prompt: \d+ tokens and max_new_tokens=60 exceed", said[1])
    assert asked[-1][0] == [{"role": "user", "content": "Three?"}]


def test_a_reply_that_is_cut_off_says_so(command, talker):
    done = command("chat", "--model", talker, "--prompt", "What?", "--dtype", "float32", "--max-new-tokens", 3)
    assert (done.code, done.out) == (0, "\n")
    assert done.err.splitlines()[-2] == "cut off at --max-new-tokens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--effort", "most"], "argument --effort: 'most' is none of none, minimal, "),
        (["--effort", "1"], "argument --effort: '1' is none of none, minimal, "),
        (["--effort", "nan"], "argument --effort"),
        (["--system", ""], "argument --system: the text is empty"),
        (["--prompt", ""], "argument --prompt: the text is empty"),
        (["--file", "/nowhere/question.txt"], "--file /nowhere/question.txt: No such file or directory"),
        (["--prompt", "x", "--file", "y"], "argument --file: not allowed with argument --prompt"),
        (["--prompt", "x", "--temperature", "-1"], "argument --temperature"),
        (["--prompt", "x", "--tokens", "1"], "unrecognized arguments: --tokens 1"),
        (["--prompt", "\n"], "the question is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line_that_names_it(command, talker, arguments, words):
    assert_one_error(command("chat", "--model", talker, *FLOAT, *arguments), words)


def test_a_model_is_needed(command):
    assert_one_error(command("chat", "--prompt", "x"), "the following arguments are required: --model")


def test_json_is_of_one_reply(command, talker, monkeypatch):
    terminal(monkeypatch, "x")
    assert_one_error(command("chat", "--model", talker, "--json"), "--json prints one reply: give --prompt or --file")


def test_a_model_that_cannot_chat_says_so_before_it_asks(command, checkpoint, ids_only, monkeypatch):
    for directory, words in (
        (checkpoint, "this is no chat model: its tokenizer lacks"),
        (ids_only, "no tokenizer.json"),
    ):
        terminal(monkeypatch, "x")
        assert_one_error(command("chat", "--model", directory, "--dtype", "float32"), words)
