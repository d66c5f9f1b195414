"""`Inkling` from prompts to completions: independence, settings, stopping, streaming, statistics, compilation."""

import gc
import itertools
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

import inkling_jax
from inkling_jax import Inkling, model
from inkling_jax.decode import engine, session
from tests import cyclic, reference
from tests.cyclic import BLIND, CONFIG, END, TEXT
from tests.precision import relative_error

DEPTHS = CONFIG.mtp_depths


@pytest.fixture(scope="module")
def models() -> tuple[Inkling, Inkling]:
    free, reciting = cyclic.random_model(), cyclic.cyclic_model()
    cyclic.share_programs(free, reciting)
    return free, reciting


@pytest.fixture(scope="module")
def free(models) -> Inkling:
    """Random weights: every token hangs on all before it."""
    return models[0]


@pytest.fixture(scope="module")
def reciting(models) -> Inkling:
    """Recites TEXT from wherever the prompt ends in it, then gives the end token."""
    return models[1]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in reference.random_tokens(CONFIG, length, seed)]


def outcome(completion):
    return completion.tokens, completion.finish_reason, completion.drafted, completion.rejected


# -------------------------------------------------------------------------------------------------------- independence

THREE = [prompt(1, 1), prompt(5, 2), prompt(14, 3)]
SAMPLED = dict(temperature=[0.0, 0.9, 1.2], top_k=[None, 30, None], top_p=[None, None, 0.9], seed=[0, 8, 9])


def alone(free: Inkling, i: int, **settings):
    own = {name: value[i] if isinstance(value, list) else value for name, value in settings.items()}
    return outcome(free.generate(THREE[i], **own)[0])


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_neighbours_padding_and_order_change_nothing(free, settings):
    settings = dict(max_new_tokens=[12, 5, 9], draft_tokens=DEPTHS, **settings)
    single = [alone(free, i, **settings) for i in range(3)]
    assert [outcome(completion) for completion in free.generate(THREE, **settings)] == single
    order = [2, 0, 1]
    moved = {name: [value[i] for i in order] if isinstance(value, list) else value for name, value in settings.items()}
    found = free.generate([THREE[i] for i in order], **moved)
    assert [outcome(completion) for completion in found] == [single[i] for i in order]
    assert [len(tokens) for tokens, *_ in single] == [12, 5, 9]


def test_equal_prompts_get_equal_tokens_by_seed(free):
    found = free.generate([THREE[1]] * 4, 12, DEPTHS, temperature=1.0, seed=[3, 3, 4, 4])
    first, again, other, _ = (completion.tokens for completion in found)
    assert first == again != other


def test_what_lies_behind_the_prompt_does_not_matter(free, monkeypatch):
    """The buffer of tokens is padded with 0; any other id there gives the same result."""
    expected = [outcome(completion) for completion in free.generate(THREE, 8, DEPTHS)]
    plain = engine.Engine.start

    def padded(self, requests, drafts):
        state, settings = plain(self, requests, drafts)
        real = jnp.arange(state.tokens.shape[1]) < state.length[:, None]
        return replace(state, tokens=jnp.where(real, state.tokens, jnp.int32(77))), settings

    monkeypatch.setattr(engine.Engine, "start", padded)
    assert [outcome(completion) for completion in free.generate(THREE, 8, DEPTHS)] == expected


def test_long_prompts_are_prefilled_in_chunks(free, monkeypatch):
    long = prompt(90, 5)
    whole = free.generate(long, 8, DEPTHS)  # a chunk of 128
    monkeypatch.setattr(engine, "PREFILL_CHUNKS", (16,))
    assert outcome(free.generate(long, 8, DEPTHS)[0]) == outcome(whole[0])


def test_tokens_are_the_oracles_and_drafts_change_none(free):
    params = {path: np.asarray(array) for path, array in free.params.items()}
    found = [free.generate(THREE[1], 10, drafts).tokens for drafts in range(DEPTHS + 1)]
    assert found[0] == found[1] == found[2]
    logits = reference.forward(params, CONFIG, [*THREE[1], *found[0]])["logits"]
    assert found[0] == logits.argmax(axis=1)[len(THREE[1]) - 1 : -1].tolist()


