"""The chat format of Inkling and Inkling-Small: messages to token ids, and the model's tokens to thinking and answer.

A conversation is a flat sequence of blocks, each a role token, a content token, text and an end token:

    <|message_user|><|content_text|>Who wrote Faust?<|end_message|>

A turn of the model is one or more blocks, thinking first, and one token behind the last of them:

    <|message_model|><|content_thinking|>...<|end_message|>
    <|message_model|><|content_text|>Goethe.<|end_message|><|content_model_end_sampling|>

Where each fact is from (all read in 2026):

- The tokens: the vocabularies in SGLang and in vLLM, which agree, ids 200000 to 200010 in the published files. The ones
  used here have one spelling; only tokens for tools and media go by <|unused_...|> in some files (vLLM).
- Order of blocks and the model's turns: vLLM's renderer, and the output of tml-renderers, which is Thinking Machines'
  own, as recorded in SGLang's tests.
- How hard to think is asked for in a system block of its own, "Thinking effort level: 0.9", behind the leading system
  messages: the same two, Prime Intellect's renderers and the checkpoints' chat_template.jinja. 0.9 is the default of
  all; the names of levels are those of Tinker's documentation, of the template ("max") and of vLLM. At most two digits
  behind the point, and 0 is "0" (tml-renderers and the template; vLLM alone writes "0.0").
- The prompt ends with <|message_model|> (template, vLLM, Prime Intellect). tml-renderers and SGLang leave that token to
  the model, whose first it then is. Thinking or answer is the model's choice.
- <|content_model_end_sampling|>, 200006, ends the turn: the configs' end token. <|end_message|> only ends a block.
- Thinking of earlier turns stays in the conversation (Prime Intellect, tinker-cookbook: a shorter conversation is a
  prefix of a longer one), here as far as the messages hold it.
- Text is encoded without special tokens (tml-renderers: a user who spells one gets letters).

With the published vocabulary, `encode` gives the ids recorded from tml-renderers for conversations of text, and
<|message_model|> behind them (compared on 2026-12-01).

The template says the same in text, where a user could spell a token; so the files' templates are not read.
"""

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .decode.session import Completion, Session, Statistics
from .tokenizer import Tokenizer

Messages = str | Sequence[Mapping[str, str]]
Kind = Literal["thinking", "text"]

ROLES = {"system": "<|message_system|>", "user": "<|message_user|>", "assistant": "<|message_model|>"}
TEXT, THINKING = "<|content_text|>", "<|content_thinking|>"
END_BLOCK, END_TURN = "<|end_message|>", "<|content_model_end_sampling|>"
TOKENS = (*ROLES.values(), TEXT, THINKING, END_BLOCK, END_TURN)

EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
MOST_EFFORT = 0.99


class Piece(NamedTuple):
    """A part of a reply: `kind` is "thinking" or "text"."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Reply:
    """What the model replied: the answer as `text` and, apart from it, the `thinking` before; either may be empty.

    completion: its tokens, those of the format included, and where they came from; its text runs both parts together.
    """

    text: str
    thinking: str
    completion: Completion
    stats: Statistics

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """As of a completion. At "length" the answer is cut off, or, where `text` is empty, still to come."""
        return self.completion.finish_reason

    @property
    def message(self) -> dict[str, str]:
        """The reply as a message, to be followed by the next one of the user. It must not be all empty."""
        return {"role": "assistant", "content": self.text, "thinking": self.thinking}


class ChatFormat:
    """The format for one tokenizer. `encode` and `reply` are its two directions; `stop_ids` end the model's turn."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Raises ValueError where there is no tokenizer, or none for chat, naming the tokens that it lacks."""
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer, but this checkpoint has no tokenizer.json: use generate with ids")
        found = {spelling: tokenizer.added_id(spelling) for spelling in TOKENS}
        if missing := [spelling for spelling, id in found.items() if id is None]:
            raise ValueError(
                f"this is no chat model: its tokenizer lacks {', '.join(missing)}; use generate, which continues text"
            )
        self.tokenizer = tokenizer
        self.ids = {spelling: id for spelling, id in found.items() if id is not None}
        # A model that goes on to write the next message of somebody else has ended its turn too.
        self.stop_ids = tuple(self.ids[token] for token in (END_TURN, ROLES["user"], ROLES["system"]))

    def encode(self, messages: Messages, effort: str | float = "high") -> list[int]:
        """Token ids of a conversation up to where the model's reply begins.

        messages: a text, which is one message of the user, or a list of {"role", "content"} in which the user has the
        last word; roles are "system", "user" and "assistant". A message of the assistant may also have "thinking".
        effort: how hard to think, a name out of `EFFORTS` or a number from 0 to 0.99.

        Raises ValueError naming the message and what was expected.
        """
        level = _level(effort)
        conversation = [_checked(message, place) for place, message in enumerate(_listed(messages))]
        if not conversation or conversation[-1]["role"] != "user":
            raise ValueError('messages: the last one must be of the role "user"')
        first = next(i for i, message in enumerate(conversation) if message["role"] != "system")
        conversation.insert(first, {"role": "system", "content": f"Thinking effort level: {level}"})
        ids = [id for message in conversation for id in self._message(message)]
        return [*ids, self.ids[ROLES["assistant"]]]

    def reply(self, completion: Completion, stats: Statistics) -> Reply:
        """What followed an encoded conversation, thinking and answer apart; `stats` may be those of a batch."""
        sections = Sections(self)
        sections.push(completion.tokens)
        parts = sections.split(completion.text or "")
        text, thinking = ("".join(part.text for part in parts if part.kind == kind) for kind in ("text", "thinking"))
        return Reply(text, thinking, completion, stats)

    def _message(self, message: Mapping[str, str]) -> list[int]:
        role, ids = ROLES[message["role"]], []
        for content, text in ((THINKING, message.get("thinking")), (TEXT, message["content"])):
            if text:
                ids += [self.ids[role], self.ids[content], *self.tokenizer.encode_plain(text), self.ids[END_BLOCK]]
        return [*ids, self.ids[END_TURN]] if message["role"] == "assistant" else ids


