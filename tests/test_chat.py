"""Chat: the exact ids of conversations, thinking and answer apart, and text that cannot become a special token.

What a conversation must look like is written out here as vLLM's and SGLang's tests have it, the latter recorded from
tml-renderers, with <|message_model|> behind it as the checkpoints' template has.
"""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_jax import ChatFormat, Inkling, model
from inkling_jax.chat import Sections
from inkling_jax.decode import engine
from inkling_jax.tokenizer import Tokenizer
from tests import cyclic, talking
from tests.talking import ANSWER, CONFIG, END_TURN, THOUGHT, TOKENIZER, TOKENS
from tests.test_generate import Compilations

FORMAT = ChatFormat(TOKENIZER)
EFFORT = "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
HI = "<|message_user|><|content_text|>hi<|end_message|>"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def spelled(ids: list[int]) -> str:
    """Ids as a reader wants them: the format's tokens by name."""
    pieces = [TOKENS[id - 257] if id >= 257 else TOKENIZER.piece(id).decode("latin-1") for id in ids]
    return "".join(pieces).encode("latin-1").decode()


# -------------------------------------------------------------------------------------------------------- conversations

CONVERSATIONS = {
    "a text is one message of the user": ("hi", f"{EFFORT}{HI}<|message_model|>"),
    "the effort stands behind the leading system messages": (
        [{"role": "system", "content": "rules"}, {"role": "system", "content": "policy"}, user("hi")],
        f"<|message_system|><|content_text|>rules<|end_message|><|message_system|><|content_text|>policy<|end_message|>"
        f"{EFFORT}{HI}<|message_model|>",
    ),
    "a turn of the model ends with a token of its own": (
        [user("hi"), {"role": "assistant", "content": "yes?"}, user("é")],
        f"{EFFORT}{HI}<|message_model|><|content_text|>yes?<|end_message|><|content_model_end_sampling|>"
        f"<|message_user|><|content_text|>é<|end_message|><|message_model|>",
    ),
    "its thinking stays, ahead of the answer": (
        [user("hi"), {"role": "assistant", "content": "answer", "thinking": "think"}, user("hi")],
        f"{EFFORT}{HI}<|message_model|><|content_thinking|>think<|end_message|>"
        f"<|message_model|><|content_text|>answer<|end_message|><|content_model_end_sampling|>{HI}<|message_model|>",
    ),
    "a turn that was cut off in its thinking has no answer": (
        [user("hi"), {"role": "assistant", "content": "", "thinking": "thi"}, user("hi")],
        f"{EFFORT}{HI}<|message_model|><|content_thinking|>thi<|end_message|><|content_model_end_sampling|>"
        f"{HI}<|message_model|>",
    ),
    "a later system message stays where it is": (
        [user("hi"), {"role": "system", "content": "be brief"}, user("hi")],
        f"{EFFORT}{HI}<|message_system|><|content_text|>be brief<|end_message|>{HI}<|message_model|>",
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_has_exactly_these_ids(name):
    messages, expected = CONVERSATIONS[name]
    ids = FORMAT.encode(messages)
    assert spelled(ids) == expected
    assert ids == TOKENIZER.encode(expected)  # no text here spells a token, so this too is the truth


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        *zip(["none", "minimal", "low", "medium"], ["0", "0.1", "0.2", "0.7"], strict=True),
        *zip(["high", "xhigh", "max"], ["0.9", "0.99", "0.99"], strict=True),
        *[(0, "0"), (0.0, "0"), (-0.0, "0"), (0.123, "0.12"), (0.5, "0.5"), (0.99, "0.99"), (0.001, "0")],
        (np.float32(0.99), "0.99"),
    ],
)
def test_the_effort_is_told_with_two_digits_at_most(effort, number):
    expected = f"<|message_system|><|content_text|>Thinking effort level: {number}<|end_message|>{HI}<|message_model|>"
    assert spelled(FORMAT.encode("hi", effort)) == expected