def test_default_number_of_drafts_is_one_that_the_model_has(free):
    assert len(free.generate(THREE[1], 2).stats.acceptance) == min(model.DEFAULT_DRAFTS, DEPTHS)


# ------------------------------------------------------------------------------------------------------------- stopping

COUNTS = range(DEPTHS + 1)


def recite(reciting: Inkling, drafts: int, **settings):
    return reciting.generate("a", **{**dict(max_new_tokens=60, draft_tokens=drafts), **settings})


@pytest.mark.parametrize("drafts", COUNTS)
def test_the_end_token_ends_and_is_left_out(reciting, drafts):
    found = recite(reciting, drafts)
    assert (found.text, found.finish_reason) == (TEXT[1:], "stop")
    assert found.tokens == reciting.tokenizer.encode(TEXT[1:])
    assert len(found.drafted) == len(found.rejected) == len(found.tokens)


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("new", [1, 2, 7])
def test_max_new_tokens_is_a_length(reciting, drafts, new):
    found = recite(reciting, drafts, max_new_tokens=new)
    assert (found.text, found.finish_reason) == (TEXT[1 : 1 + new], "length")
    assert len(found.tokens) == new


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("letter", "bcdefgw")
def test_a_stop_id_ends_and_is_left_out(reciting, drafts, letter):
    found = recite(reciting, drafts, stop=reciting.tokenizer.encode(letter))
    assert (found.text, found.finish_reason) == (TEXT[1 : TEXT.index(letter)], "stop")


STOPS = {
    "one token": ("g", "bcdef"),
    "the first token": ("b", ""),
    "several tokens": ("fghijk", "bcde"),
    "a character of two bytes": ("é", TEXT[1:14]),
    "characters of many bytes": (" é€", TEXT[1:13]),
    "at the very end": ("w", TEXT[1:-1]),
    "two of them, the later one first in the list": (["pq", "de"], "bc"),
    "complete first although it begins last": (["cdefgh", "ef"], "bcd"),
    "complete at once": (["ef", "def"], "bc"),
    "text and ids": (["zz", 0, "hi"], "bcdefg"),
}


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("name", STOPS)
def test_a_stop_text_cuts_at_its_beginning(reciting, drafts, name, monkeypatch):
    """However many tokens come between two looks of the host."""
    stop, expected = STOPS[name]
    for rounds in (1, 3, 32):
        monkeypatch.setattr(model, "LOOK", (rounds, 0.0))
        found = recite(reciting, drafts, stop=stop)
        assert (found.text, found.finish_reason) == (expected, "stop")
        assert found.tokens == reciting.tokenizer.encode(expected)
        assert len(found.drafted) == len(found.rejected) == len(found.tokens)


def test_a_call_runs_as_many_rounds_as_take_its_time(reciting, monkeypatch):
    """Not more in the first one, whose time is not known; the text is the same."""
    decode, asked = reciting._engine.decode, []

    def recorded(leaves, state, settings, rounds, **static):
        asked.append(int(rounds))
        return decode(leaves, state, settings, rounds, **static)

    recite(reciting, 0)
    monkeypatch.setattr(reciting._engine, "decode", recorded)
    monkeypatch.setattr(model, "LOOK", (2, 60.0))
    found = recite(reciting, 0)
    assert len(asked) == 2 and asked[0] == 2 and asked[1] > len(found.tokens)
    assert found.text == recite(reciting, DEPTHS).text


def test_a_stop_text_that_never_comes_changes_nothing(reciting):
    assert outcome(recite(reciting, DEPTHS, stop=["xyz", "wa"])[0]) == outcome(recite(reciting, DEPTHS)[0])


def test_stops_may_differ_by_prompt(reciting):
    found = reciting.generate(["a", "a", "n"], 60, DEPTHS, stop=[["fg"], None, "q"])
    assert [completion.text for completion in found] == ["bcde", TEXT[1:], "op"]


def test_a_completion_without_tokens(reciting):
    found = reciting.generate("w", 60, DEPTHS)
    assert (found.text, found.tokens, found.finish_reason) == ("", [], "stop")


