"""One batch from prompts to completions: the host's side of the loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from ..compilation import announce
from ..tokenizer import StreamDecoder, Tokenizer
from .engine import Engine
from .request import Request
from .state import NOT_FINITE, RUNNING, STOPPED


@dataclass(frozen=True)
class Completion:
    """What followed one prompt.

    text: the new text, None for a checkpoint without a tokenizer. tokens: the new ids; the end token and what
    belongs to a stop text are left out. finish_reason: "stop" at an end token, stop id or stop text, "length" at
    max_new_tokens, None of a stream that goes on.
    drafted: for each token 0 if the target supplied it, j if it was the accepted draft j of its round. rejected:
    for each token the draft that was turned down in its favour, or None.
    """

    text: str | None
    tokens: list[int]
    finish_reason: Literal["stop", "length"] | None
    drafted: list[int]
    rejected: list[int | None]


@dataclass(frozen=True)
class Statistics:
    """Figures of a whole batch. Rounds and tokens are summed over its sequences; compiling is in neither time.

    tokens: the new ones, with the end token or the stop text that ended a sequence. rounds: those that made them; the
    few that ran on before a stop text was seen are in the time and in the acceptance only.
    acceptance: by draft position, the share of rounds that accepted it among those that offered it (nan where none
    did).
    """

    rounds: int
    tokens: int
    acceptance: list[float]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


@dataclass
class _Text:
    """A text being decoded token by token, so that a look costs the new tokens only."""

    decoder: StreamDecoder
    text: str = ""
    tokens: int = 0


def find_stop(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Where the stop text ends, and begins, that is complete first: how much text came at once does not matter."""
    return min(((place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0), default=None)


class Session:
    """A batch being decoded. `advance` runs some rounds; `completion` is final once `finished`."""

    def __init__(self, engine: Engine, requests: list[Request], drafts: int, tokenizer: Tokenizer | None):
        self.requests, self._engine, self._drafts, self._tokenizer = requests, engine, drafts, tokenizer
        self._seconds = {"prefill": 0.0, "decode": 0.0, "compile": 0.0}
        self._pace = float("inf")  # seconds a round, by the last call
        self._state, self._settings = engine.start(requests, drafts)
        self._cut: dict[int, int] = {}  # sequences ended by a stop text: characters kept
        self._texts: dict[int, _Text] = {}
        self._prefill()
        self._look()

    def _prefill(self) -> None:
        longest = max(len(request.tokens) for request in self.requests) - 1
        for start, chunk in self._engine.chunks(longest, self._state.length.shape[0]):
            with self._timed("prefill", "the prefill step"):
                self._state = self._engine.prefill(
                    self._engine.leaves, self._state, np.int32(start), chunk=chunk, drafts=self._drafts
                )
                jax.block_until_ready(self._state.length)

    def advance(self, rounds: int, seconds: float = 0.0) -> None:
        """Runs up to `rounds` rounds, or as many as should take `seconds` if they are more, and looks at what came out.

        A call costs the host milliseconds, whatever it runs. Several processes must all run the same number of rounds,
        and their clocks differ: there it is `rounds`. Raises FloatingPointError at NaN logits.
        """
        if not self._engine.shared:
            rounds = max(rounds, int(seconds / self._pace))
        before = self._seconds["decode"]
        with self._timed("decode", f"the decoding loop with {self._drafts} drafts"):
            self._state = self._engine.decode(
                self._engine.leaves, self._state, self._settings, np.int32(rounds), drafts=self._drafts
            )
            jax.block_until_ready(self._state.length)
        passed = self._seconds["decode"] - before
        self._pace = max(passed, 1e-3) / rounds  # less than a millisecond is what compiling, taken off, leaves of it
        self._look()
        self._apply_stop_texts()

    @contextmanager
    def _timed(self, kind: str, what: str) -> Iterator[None]:
        """Adds the time of a block to one account and the compiling in it to another."""
        since = time.monotonic()
        with announce(what) as watch:
            yield
        self._seconds["compile"] += watch.seconds
        self._seconds[kind] += time.monotonic() - since - watch.seconds

    def _look(self) -> None:
        state = self._state
        self._seen: dict[str, np.ndarray] = {}
        self._length, self._status = (np.array(self._engine.fetch(x)) for x in (state.length, state.status))
        broken = np.flatnonzero(self._status == NOT_FINITE)
        if broken.size:
            b = int(broken[0])
            raise FloatingPointError(
                f"the logits of prompt {b} at position {self._length[b]} are not finite: the weights or the arithmetic "
                f'are broken there (try dtype="float32", or check the checkpoint); no token was made up'
            )

    def _host(self, name: str) -> np.ndarray:
        """An array of the state on the host, fetched once a look for all sequences together."""
        if name not in self._seen:
            self._seen[name] = self._engine.fetch(getattr(self._state, name))
        return self._seen[name]

    @property
    def finished(self) -> bool:
        return not (self._status[: len(self.requests)] == RUNNING).any()

    def new_tokens(self, b: int) -> list[int]:
        """Tokens of sequence b so far, without the end token that closed it."""
        first, last = len(self.requests[b].tokens), int(self._length[b])
        tokens = self._host("tokens")[b, first:last].tolist()
        if self._status[b] == STOPPED and b not in self._cut and tokens:
            tokens.pop()
        return tokens

    def text(self, b: int) -> str:
        """Text of sequence b so far, without a character whose bytes are not all there yet."""
        assert self._tokenizer is not None
        known = self._texts.setdefault(b, _Text(self._tokenizer.stream()))
        tokens = self.new_tokens(b)
        known.text += known.decoder.push(tokens[known.tokens :])
        known.tokens = len(tokens)
        return known.text

    def _apply_stop_texts(self) -> None:
        """Ends sequences whose text holds one of their stop texts. What was made past it is cut away."""
        going = ((b, request.stop_texts) for b, request in enumerate(self.requests) if b not in self._cut)
        found = {b: stop for b, stops in going if stops and (stop := find_stop(self.text(b), stops))}
        if not found:
            return
        rounds = self._host("rounds").copy()
        for b, (end, begin) in found.items():
            first, made = len(self.requests[b].tokens), self._tokens_until(b, end)
            drafted = self._host("drafted")[b, first : first + made - 1]
            rounds[b] = 1 + np.count_nonzero(drafted == 0)  # each but the last ends with a token of the target
            self._cut[b], self._length[b], self._status[b] = begin, first + made, STOPPED
        self._seen["rounds"] = rounds
        arrays = {"status": self._status, "length": self._length, "rounds": rounds}
        self._state = replace(self._state, **{name: self._engine.place(a) for name, a in arrays.items()})

    def _tokens_until(self, b: int, end: int) -> int:
        """How many new tokens of a sequence make the first `end` characters of its text."""
        assert self._tokenizer is not None
        decoder, characters, tokens = self._tokenizer.stream(), 0, self.new_tokens(b)
        for made, token in enumerate(tokens, start=1):
            characters += len(decoder.push([token]))
            if characters >= end:
                return made
        return len(tokens)

    def completion(self, b: int) -> Completion:
        tokens = self.new_tokens(b)
        text = None if self._tokenizer is None else self._tokenizer.decode(tokens)
        if b in self._cut and self._tokenizer is not None and text is not None:
            text = text[: self._cut[b]]
            while tokens and len(self._tokenizer.decode(tokens)) > len(text):
                tokens.pop()
        span = slice(len(self.requests[b].tokens), len(self.requests[b].tokens) + len(tokens))
        rejected = self._host("rejected")[b, span].tolist()
        return Completion(
            text=text,
            tokens=tokens,
            finish_reason={STOPPED: "stop", RUNNING: None}.get(int(self._status[b]), "length"),
            drafted=self._host("drafted")[b, span].tolist(),
            rejected=[None if token < 0 else token for token in rejected],
        )

    def statistics(self) -> Statistics:
        real = len(self.requests)
        prompts = np.array([len(request.tokens) for request in self.requests])
        offered = self._host("offered")[:real, : self._drafts].sum(axis=0)
        accepted = self._host("accepted")[:real, : self._drafts].sum(axis=0)
        return Statistics(
            rounds=int(self._host("rounds")[:real].sum()),
            tokens=int((self._length[:real] - prompts).sum()),
            acceptance=[float(a / o) if o else float("nan") for a, o in zip(accepted, offered, strict=True)],
            prefill_seconds=self._seconds["prefill"],
            decode_seconds=self._seconds["decode"],
            compile_seconds=self._seconds["compile"],
        )