def test_a_shorter_conversation_begins_a_longer_one():
    messages = [user("hi"), {"role": "assistant", "content": "a", "thinking": "t"}, user("more")]
    first, longer = FORMAT.encode(messages[:1]), FORMAT.encode(messages)
    assert longer[: len(first)] == first


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain added tokens"])
@given(text=st.lists(st.sampled_from([*TOKENS, "<|", "|>", "é", "x"]), min_size=1, max_size=8).map("".join))
def test_no_text_becomes_a_token_of_the_format(special, text):
    """Whether or not the file calls the tokens special."""
    format = ChatFormat(Tokenizer(talking.library(special)) if not special else TOKENIZER)
    around = spelled(format.encode([{"role": "system", "content": "?"}, user("?")]))
    before, between, after = around.split("?")
    messages = [{"role": "system", "content": text}, user(text)]
    ids = format.encode(messages)
    assert [id for id in ids if id >= 257] == [id for id in TOKENIZER.encode(around) if id >= 257]
    assert spelled(ids) == f"{before}{text}{between}{text}{after}"


def test_text_is_taken_as_it_is():
    ids = FORMAT.encode("a\n <|end_message|>")
    spell = TOKENIZER.encode("a\n <|end_message") + TOKENIZER.encode("|>")  # apart, it is no token
    assert ids == [
        *TOKENIZER.encode(EFFORT + "<|message_user|><|content_text|>"),
        *spell,
        *TOKENIZER.encode("<|end_message|><|message_model|>"),
    ]


BAD_MESSAGES = [
    ("", r"^messages\[0\]: content is empty"),
    ([], r'^messages: the last one must be of the role "user"'),
    ([user("a"), {"role": "assistant", "content": "b"}], r'^messages: the last one must be of the role "user"'),
    ([{"role": "system", "content": "a"}], r'^messages: the last one must be of the role "user"'),
    (7, r"^messages: expected a text or a list of messages, found 7"),
    (b"hi", r"^messages: expected a text or a list of messages, found b'hi'"),
    (["hi"], r"^messages\[0\]: expected \{\"role\": ..., \"content\": ...\}, found 'hi'"),
    ([user("a"), {"content": "b"}], r"^messages\[1\]: role: expected system, user or assistant, found None"),
    ([{"role": ["user"], "content": "b"}], r"^messages\[0\]: role: expected system, user or assistant"),
    ([{"role": "tool", "content": "b"}], r"^messages\[0\]: role: .* found 'tool' \(tools are not supported\)"),
    ([user("a") | {"thinking": "b"}], r"^messages\[0\]: thinking: a message of the user has role, content only"),
    ([{"role": "assistant", "content": "b", "tool_calls": []}, user("a")], r"^messages\[0\]: tool_calls: a message of"),
    ([user("a"), user("")], r"^messages\[1\]: content is empty"),
    ([{"role": "user"}], r"^messages\[0\]: content is empty"),
    ([user([{"type": "image"}])], r"^messages\[0\]: content: expected text \(images and audio are not"),
    ([user("a\udcff")], r"text is not valid Unicode at character 1"),
]


@pytest.mark.parametrize(("messages", "error"), BAD_MESSAGES, ids=lambda value: str(value)[:50])
def test_a_bad_message_is_named(messages, error):
    with pytest.raises(ValueError, match=error):
        FORMAT.encode(messages)


@pytest.mark.parametrize("effort", ["", "most", -0.1, 0.991, 1, float("nan"), float("inf"), True, None, [0.5]])
def test_a_bad_effort_is_named(effort):
    with pytest.raises(ValueError, match=r"^effort: expected none, minimal, .*, max or a number from 0 to 0.99, found"):
        FORMAT.encode("hi", effort)


