"""Text to token ids and back, from a checkpoint's `tokenizer.json`.

The end tokens are not here: they belong to the config. Special tokens are never written into decoded text.
"""

import codecs
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from .errors import CheckpointError

FILE_NAME = "tokenizer.json"


class Tokenizer:
    """A byte-level tokenizer: any text has ids; `decode(encode(text)) == text` unless text spells a special token."""

    def __init__(self, library: tokenizers.Tokenizer, source: str = FILE_NAME):
        """Raises CheckpointError where the decoder is not byte-level; `source` names the file in that message."""
        if "ByteLevel" not in repr(library.decoder):
            raise CheckpointError(f"{source}: decoder must be ByteLevel, found {library.decoder!r}")
        library.no_truncation()  # files made for training may carry a length limit: a prompt is never cut silently
        library.no_padding()
        self._library = library
        self._special = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self | None:
        """The tokenizer of a checkpoint directory, or None where it has no tokenizer.json.

        Raises CheckpointError, naming the file, when it cannot be read.
        """
        path = Path(directory) / FILE_NAME
        if not path.is_file():
            return None
        try:
            library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer file: {error}") from error
        return cls(library, str(path))

    @property
    def size(self) -> int:
        """Ids in use: the highest id plus one."""
        return max(self._library.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. A special token spelled in the text becomes that token: see `encode_plain`.

        Raises ValueError for lone surrogates (bytes of a command line or file that are not UTF-8).
        """
        return self._library.encode(_valid(text)).ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text from somebody who may not write special tokens: spelled ones stay letters.

        Nothing is put before or behind it either. Raises as `encode`.
        """
        return self._plain.encode(_valid(text), add_special_tokens=False).ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer without added tokens. (The library's own switch spares those that no file calls special.)

        A copy, since a switch turned for one call is turned for other threads too; about a second for 200,000 tokens.
        """
        content = json.loads(self._library.to_str()) | {"added_tokens": []}
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def added_id(self, spelling: str) -> int | None:
        """The id of an added token, special or not; None where there is none spelled so."""
        id = self._library.token_to_id(spelling)
        return id if id in self._library.get_added_tokens_decoder() else None

    def is_special(self, id: int) -> bool:
        return id in self._special

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens and unused ids left out; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for a negative id.
        """
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that arrive in parts."""
        return StreamDecoder(self)

    def piece(self, id: int) -> bytes:
        """The bytes that one token adds to the text: none for a special token or an unused id."""
        if id not in self._pieces:
            if not 0 <= id < 2**31:
                raise ValueError(f"token ids are 0 or more, found {id}")
            token = None if id in self._special else self._library.id_to_token(id)
            self._pieces[id] = b"" if token is None else _token_bytes(token)
        return self._pieces[id]


class StreamDecoder:
    """Decodes ids as they arrive: a character is returned when its last byte is here, and not before.

    The texts of all `push` calls and the final `flush` together are the `decode` of all ids together.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._decoder.decode(b"".join(self._tokenizer.piece(int(id)) for id in ids))

    def flush(self) -> str:
        """The end of the text: U+FFFD where a character never got its last bytes. The decoder then starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode at character {error.start}: {error.reason}") from error
    return text


def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies spell every byte as one printable letter; the library knows them, ordered by byte.

    Printable Latin-1 bytes spell themselves; the others take the letters from U+0100 upwards.
    """
    letters = sorted(ByteLevel.alphabet())
    own = [letter for letter in letters if ord(letter) < 256]
    others = iter(sorted(set(range(256)) - {ord(letter) for letter in own}))
    return {letter: ord(letter) if ord(letter) < 256 else next(others) for letter in letters}


_BYTES = _byte_of_letter()


def _token_bytes(token: str) -> bytes:
    """Added tokens may hold letters outside the byte alphabet: these stand for themselves (as in the library)."""
    known = all(letter in _BYTES for letter in token)
    return bytes(_BYTES[letter] for letter in token) if known else token.encode("utf-8")
