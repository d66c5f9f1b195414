"""`inkling-jax generate`: what it prints where, and that it prints what the library makes."""

import io
import json
import re

import jax.numpy as jnp
import pytest

import inkling_jax

from .conftest import loaded

PROMPT = "def mean(values):"
SHORT = ("--max-new-tokens", 12, "--dtype", "float32")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What the library makes of the prompt, by plain decoding."""
    model = loaded(str(checkpoint), "float32")
    return model.generate(PROMPT, max_new_tokens=12, draft_tokens=0)


def test_it_streams_text_to_stdout_and_statistics_to_stderr(command, checkpoint, expected):
    done = command("generate", "--model", checkpoint, "--prompt", PROMPT, *SHORT)
    assert (done.code, done.out) == (0, expected.text + "\n")
    assert re.search(r"(?m)^\d+ tokens in \d+ rounds \(\d\.\d\d a round\); drafts accepted by position: .* %", done.err)


def test_a_file_and_standard_input_give_what_a_prompt_gives(command, checkpoint, expected, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    from_file = command("generate", "--model", checkpoint, "--file", tmp_path / "prompt.txt", *SHORT)
    assert from_file.out == expected.text + "\n"
    for extra in ((), ("--file", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
        assert command("generate", "--model", checkpoint, *extra, *SHORT).out == expected.text + "\n"


def test_json_is_one_object_and_alone_on_stdout(command, checkpoint, expected):
    done = command("generate", "--model", checkpoint, "--prompt", PROMPT, "--json", *SHORT)
    result = json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert done.code == 0
    assert result["text"] == expected.text
    assert result["tokens"] == expected.tokens
    assert result["finish_reason"] == expected.finish_reason == "length"
    statistics = result["statistics"]
    assert statistics["tokens"] == 12
    assert statistics["tokens_per_round"] == pytest.approx(12 / statistics["rounds"])
    assert len(statistics["acceptance"]) == 1
    assert {"prefill_seconds", "decode_seconds", "compile_seconds"} < statistics.keys()


def test_without_a_tokenizer_ids_go_in_and_come_out(command, ids_only):
    model = loaded(str(ids_only), "float32")
    tokens = model.generate([1, 2, 3], max_new_tokens=12, draft_tokens=0).tokens
    arguments = ("generate", "--model", ids_only, "--tokens", "1,2,3", "--draft-tokens", 0, *SHORT)
    assert command(*arguments).out == ",".join(map(str, tokens)) + "\n"
    result = json.loads(command(*arguments, "--json").out)
    assert result["text"] is None and result["tokens"] == tokens


def test_every_option_reaches_the_library(command, checkpoint, monkeypatch):
    """The options that change the result do so as the library says; the number of drafts shows in the statistics."""
    model = loaded(str(checkpoint), "float32")
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "seed": 5, "draft_tokens": 0, "max_new_tokens": 12}
    expected = model.generate(PROMPT, **sampling, stop=["\x07", "\x08"])
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]
    stops = ("--stop", "\x07", "--stop", "\x08", "--dtype", "float32", "--json")
    result = json.loads(command("generate", "--model", checkpoint, "--prompt", PROMPT, *options, *stops).out)
    assert result["tokens"] == expected.tokens
    assert result["statistics"]["acceptance"] == []
    another = command("generate", "--model", checkpoint, "--prompt", PROMPT, *options, *stops, "--seed", 6)
    assert json.loads(another.out)["tokens"] != result["tokens"]


def test_a_stop_text_ends_the_stream_before_it(command, checkpoint, expected):
    stop = expected.text[4:6]
    assert stop.isascii()
    done = command("generate", "--model", checkpoint, "--prompt", PROMPT, "--stop", stop, *SHORT)
    assert done.out == expected.text[: expected.text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-p", "3"], "argument --top-p: '3' is not a number above 0"),
        (["--top-p", "nan"], "argument --top-p"),
        (["--temperature", "-1"], "argument --temperature: '-1' is not a number from 0 up"),
        (["--temperature", "nan"], "argument --temperature"),
        (["--temperature", "warm"], "argument --temperature"),
        (["--top-k", "0"], "argument --top-k: '0' is not a whole number from 1 up"),
        (["--top-k", "1000"], "top_k: expected 1 to 256"),
        (["--seed", "x"], "argument --seed"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens"),
        (["--max-new-tokens", "9999"], "max_new_tokens"),
        (["--draft-tokens", "-1"], "argument --draft-tokens"),
        (["--draft-tokens", "3"], "draft_tokens: expected 0 to 1"),
        (["--seed", "4294967296"], "argument --seed: '4294967296' is not a whole number from 0 to 4294967295"),
        (["--stop", ""], "argument --stop: the text is empty"),
        (["--dtype", "float16"], "argument --dtype"),
        (["--tokens", "1,2"], "argument --tokens: not allowed with argument --prompt"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--model", "./nowhere"], "nowhere: no such directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line_that_names_it(command, checkpoint, arguments, words):
    done = command("generate", "--model", checkpoint, "--prompt", "x", *arguments)
    assert_one_error(done, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1,two"], "argument --tokens: '1,two' is not a list of token ids"),
        (["--tokens", "1,-2"], "argument --tokens"),
        (["--tokens", "999"], "token id 999 is outside the vocabulary 0 .. 255"),
        (["--prompt", ""], "argument --prompt: the text is empty"),
        (["--file", "/nowhere/prompt.txt"], "--file /nowhere/prompt.txt: No such file or directory"),
    ],
)
def test_a_wrong_prompt_is_one_line_that_names_it(command, checkpoint, arguments, words):
    assert_one_error(command("generate", "--model", checkpoint, *arguments), words)


def test_a_prompt_file_must_be_text(command, checkpoint, tmp_path):
    for content, words in ((b"", "the file is empty"), (b"\xff\xfe\x00", "not UTF-8 text")):
        (tmp_path / "prompt").write_bytes(content)
        done = command("generate", "--model", checkpoint, "--file", tmp_path / "prompt")
        assert_one_error(done, words)
        assert str(tmp_path / "prompt") in done.err


def test_no_prompt_at_all(command, checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert_one_error(command("generate", "--model", checkpoint), "standard input is empty")
    terminal = io.StringIO("")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert_one_error(command("generate", "--model", checkpoint), "no prompt: give --prompt")


def test_text_for_a_checkpoint_without_tokenizer(command, ids_only):
    assert_one_error(command("generate", "--model", ids_only, "--prompt", "x"), "has no tokenizer.json: give token ids")


def test_broken_weights_are_reported_instead_of_text(command, checkpoint, model, tmp_path):
    """NaN logits: an error, and no token that argmax made up."""
    params = model.params | {"norm.weight": jnp.full_like(model.params["norm.weight"], jnp.nan)}
    inkling_jax.save(inkling_jax.Inkling(model.config, params), tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    done = command("generate", "--model", tmp_path / "broken", "--prompt", "x", "--draft-tokens", 0, *SHORT)
    assert_one_error(done, "not finite")


def assert_one_error(done, words: str) -> None:
    assert done.code == 2
    assert done.out == ""
    said = [line for line in done.err.splitlines() if "compil" not in line]
    assert len(said) == 1 and said[0].startswith("error: "), done.err
    assert words in done.err


def test_an_implementation_that_cannot_run_says_why(command, checkpoint):
    done = command("generate", "--model", checkpoint, "--prompt", PROMPT, "--implementation", "triton")
    assert done.code == 2
    assert done.err.startswith("error: inkling_jax: implementation='triton' needs an NVIDIA or AMD GPU")