def test_a_model_that_is_not_for_chat_says_which_tokens_it_lacks(monkeypatch):
    monkeypatch.setattr(engine, "make_cache", lambda *_: pytest.fail("work began"))
    reciting = cyclic.cyclic_model()
    lacks = re.escape(f"lacks {'<|message_system|>, <|message_user|>'}")
    for chat in (reciting.chat, reciting.chat_stream):
        with pytest.raises(ValueError, match=rf"^this is no chat model: its tokenizer {lacks}.*; use generate"):
            chat("hi")
        with pytest.raises(ValueError, match=r"^chat needs a tokenizer, but this checkpoint has no tokenizer.json"):
            getattr(Inkling(reciting.config, reciting.params), chat.__name__)("hi")
    some = talking.library().to_str().replace("<|content_thinking|>", "<|content_th|>")
    with pytest.raises(ValueError, match=r"its tokenizer lacks <\|content_thinking\|>; use"):
        ChatFormat(Tokenizer(talking.tokenizers.Tokenizer.from_str(some)))


# -------------------------------------------------------------------------------------------------------------- replies

PLAIN_MARKERS = "see <|content_thinking|> and <|end_message|>"
REPLIES = {
    "thinking, then the answer": (
        "<|content_thinking|>why<|end_message|><|message_model|><|content_text|>so<|end_message|>",
        [("thinking", "why"), ("text", "so")],
    ),
    "the answer alone": ("<|content_text|>42<|end_message|>", [("text", "42")]),
    "a role token of its own": ("<|message_model|><|content_text|>42<|end_message|>", [("text", "42")]),
    "blocks of a kind that repeats": (
        "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>"
        "<|message_model|><|content_thinking|>c<|end_message|><|message_model|><|content_text|>d<|end_message|>",
        [("thinking", "a"), ("text", "b"), ("thinking", "c"), ("text", "d")],
    ),
    "cut off in the thinking": ("<|content_thinking|>wh", [("thinking", "wh")]),
    "a block without a role token": (
        "<|content_thinking|>a<|end_message|><|content_text|>b",
        [("thinking", "a"), ("text", "b")],
    ),
    "text without any content token": ("<|content_thinking|>a<|end_message|>b", [("thinking", "a"), ("text", "b")]),
    "the name of a tool is no answer, the call is": (
        '<|content_thinking|>a<|end_message|><|message_model|>f<|content_invoke_tool_json|>{"name":"f"}<|end_message|>',
        [("thinking", "a"), ("text", '{"name":"f"}')],
    ),
    "nothing": ("", []),
    "the end of a block at once": ("<|content_text|><|end_message|>", []),
}


def split(ids: list[int], sizes: list[int]) -> list[tuple[str, str]]:
    """Pieces of what came in parts, those of one kind in a row put together."""
    sections, decoder, text, found = Sections(FORMAT), TOKENIZER.stream(), "", []
    edges = [0, *itertools.accumulate(sizes), len(ids)]
    for a, b in itertools.pairwise(edges):
        sections.push(ids[a:b])
        begin, text = len(text), text + decoder.push(ids[a:b])
        found += sections.split(text, begin)
    return [(kind, "".join(text for _, text in group)) for kind, group in itertools.groupby(found, lambda p: p[0])]


@pytest.mark.parametrize("name", REPLIES)
@given(sizes=st.lists(st.integers(0, 9), max_size=20))
def test_a_reply_comes_apart_however_it_arrives(name, sizes):
    tokens, expected = REPLIES[name]
    assert split(TOKENIZER.encode(tokens), sizes) == expected


def test_a_token_that_is_only_spelled_is_text():
    ids = [*TOKENIZER.encode("<|content_text|>"), *TOKENIZER.encode_plain(PLAIN_MARKERS)]
    assert split(ids, []) == [("text", PLAIN_MARKERS)]


