"""The tokenizer: round trips, special tokens that never leak, and streams that never split a character."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from inkling_jax import CheckpointError
from inkling_jax.tokenizer import Tokenizer

END = "<|endoftext|>"
PROSE = ["def f(x):\n    return x + 1\n", "naïve café 🙂🙂 東京 東京 ṩ ṩ", "the theme of them " * 3]


def library() -> tokenizers.Tokenizer:
    """Few merges, so that most characters beyond ASCII take several tokens; one special and two plain added tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(PROSE, trainer)
    made.add_special_tokens([END])
    made.add_tokens(["<plain token>", "<東>"])
    return made


LIBRARY = library()
TOKENIZER = Tokenizer(LIBRARY)
END_ID = TOKENIZER.encode(END)[0]
# Any ids at all: broken UTF-8, special tokens, ids that no token has.
any_ids = st.lists(st.integers(0, TOKENIZER.size + 5), max_size=40)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text())
def test_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(any_ids)
def test_decode_agrees_with_the_library(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


@given(any_ids, st.lists(st.integers(0, 100), max_size=10))
def test_any_split_of_any_ids_streams_to_the_same_text(ids, cuts):
    stream = TOKENIZER.stream()
    parts = [stream.push(part) for part in split(ids, cuts)]
    assert "".join(parts) + stream.flush() == TOKENIZER.decode(ids)


@given(st.text(alphabet="aé東🙂\u0301", min_size=1), st.integers(1, 3))
def test_stream_holds_a_character_until_it_is_whole(text, size):
    stream, seen = TOKENIZER.stream(), ""
    ids = TOKENIZER.encode(text)
    for at in range(0, len(ids), size):
        part = stream.push(ids[at : at + size])
        assert "\ufffd" not in part
        seen += part
        # Nothing complete is withheld either: what is missing is less than one character.
        whole = LIBRARY.decode(ids[: at + size]).removesuffix("\ufffd")
        assert seen == whole
    assert stream.flush() == ""
    assert seen == text


def test_a_character_cut_off_at_the_end_appears_at_flush_and_not_before():
    stream = TOKENIZER.stream()
    ids = TOKENIZER.encode("ok 𝄞")
    assert stream.push(ids[:-1]) == "ok "
    assert stream.flush() == "\ufffd"
    assert stream.push(TOKENIZER.encode("again")) == "again"


def test_special_tokens_do_not_leak_and_plain_added_tokens_stay():
    ids = TOKENIZER.encode(f"a{END}b<plain token><東>")
    assert END_ID in ids
    assert TOKENIZER.decode(ids) == "ab<plain token><東>"
    assert TOKENIZER.decode([END_ID] * 3) == ""


@given(st.lists(st.sampled_from([END, "<plain token>", "<東>", "a", "é", " "]), max_size=9).map("".join))
def test_plain_encoding_knows_no_added_token(text):
    ids = TOKENIZER.encode_plain(text)
    assert not {END_ID, *(TOKENIZER.added_id(token) for token in ("<plain token>", "<東>"))} & set(ids)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(END) == [END_ID]  # encoding plainly has changed nothing for others


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<")))
def test_plain_encoding_is_the_usual_one_where_nothing_is_spelled(text):
    assert TOKENIZER.encode_plain(text) == TOKENIZER.encode(text)


def test_plain_encoding_adds_nothing_around_the_text():
    made = library()
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    assert Tokenizer(made).encode("a") == [END_ID, *TOKENIZER.encode("a")]
    assert Tokenizer(made).encode_plain("a") == TOKENIZER.encode("a")


def test_added_tokens_are_found_by_their_spelling():
    assert TOKENIZER.added_id(END) == END_ID and TOKENIZER.is_special(END_ID)
    plain = TOKENIZER.encode("<plain token>")[0]
    assert TOKENIZER.added_id("<plain token>") == plain and not TOKENIZER.is_special(plain)
    assert TOKENIZER.added_id("a") is None and TOKENIZER.added_id("<|nothing|>") is None


def test_a_special_token_inside_a_character_changes_nothing_else():
    first, *rest = TOKENIZER.encode("𝄞")
    assert TOKENIZER.decode([first, END_ID, *rest]) == "𝄞"


def test_a_file_with_truncation_and_padding_still_encodes_whole_prompts(tmp_path):
    made = library()
    made.enable_truncation(3)
    made.enable_padding(length=3)
    made.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.from_directory(tmp_path)
    assert read is not None
    assert read.encode("a") == TOKENIZER.encode("a")
    assert read.decode(read.encode(PROSE[0])) == PROSE[0]


def test_a_directory_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "\x00"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "ByteFallback"}])
def test_a_decoder_that_is_not_byte_level_is_refused(tmp_path, decoder):
    content = json.loads(LIBRARY.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"decoder": decoder}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder must be ByteLevel"):
        Tokenizer.from_directory(tmp_path)


def test_text_that_is_not_unicode_is_refused():
    for encode in (TOKENIZER.encode, TOKENIZER.encode_plain):
        with pytest.raises(ValueError, match="character 3"):
            encode("abc\udcff")


@pytest.mark.parametrize("id", [-1, 2**40])
def test_impossible_ids_are_refused(id):
    with pytest.raises(ValueError, match=str(id)):
        TOKENIZER.decode([id])