def test_special_tokens_do_not_show(reciting):
    """An end token that is not to end anything is in the tokens and not in the text."""
    endless = Inkling(replace(CONFIG, eos_token_ids=()), reciting.params, reciting.tokenizer)
    cyclic.share_programs(reciting, endless)  # end tokens are settings to them
    found = endless.generate("w", 4, DEPTHS)
    assert (found.text, found.tokens) == ("abc", [END, *endless.tokenizer.encode("abc")])


# ------------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("stop", [None, "fghijk", "é€", ["zz", "cdx", "w"]], ids=str)
def test_pieces_are_whole_and_join_to_the_text(reciting, drafts, rounds, stop, monkeypatch):
    monkeypatch.setattr(model, "PIECE", (rounds, 0.0))
    expected = recite(reciting, drafts, stop=stop)
    stream = reciting.stream("a", 60, drafts, stop=stop)
    shown = ""
    for piece in stream:
        assert piece, "an empty piece"
        shown += piece
        assert expected.text.startswith(shown), "a split character, or part of a stop text"
    assert shown == expected.text
    assert outcome(stream.completion) == outcome(expected[0])
    assert (stream.stats.rounds, stream.stats.tokens) == (expected.stats.rounds, expected.stats.tokens)


def test_pieces_come_one_by_one(reciting, monkeypatch):
    monkeypatch.setattr(model, "PIECE", (1, 0.0))
    assert list(reciting.stream("a", 60, 0)) == list(TEXT[1:])


def test_a_stream_has_no_reason_to_end_before_it_ends(reciting, monkeypatch):
    monkeypatch.setattr(model, "PIECE", (1, 0.0))
    stream = reciting.stream("a", 5, 0)
    assert stream.completion.finish_reason is None
    next(stream)
    assert (stream.completion.text, stream.completion.finish_reason) == ("b", None)
    assert "".join(stream) == "cdef" and stream.completion.finish_reason == "length"


def test_a_text_cut_inside_a_character_is_the_same_streamed(reciting):
    """Two of the three bytes of the euro sign: one replacement character, at the very end."""
    settings = dict(max_new_tokens=TEXT.index("€") + 2, draft_tokens=0)
    found = reciting.generate("a", **settings)
    assert found.text == TEXT[1 : TEXT.index("€")] + "\ufffd"
    assert "".join(reciting.stream("a", **settings)) == found.text


# ----------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("new", [11, 12, 60])
def test_statistics_are_those_of_the_flags(reciting, drafts, new):
    """A round's tokens are flagged 1, 2, .. and then 0: the flags tell the rounds and what each accepted."""
    found = recite(reciting, drafts, max_new_tokens=new)
    stats = found.stats
    ended = found.finish_reason == "stop"  # the end token is counted although it is left out
    assert stats.tokens == len(found.tokens) + ended
    full_rounds = found.drafted.count(0)
    assert stats.rounds in (full_rounds, full_rounds + 1)  # the last round may be cut before its last token
    assert stats.tokens_per_round == stats.tokens / stats.rounds
    assert len(stats.acceptance) == drafts
    accepted = [round(share * (stats.rounds - 1)) for share in stats.acceptance]  # the first round had nothing to draft
    cut = stats.rounds + sum(accepted) - stats.tokens
    assert 0 <= cut <= drafts
    for j, count in enumerate(accepted, start=1):
        assert 0 <= count - found.drafted.count(j) <= 1  # at most one accepted draft of a place was cut
    assert stats.prefill_seconds >= 0 and stats.decode_seconds > 0


@pytest.mark.parametrize("drafts", COUNTS)
@pytest.mark.parametrize("look", [(1, 0.0), (64, 0.0)])
def test_what_ran_past_a_stop_text_is_not_counted(reciting, drafts, look, monkeypatch):
    """Whenever the host looks: as many tokens as with the stop text, in the rounds that they take without one."""
    monkeypatch.setattr(model, "LOOK", look)
    found, whole = recite(reciting, drafts, stop="fgh"), recite(reciting, drafts)
    assert found.text == TEXT[1 : TEXT.index("fgh")]
    assert found.stats.tokens == len(found.tokens) + len("fgh")
    rounds = itertools.accumulate((flag == 0 for flag in whole.drafted), initial=1)
    assert found.stats.rounds == list(rounds)[found.stats.tokens - 1]