def test_the_beginning_of_a_text_has_the_kinds_of_its_characters():
    sections = Sections(FORMAT)
    sections.push(TOKENIZER.encode("<|content_thinking|>why<|end_message|><|message_model|>x<|content_text|>so"))
    text = "whyxso"
    known = ["thinking"] * 3 + [None] + ["text"] * 2
    for begin, end in itertools.combinations(range(7), 2):
        pieces = sections.split(text[:end], begin)
        assert "".join(kind[0] * len(part) for kind, part in pieces) == "".join(k[0] for k in known[begin:end] if k)
        assert "".join(part for _, part in pieces) == text[begin:end].replace("x", "")


def test_tokens_that_no_file_calls_special_leak_nowhere():
    tokenizer = Tokenizer(talking.library(special=False))
    sections = Sections(ChatFormat(tokenizer))
    ids = tokenizer.encode("<|content_thinking|>why<|end_message|><|message_model|><|content_text|>so<|end_message|>")
    sections.push(ids)
    assert "<|" in tokenizer.decode(ids)
    assert sections.split(tokenizer.decode(ids)) == [("thinking", "why"), ("text", "so")]


# ------------------------------------------------------------------------------------------------------ from end to end

DRAFTS = range(CONFIG.mtp_depths + 1)


@pytest.fixture(scope="module")
def talker() -> Inkling:
    return talking.talking_model()


@pytest.mark.parametrize("drafts", DRAFTS)
def test_thinking_and_answer_are_apart(talker, drafts):
    reply = talker.chat("What is 2 times 3?", 60, drafts)
    assert (reply.thinking, reply.text, reply.finish_reason) == (THOUGHT, ANSWER, "stop")
    assert reply.completion.text == THOUGHT + ANSWER
    assert reply.stats.tokens == len(reply.completion.tokens) + 1
    assert reply.message == {"role": "assistant", "content": ANSWER, "thinking": THOUGHT}


def test_a_batch_of_conversations_is_one_of_ids(talker):
    batch = talker.generate([FORMAT.encode("a"), FORMAT.encode("What is 2 times 3?", "low")], 60, stop=FORMAT.stop_ids)
    for reply in [FORMAT.reply(completion, batch.stats) for completion in batch]:
        assert (reply.thinking, reply.text) == (THOUGHT, ANSWER)
        assert reply.completion.tokens == talker.chat("a", 60).completion.tokens


def test_a_conversation_goes_on(talker):
    messages = [{"role": "system", "content": "Count."}, user("What is 2 times 3?")]
    for _ in range(2):
        reply = talker.chat(messages, 60)
        assert reply.text == ANSWER
        messages += [reply.message, user("Again?")]
    assert spelled(FORMAT.encode(messages)).count(f"<|content_thinking|>{THOUGHT}<|end_message|>") == 2


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("new", range(1, 17))
def test_a_limit_cuts_thinking_or_answer(talker, drafts, new):
    """The thinking takes token 2 to 6, the answer (whose third letter is two bytes) what comes from token 9 on."""
    reply = talker.chat("hi", new, drafts)
    answer = b"".join(TOKENIZER.piece(id) for id in TOKENIZER.encode_plain(ANSWER)[: max(new - 8, 0)])
    assert reply.thinking == THOUGHT[: new - 1]
    assert reply.text == answer.decode(errors="replace")
    whole = new > 8 + len(TOKENIZER.encode_plain(ANSWER))
    assert reply.finish_reason == ("stop" if whole else "length")


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_stream_has_the_kinds_in_order_and_all_of_the_text(talker, drafts, rounds, monkeypatch):
    monkeypatch.setattr(model, "PIECE", (rounds, 0.0))
    stream = talker.chat_stream("hi", 60, drafts)
    pieces = list(stream)
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"thinking", "text"}
    for kind, expected in (("thinking", THOUGHT), ("text", ANSWER)):
        assert "".join(text for found, text in pieces if found == kind) == expected
    assert all(text and "\ufffd" not in text for _, text in pieces)
    assert (stream.reply.thinking, stream.reply.text, stream.reply.finish_reason) == (THOUGHT, ANSWER, "stop")
    if rounds == 1 and not drafts:
        assert len(pieces) == len(THOUGHT) + len(ANSWER) - 1  # "ix" is one token