class Sections:
    """Which characters of a reply are thinking, which are the answer, and which are neither.

    Of the format's tokens only the kind of block is told. Between a role token and a content token stands a name, of a
    tool for instance, which is neither; any other content than thinking is the answer.
    """

    def __init__(self, format: ChatFormat):
        self._decoder, self._special = format.tokenizer.stream(), format.tokenizer.is_special
        self._kinds: dict[int, Kind | None] = {format.ids[role]: None for role in ROLES.values()}
        self._kinds |= {format.ids[TEXT]: "text", format.ids[THINKING]: "thinking", format.ids[END_BLOCK]: "text"}
        self._starts: list[tuple[int, Kind | None]] = [(0, None)]  # the prompt ends with a role token
        self._characters = 0

    def push(self, ids: Iterable[int]) -> None:
        """The next tokens of the reply."""
        for id in ids:
            current = self._starts[-1][1]
            if id in self._kinds:
                self._start(None)  # a file that does not call it special has it spelled in the text
                current = self._kinds[id]
            elif current is None and self._special(id):
                current = "text"
            self._characters += len(self._decoder.push([id]))
            self._start(current)

    def _start(self, kind: Kind | None) -> None:
        """From the next character on it is `kind`."""
        if self._starts[-1][0] == self._characters:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != kind:
            self._starts.append((self._characters, kind))

    def split(self, text: str, begin: int = 0) -> list[Piece]:
        """The parts of the reply's text, or of its beginning, from character `begin` on."""
        ends = [start for start, _ in self._starts[1:]] + [len(text)]
        return [
            Piece(kind, part)
            for (start, kind), end in zip(self._starts, ends, strict=True)
            if kind is not None and (part := text[max(start, begin) : min(end, len(text))])
        ]


class ChatStream(Iterator[Piece]):
    """The pieces of a reply as it is made. Once it has ended, `reply` is all of it."""

    def __init__(self, format: ChatFormat, session: Session, texts: Iterator[str]):
        """`texts` are the pieces of the session's text."""
        self._format, self._session = format, session
        self._pieces = _pieces(Sections(format), session, texts)

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def reply(self) -> Reply:
        """What has been made so far, or all of it once the stream has ended."""
        return self._format.reply(self._session.completion(0), self._session.statistics())


def _pieces(sections: Sections, session: Session, texts: Iterator[str]) -> Iterator[Piece]:
    text, seen = "", 0
    for more in texts:
        tokens = session.new_tokens(0)
        sections.push(tokens[seen:])
        begin, text, seen = len(text), text + more, len(tokens)
        yield from sections.split(text, begin)


def _listed(messages: Messages) -> Sequence[Mapping[str, str]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or isinstance(messages, (bytes, bytearray)):
        raise ValueError(f"messages: expected a text or a list of messages, found {messages!r}")
    return messages


def _checked(message: Any, place: int) -> dict[str, str]:
    """A message in which everything is as it must be."""
    name = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise ValueError(f'{name}: expected {{"role": ..., "content": ...}}, found {message!r}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{name}: role: expected system, user or assistant, found {role!r} (tools are not supported)")
    known = ("role", "content", "thinking") if role == "assistant" else ("role", "content")
    if unknown := [key for key in message if key not in known]:
        raise ValueError(f"{name}: {unknown[0]}: a message of the {role} has {', '.join(known)} only")
    texts = {key: message.get(key) or "" for key in known[1:]}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name}: {key}: expected text (images and audio are not supported), found {text!r}")
    if not any(texts.values()):
        raise ValueError(f"{name}: content is empty")
    return {"role": role, **texts}


def _level(effort: Any) -> str:
    """The number that the model is told."""
    value = EFFORTS.get(effort) if isinstance(effort, str) else effort
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    if not 0 <= number <= MOST_EFFORT + 1e-6:  # float32 has a little more than 0.99
        raise ValueError(f"effort: expected {', '.join(EFFORTS)} or a number from 0 to {MOST_EFFORT}, found {effort!r}")
    return f"{round(number, 2) + 0.0:g}"  # the sum makes 0 of -0
