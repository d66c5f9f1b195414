"""What `generate`, `stream`, `logits` and `load` refuse: one error that names the argument, before any work begins."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import inkling_jax
from inkling_jax import CheckpointError, Inkling, checkpoint, memory
from inkling_jax.decode import engine
from tests import cyclic
from tests.cyclic import CONFIG, END


@pytest.fixture(scope="module")
def model() -> Inkling:
    return cyclic.cyclic_model()


@pytest.fixture(scope="module")
def without_tokenizer(model) -> Inkling:
    return Inkling(model.config, model.params)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """Refused before any work: neither a state nor a cache is made."""

    def refuse(*_):
        raise AssertionError("work began")

    monkeypatch.setattr(engine, "make_cache", refuse)


NAN, INF = float("nan"), float("inf")
BAD = [
    (dict(draft_tokens=CONFIG.mtp_depths + 1), r"^draft_tokens: expected 0 to 2.* found 3"),
    (dict(draft_tokens=-1), r"^draft_tokens: expected 0 to 2.* found -1"),
    (dict(draft_tokens=True), r"^draft_tokens: .* found True"),
    (dict(draft_tokens=1.0), r"^draft_tokens: .* found 1.0"),
    (dict(temperature=-0.1), r"^temperature: expected 0 \(greedy\) or more, found -0.1"),
    (dict(temperature=NAN), r"^temperature: .*found nan"),
    (dict(temperature=INF), r"^temperature: .*found inf"),
    (dict(temperature="warm"), r"^temperature: .*found 'warm'"),
    (dict(top_k=0), rf"^top_k: expected 1 to {END + 1}, found 0"),
    (dict(top_k=END + 2), rf"^top_k: expected 1 to {END + 1}, found {END + 2}"),
    (dict(top_k=2.5), r"^top_k: expected a whole number, found 2.5"),
    (dict(top_k=True), r"^top_k: expected a whole number, found True"),
    (dict(top_p=0), r"^top_p: expected more than 0 and at most 1, found 0"),
    (dict(top_p=1.01), r"^top_p: expected more than 0 and at most 1, found 1.01"),
    (dict(top_p=NAN), r"^top_p: .*found nan"),
    (dict(max_new_tokens=0), r"^max_new_tokens: expected at least 1, found 0"),
    (dict(max_new_tokens=3.0), r"^max_new_tokens: expected a whole number, found 3.0"),
    (dict(seed=-1), r"^seed: expected 0 to 4294967295, found -1"),
    (dict(seed=2**32), r"^seed: expected 0 to 4294967295, found 4294967296"),
    (dict(seed=None), r"^seed: expected a whole number, found None"),
    (dict(stop=""), r"^stop: an empty text"),
    (dict(stop=END + 1), rf"^stop: token id {END + 1} is outside the vocabulary 0 .. {END}"),
    (dict(stop=-1), r"^stop: token id -1 is outside"),
    (dict(stop=1.5), r"^stop: expected text, a token id or a list of them, found 1.5"),
    (dict(stop=b"abc"), r"^stop: expected text, a token id or a list of them, found b'abc'"),
    (dict(stop=[1.5]), r"^stop: expected a list of integers"),
    (dict(prompts=""), r"^prompt is empty"),
    (dict(prompts=[]), r"^prompt is empty"),
    (dict(prompts=["a", ""]), r"^prompt 1 is empty"),
    (dict(prompts=[[1], []]), r"^prompt 1 is empty"),
    (dict(prompts=[1, END + 1]), rf"^prompt: token id {END + 1} is outside the vocabulary 0 .. {END}"),
    (dict(prompts=["a", [-1]]), r"^prompt 1: token id -1 is outside the vocabulary"),
    (dict(prompts=[1, 2.5]), r"^prompt: expected a list of integers"),
    (dict(prompts=[True, False]), r"^prompt: expected a list of integers"),
    (dict(prompts=[[[1]]]), r"^prompt 0: expected a list of integers"),
    (dict(prompts=[1, [2]]), r"^prompt: expected integers in rows of one length"),
    (dict(prompts=7), r"^prompt: expected a list of integers"),
    (dict(prompts=None), r"^prompt: expected a list of integers"),
    (dict(max_new_tokens=CONFIG.max_context), r"^prompt: 3 tokens and max_new_tokens=512 exceed .*context of 512"),
    (dict(prompts=["a", [1] * 500], max_new_tokens=13), r"^prompt 1: 500 tokens and max_new_tokens=13 exceed"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: str(value)[:60])
def test_generate_refuses(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**{"prompts": "abc", **arguments})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0.5]),
        ("temperature", []),
        ("top_k", [1, 2, 3]),
        ("top_p", (0.5,)),
        ("seed", np.arange(3)),
        ("max_new_tokens", [1]),
    ],
)
def test_lists_have_one_value_a_prompt(model, name, values):
    with pytest.raises(ValueError, match=rf"^{name}: {len(values)} values for 2 prompts"):
        model.generate(["a", "b"], **{name: values})


def test_lists_of_stops_have_one_a_prompt(model):
    with pytest.raises(ValueError, match=r"^stop: 3 lists for 2 prompts"):
        model.generate(["a", "b"], stop=[["x"], None, ["y"]])


@pytest.mark.parametrize(("name", "values"), [("temperature", [1.0, -1.0]), ("top_k", [None, 0]), ("top_p", [0.5, 2])])
def test_one_bad_value_of_a_list_is_enough(model, name, values):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*found {values[1]}"):
        model.generate(["a", "b"], **{name: values})


def test_text_needs_a_tokenizer(without_tokenizer):
    with pytest.raises(ValueError, match=r"^prompt is text, but this checkpoint has no tokenizer.json: give token ids"):
        without_tokenizer.generate("abc")
    with pytest.raises(ValueError, match=r"^stop: this checkpoint has no tokenizer.json"):
        without_tokenizer.generate([1, 2], stop="x")
    with pytest.raises(ValueError, match=r"stream yields text, but this checkpoint has no tokenizer.json"):
        without_tokenizer.stream([1, 2])


def test_a_stream_is_of_one_prompt(model):
    with pytest.raises(ValueError, match=r"^stream takes one prompt"):
        model.stream(["a", "b"])


def test_a_stream_refuses_before_the_first_piece(model):
    with pytest.raises(ValueError, match=r"^top_p: "):
        model.stream("a", top_p=0)


def test_a_depth_that_is_not_there_cannot_draft():
    config = replace(CONFIG, mtp_depths=0, mtp_local=())
    params = {path: array for path, array in cyclic.cyclic_params().items() if not path.startswith("mtp")}
    plain = Inkling(config, {path: jnp.asarray(array) for path, array in params.items()}, cyclic.tokenizer())
    with pytest.raises(ValueError, match=r"^draft_tokens: expected 0 to 0, the model's MTP depths, found 1"):
        plain.generate("a", draft_tokens=1)


@pytest.mark.parametrize("what", ["generate", "logits"])
def test_a_cache_that_cannot_fit_is_refused(model, monkeypatch, what):
    monkeypatch.undo()  # its size is told by the cache that would be made
    monkeypatch.setattr(engine, "free_memory", lambda _: 100_000)
    with pytest.raises(MemoryError, match=r"needs \d+\.\d+ GiB and 0\.00 GiB are free: lower max_new_tokens"):
        model.generate("a", 400) if what == "generate" else model.logits([1] * 400)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(checkpoint, "load_parameters", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(MemoryError, match=r"^the weights need 0\.01 GiB on each device, and 0\.00 GiB are free"):
        inkling_jax.load("nano")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"^tokens is empty"),
        ([[]], r"^tokens is empty"),
        (np.zeros((0, 3), int), r"^tokens is empty"),
        ([1, END + 1], rf"^tokens: token id {END + 1} is outside the vocabulary 0 .. {END}"),
        ([[1, 2], [3, -4]], r"^tokens: token id -4 is outside"),
        ([0.5], r"^tokens: expected a list of integers"),
        (3, r"^tokens: expected a list of integers"),
        ([[1, 2], [3]], r"^tokens: expected integers in rows of one length"),
        ([[[1]]], r"^tokens: expected a list of integers"),
        ("text", r"^tokens: expected a list of integers"),
        ([1] * (CONFIG.max_context + 1), r"^tokens: 513 exceed the model's context of 512"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_logits_refuse(model, tokens, message):
    with pytest.raises(ValueError, match=message):
        model.logits(tokens)


@pytest.mark.parametrize("depth", [-1, CONFIG.mtp_depths, True, 0.0, None])
def test_mtp_logits_refuse_a_depth_that_is_not_there(model, depth):
    with pytest.raises(ValueError, match=r"^depth: expected 0 to 1, found "):
        model.mtp_logits([1, 2, 3, 4], depth)


@pytest.mark.parametrize("depth", range(CONFIG.mtp_depths))
def test_mtp_logits_need_a_row(model, depth):
    with pytest.raises(ValueError, match=rf"^tokens: {depth + 1} .*give at least {depth + 2}"):
        model.mtp_logits([1] * (depth + 1), depth)


def test_whole_numbers_of_numpy_will_do(model, monkeypatch):
    monkeypatch.undo()
    expected = model.generate("a", 3, draft_tokens=1)
    assert model.generate("a", np.int64(3), draft_tokens=np.int32(1)).tokens == expected.tokens
    np.testing.assert_array_equal(model.mtp_logits([1, 2, 3], np.int64(0)), model.mtp_logits([1, 2, 3], 0))


def test_load_refuses_before_it_reads_weights(tmp_path, monkeypatch):
    """A tokenizer that is none, and a mesh that does not divide, before the weights of a hub id are even fetched."""
    shutil.copytree(checkpoint.resolve("nano"), tmp_path / "nano")
    (tmp_path / "nano" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(checkpoint, "load_parameters", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer file"):
        inkling_jax.load(tmp_path / "nano")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer file"):
        checkpoint.inspect(tmp_path / "nano")

    def resolve(path, weights=True):
        assert not weights, "weights are fetched"
        return tmp_path / "nano"

    monkeypatch.setattr(checkpoint, "resolve", resolve)
    with pytest.raises(ValueError, match=r"vocab_size = \d+ does not divide by 7"):
        inkling_jax.load("owner/name", mesh={"tensor": 7})


@pytest.mark.parametrize("dtype", ["float16", "fp32", "int8", None])
def test_load_refuses_other_dtypes(dtype, tmp_path):
    with pytest.raises(ValueError, match=r"^dtype: expected one of bfloat16, float32, found "):
        inkling_jax.load(tmp_path, dtype=dtype)


def test_parameters_that_do_not_fit_are_all_named(model):
    params = dict(model.params)
    del params["norm.weight"]
    params["more"] = params["unembed.weight"]
    params["layers.0.attn.wq.weight"] = jnp.zeros((3, 3))
    with pytest.raises(ValueError, match="do not fit the config") as error:
        Inkling(model.config, params)
    for line in (
        "norm.weight: missing",
        "more: unexpected",
        "layers.0.attn.wq.weight: expected float32[32, 40], found",
    ):
        assert line in str(error.value)