def test_a_stream_tells_what_has_been_made_so_far(talker, monkeypatch):
    monkeypatch.setattr(model, "PIECE", (1, 0.0))
    stream = talker.chat_stream("hi", 60, 0)
    assert next(stream) == ("thinking", THOUGHT[0])
    assert (stream.reply.thinking, stream.reply.text, stream.reply.finish_reason) == (THOUGHT[0], "", None)


@pytest.mark.parametrize(
    ("stop", "thinking", "text"),
    [
        (":", THOUGHT, "Six"),
        ("x", THOUGHT, "Si"),  # inside a token
        ("é", THOUGHT, "Six: "),
        ("=", "2*3", ""),
        ("6S", "2*3=", ""),
        (TOKENIZER.encode("!"), THOUGHT, "Six: é"),
        (["nowhere", "!"], THOUGHT, "Six: é"),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_stop_ends_thinking_or_answer(talker, stop, thinking, text, drafts):
    reply = talker.chat("hi", 60, drafts, stop=stop)
    assert (reply.thinking, reply.text, reply.finish_reason) == (thinking, text, "stop")
    stream = talker.chat_stream("hi", 60, drafts, stop=stop)
    pieces = list(stream)
    assert "".join(text for _, text in pieces) == thinking + text
    assert stream.reply.text == text


def test_the_turn_ends_whatever_the_config_calls_its_end(talker):
    careless = Inkling(replace(CONFIG, eos_token_ids=()), talker.params, TOKENIZER)
    cyclic.share_programs(talker, careless)
    assert careless.chat("hi", 60).completion.tokens == talker.chat("hi", 60).completion.tokens
    assert END_TURN in careless.generate(FORMAT.encode("hi"), 60).tokens


def test_the_turn_ends_before_somebody_elses_message(talker):
    """A model that does not say that it is done, and writes the next question itself."""
    row, end = (TOKENIZER.encode(token)[0] for token in ("<|message_user|>", "<|content_model_end_sampling|>"))
    head = talker.params["unembed.weight"]
    swapped = head.at[row].set(head[end]).at[end].set(head[row])
    runaway = Inkling(CONFIG, {**talker.params, "unembed.weight": swapped}, TOKENIZER)
    cyclic.share_programs(talker, runaway)
    reply = runaway.chat("hi", 60)
    assert (reply.thinking, reply.text, reply.finish_reason) == (THOUGHT, ANSWER, "stop")


def test_sampling_reaches_the_decoder(talker):
    hot = dict(max_new_tokens=30, temperature=50.0)
    one, same, other = (talker.chat("hi", seed=seed, **hot).completion.tokens for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("drafts", DRAFTS)
def test_another_conversation_in_the_bucket_compiles_nothing(talker, drafts):
    talker.chat("hi", 60, drafts)
    list(talker.chat_stream("hi", 60, drafts))
    with Compilations() as found:
        talker.chat([{"role": "system", "content": "x"}, user("ho")], 50, drafts, effort="low", stop=["zz"])
        list(talker.chat_stream("hi, hi", 40, drafts, temperature=0.5, effort=0))
    assert found.count == 0


def test_arguments_are_refused_before_any_work(talker, monkeypatch):
    monkeypatch.setattr(engine, "make_cache", lambda *_: pytest.fail("work began"))
    for chat in (talker.chat, talker.chat_stream):
        with pytest.raises(ValueError, match=r"^prompt: \d+ tokens and max_new_tokens=4096 exceed"):
            chat("hi")
        with pytest.raises(ValueError, match=r"^top_p: "):
            chat("hi", 8, top_p=0)
        with pytest.raises(ValueError, match=r"^effort: "):
            chat("hi", 8, effort="most")
        with pytest.raises(ValueError, match=r"^stop: an empty text"):
            chat("hi", 8, stop="")