def test_rejected_drafts_stand_where_they_were_turned_down(reciting):
    found = recite(reciting, DEPTHS, max_new_tokens=20)
    wrong = [i for i, token in enumerate(found.rejected) if token is not None]
    assert wrong
    for i in wrong:
        assert found.drafted[i] == 0
        assert found.rejected[i] != found.tokens[i]
        assert TEXT[i] in BLIND  # the letter before it, after which the second depth knows no better


def test_a_generation_is_a_sequence_and_one_completion_is_itself(reciting):
    found = reciting.generate(["a", "b", "c"], 3, DEPTHS)
    assert [completion.text for completion in found] == ["bcd", "cde", "def"]
    assert len(found) == 3 and found[-1].text == "def" and [c.text for c in found[:2]] == ["bcd", "cde"]
    with pytest.raises(ValueError, match=r"3 completions: index one"):
        _ = found.text
    assert reciting.generate(["a"], 3, DEPTHS).text == "bcd"
    assert found.stats.tokens == 9


# ---------------------------------------------------------------------------------------------------------- compilation


class Compilations:
    """Counts what JAX compiles inside its block."""

    def __enter__(self):
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def _heard(self, event: str, seconds: float, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_):
        monitoring.unregister_event_duration_listener(self._heard)


@pytest.mark.parametrize(
    "changed",
    [
        dict(prompts="abcdefghijklm"),  # another length in the bucket
        dict(temperature=0.7),
        dict(temperature=1.5, top_k=3, top_p=0.4),
        dict(temperature=1e300, top_p=1e-300),
        dict(temperature=0.7, seed=12345),
        dict(stop=[1, 2, "xyz", "é"]),
        dict(max_new_tokens=33),
        dict(max_new_tokens=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", [0, DEPTHS])
def test_other_settings_compile_nothing(reciting, drafts, changed):
    plain = dict(prompts="abc", max_new_tokens=9, draft_tokens=drafts)
    reciting.generate(**plain)
    with Compilations() as found:
        reciting.generate(**{**plain, **changed})
    assert found.count == 0


def test_compilations_are_heard():
    with Compilations() as found:
        jax.jit(lambda x: x * 3 + 1)(1)
    assert found.count > 0


# --------------------------------------------------------------------------------------------------------------- faults


def poisoned(reciting: Inkling, letter: str) -> Inkling:
    """The row of one letter is NaN: harm begins where the letter is read."""
    token = reciting.tokenizer.encode(letter)[0]
    table = reciting.params["embed.weight"].at[token].set(jnp.nan)
    broken = Inkling(CONFIG, {**reciting.params, "embed.weight": table}, reciting.tokenizer)
    cyclic.share_programs(reciting, broken)
    return broken


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_nan_logits_are_reported_with_prompt_and_position(reciting, temperature):
    broken = poisoned(reciting, "g")
    with pytest.raises(FloatingPointError, match=r"logits of prompt 0 at position 7 are not finite"):
        broken.generate("a", 20, 0, temperature)  # g stands at position 6
    assert broken.generate("a", 6, 0, temperature).text == "bcdefg"
    for drafts in range(1, DEPTHS + 1):  # as part of a draft it may be met a round early
        with pytest.raises(FloatingPointError, match=r"logits of prompt 0 at position [567] are not finite"):
            broken.generate("a", 20, drafts, temperature)
    with pytest.raises(FloatingPointError, match=r"prompt 2 at position 1 "):
        broken.generate(["h", "i", "g"], 4, DEPTHS, temperature)
    with pytest.raises(FloatingPointError, match=r"prompt 1 at position 8 "):
        broken.generate(["h", "abcdefgh", "i"], 4, DEPTHS, temperature)


def test_a_broken_prompt_leaves_its_neighbours_alone(reciting):
    """The state behind the error: the others went on with their own tokens, and no token 0 was committed."""
    broken = poisoned(reciting, "g")
    requests = [
        session.Request([token], 3, 0.0, CONFIG.real_vocab_size, 1.0, 0, (), ())
        for token in reciting.tokenizer.encode("hgi")
    ]
    state, settings = broken._engine.start(requests, DEPTHS)
    state = broken._engine.decode(broken._engine.leaves, state, settings, jnp.int32(9), drafts=DEPTHS)
    np.testing.assert_array_equal(state.length, [4, 1, 4, 1])
    for b, text in ((0, "hijk"), (2, "ijkl")):
        assert reciting.tokenizer.decode(np.asarray(state.tokens[b, :4])) == text


def test_a_broken_depth_costs_speed_only(reciting):
    spoiled = {**reciting.params, "mtp.1.proj.weight": jnp.full_like(reciting.params["mtp.1.proj.weight"], jnp.nan)}
    broken = Inkling(CONFIG, spoiled, reciting.tokenizer)
    cyclic.share_programs(reciting, broken)
    found = recite(broken, DEPTHS)
    assert found.text == TEXT[1:]
    assert found.stats.acceptance[0] > 0.9
    assert np.isnan(found.stats.acceptance[1])  # never offered


def test_an_interrupt_leaves_the_model_usable(reciting, monkeypatch):
    expected = outcome(recite(reciting, DEPTHS)[0])
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_apply_stop_texts", interrupt)  # between two looks
        with pytest.raises(KeyboardInterrupt):
            recite(reciting, DEPTHS)
    assert outcome(recite(reciting, DEPTHS)[0]) == expected
    stream = reciting.stream("a", 60, DEPTHS)
    next(stream)
    del stream
    assert outcome(recite(reciting, DEPTHS)[0]) == expected


def interrupt(self):
    raise KeyboardInterrupt


def test_a_model_that_is_let_go_frees_its_memory_at_once():
    """Not when Python next looks for cycles: in a notebook another model would find the GPU full."""
    model = cyclic.random_model()
    model.generate(prompt(3), 2, 0)
    gc.collect()
    gc.disable()
    try:
        weights = weakref.ref(model.params["embed.weight"])
        del model
        assert weights() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------------------- logits


@pytest.mark.parametrize("length", [2 + DEPTHS, 16, 17, 40])
def test_logits_agree_with_the_oracle(free, length, monkeypatch):
    monkeypatch.setattr(engine, "PREFILL_CHUNKS", (16,))
    params = {path: np.asarray(array) for path, array in free.params.items()}
    tokens = prompt(length, length)
    found = free.logits(tokens)
    assert (found.shape, found.dtype) == ((length, CONFIG.real_vocab_size), jnp.float32)
    assert relative_error(found, reference.forward(params, CONFIG, tokens)["logits"]) < 1e-5
    for depth in range(DEPTHS):
        found = free.mtp_logits(tokens, depth)
        assert found.shape == (length - depth - 1, CONFIG.real_vocab_size)
        assert relative_error(found, reference.depth_logits(params, CONFIG, tokens, depth)) < 1e-5


def test_logits_of_a_batch_are_those_of_its_rows(free):
    tokens = np.stack([prompt(9, seed) for seed in range(2)])
    found = free.logits(tokens)
    assert found.shape == (2, 9, CONFIG.real_vocab_size)
    for row, own in zip(found, tokens, strict=True):
        np.testing.assert_allclose(row, free.logits(own.tolist()), atol=1e-5)


@pytest.mark.parametrize("layout", ["original", "transformers"])
def test_save_and_load_give_the_same_model(free, layout, tmp_path):
    inkling_jax.save(free, tmp_path / "saved", layout)
    loaded = inkling_jax.load(tmp_path / "saved", dtype="float32", progress=False)
    assert loaded.config == CONFIG
    cyclic.share_programs(free, loaded)
    np.testing.assert_array_equal(loaded.logits(prompt(9)), free.logits(prompt(9)))
    np.testing.assert_array_equal(loaded.mtp_logits(prompt(9), 1), free.mtp_logits(prompt(9), 1))
