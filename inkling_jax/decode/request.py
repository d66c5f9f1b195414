"""What a user asks for, checked and brought to one form: a `Request` for each prompt."""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import InklingConfig
from ..tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Request:
    """One prompt and its settings."""

    tokens: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]


def as_array(value: Any, name: str) -> np.ndarray:
    """Nested lists as an array, or an error that names `name` when their lengths differ."""
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{name}: expected integers in rows of one length") from None


def token_ids(value: Any, config: InklingConfig, name: str) -> list[int]:
    """A non-empty list of ids inside the real vocabulary, or an error that names `name` and the first bad id."""
    array = as_array(value, name)
    if array.size == 0:
        raise ValueError(f"{name} is empty: give at least one token")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: expected a list of integers, found shape {array.shape} of {array.dtype}")
    bad = array[(array < 0) | (array >= config.real_vocab_size)]
    if bad.size:
        raise ValueError(f"{name}: token id {bad[0]} is outside the vocabulary 0 .. {config.real_vocab_size - 1}")
    return [int(i) for i in array]


def is_single(prompts: Any) -> bool:
    """Whether this is one prompt (a string or token ids) rather than a list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, (Sequence, np.ndarray)):
        return True
    return len(prompts) == 0 or isinstance(prompts[0], numbers.Integral)


def make_requests(
    prompts: Any,
    config: InklingConfig,
    tokenizer: Tokenizer | None,
    *,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any,
    stop: Any,
) -> list[Request]:
    """Requests in the order of the prompts. Raises ValueError naming the argument and what was expected."""
    single = is_single(prompts)
    many = [prompts] if single else list(prompts)
    names = ["prompt"] if single else [f"prompt {i}" for i in range(len(many))]
    ids = [_encode(prompt, config, tokenizer, name) for prompt, name in zip(many, names, strict=True)]
    settings = {
        "max_new_tokens": (max_new_tokens, lambda x: _whole(x, 1, None)),
        "temperature": (temperature, _temperature),
        "top_k": (top_k, lambda x: config.real_vocab_size if x is None else _whole(x, 1, config.real_vocab_size)),
        "top_p": (top_p, lambda x: 1.0 if x is None else _top_p(x)),
        "seed": (seed, lambda x: _whole(x, 0, 2**32 - 1)),
    }
    columns = {name: _column(name, value, len(many), check) for name, (value, check) in settings.items()}
    stops = _stops(stop, len(many), config)
    requests = []
    for i, tokens in enumerate(ids):
        row = {name: column[i] for name, column in columns.items()}
        if len(tokens) + row["max_new_tokens"] > config.max_context:
            raise ValueError(
                f"{names[i]}: {len(tokens)} tokens and max_new_tokens={row['max_new_tokens']} exceed the model's "
                f"context of {config.max_context}; shorten the prompt or lower max_new_tokens"
            )
        requests.append(Request(tokens=tokens, stop_ids=stops[i][0], stop_texts=stops[i][1], **row))
    if tokenizer is None and any(request.stop_texts for request in requests):
        raise ValueError("stop: this checkpoint has no tokenizer.json, so only token ids can stop it, not text")
    return requests


def _encode(prompt: Any, config: InklingConfig, tokenizer: Tokenizer | None, name: str) -> list[int]:
    if not isinstance(prompt, str):
        return token_ids(prompt, config, name)
    if tokenizer is None:
        raise ValueError(f"{name} is text, but this checkpoint has no tokenizer.json: give token ids")
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one character")
    return token_ids(tokenizer.encode(prompt), config, name)


def _column(name: str, value: Any, count: int, check: Callable[[Any], Any]) -> list[Any]:
    """One checked value a prompt, from one for all or a list."""
    if isinstance(value, (list, tuple, np.ndarray)):
        if len(value) != count:
            raise ValueError(f"{name}: {len(value)} values for {count} prompts")
    else:
        value = [value] * count
    try:
        return [check(item) for item in value]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _whole(value: Any, least: int, most: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"expected a whole number, found {value!r}")
    number = int(value)
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"expected {bounds}, found {value}")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value!r}")
    return float(value)


def _temperature(value: Any) -> float:
    if _number(value) < 0:
        raise ValueError(f"expected 0 (greedy) or more, found {value}")
    return min(float(value), float(np.finfo(np.float32).max))  # any larger one would become infinite on the device


def _top_p(value: Any) -> float:
    if not 0 < _number(value) <= 1:
        raise ValueError(f"expected more than 0 and at most 1, found {value}")
    return float(value)


def _stops(stop: Any, count: int, config: InklingConfig) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Stop ids (end tokens first) and stop texts of each prompt; `stop` holds for all unless its items are lists."""
    if stop is None or isinstance(stop, (str, numbers.Integral)):
        stop = [] if stop is None else [stop]
    if not isinstance(stop, Iterable) or isinstance(stop, (bytes, bytearray)):
        raise ValueError(f"stop: expected text, a token id or a list of them, found {stop!r}")
    per_prompt = list(stop)
    if not any(item is None or isinstance(item, (list, tuple)) for item in per_prompt):
        per_prompt = [per_prompt] * count
    if len(per_prompt) != count:
        raise ValueError(f"stop: {len(per_prompt)} lists for {count} prompts")
    return [_stop(item, config) for item in per_prompt]


def _stop(items: Any, config: InklingConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    items = [] if items is None else [items] if isinstance(items, (str, numbers.Integral)) else list(items)
    ids = [item for item in items if not isinstance(item, str)]
    texts = [item for item in items if isinstance(item, str)]
    if "" in texts:
        raise ValueError("stop: an empty text would stop everything")
    own = token_ids(ids, config, "stop") if ids else []
    return tuple(dict.fromkeys([*config.eos_token_ids, *own])), tuple(texts)
