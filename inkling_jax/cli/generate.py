"""Continue a prompt, as it is; a chat model answers in `chat`. The text appears as it is made; a line of statistics
follows on standard error."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from inkling_jax.model import Inkling, Statistics, load

from .arguments import add_decoding, add_loading, decoding, loading, some_text, token_ids

HELP = "continue a prompt"
EXAMPLES = """\
examples:
  inkling-jax generate --prompt "def mean(values):"
  inkling-jax generate --model ./nano-hf --file prompt.txt --max-new-tokens 500
  printf import | inkling-jax generate --temperature 0.8 --top-p 0.95 --seed 7
  inkling-jax generate --prompt "class Stack:" --stop "class " --stop "def test"
  inkling-jax generate --tokens 17,4,256 --json          a checkpoint without a tokenizer

Drafts (--draft-tokens) change the speed, never the text or its distribution; 0 decodes plainly.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="nano", help='a directory, a hub id, or "nano" (default)')
    add_loading(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", type=some_text, help="the text to continue (default: standard input)"
    )
    prompt.add_argument("--file", metavar="PATH", help="read the prompt from a file; - is standard input")
    prompt.add_argument("--tokens", metavar="IDS", type=token_ids, help="the prompt as token ids: 1,2,3")
    add_decoding(parser, max_new_tokens=128)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming")


def run(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments)
    model = load(arguments.model, **loading(arguments))
    settings = decoding(arguments)
    if arguments.json:
        _print_json(model, prompt, settings)
    else:
        _stream(model, prompt, settings)
    return 0


def _prompt(arguments: argparse.Namespace) -> str | list[int]:
    return given_text(arguments) if arguments.tokens is None else arguments.tokens


def given_text(arguments: argparse.Namespace) -> str:
    """The text of --prompt or --file, or on standard input."""
    if arguments.prompt is not None:
        return arguments.prompt
    if arguments.file not in (None, "-"):
        return _read_text(Path(arguments.file))
    if sys.stdin is None or (arguments.file is None and sys.stdin.isatty()):
        raise ValueError("no prompt: give --prompt or --file, or text on standard input")
    text = sys.stdin.read()
    if not text:
        raise ValueError("the prompt on standard input is empty")
    return text


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from None
    except OSError as error:
        raise ValueError(f"--file {path}: {error.strerror}") from None
    if not text:
        raise ValueError(f"{path}: the file is empty")
    return text


def _stream(model: Inkling, prompt: str | list[int], settings: dict[str, Any]) -> None:
    if model.tokenizer is None:
        generation = model.generate([prompt], **settings)
        print(",".join(map(str, generation[0].tokens)))
        statistics = generation.stats
    else:
        stream = model.stream(prompt, **settings)
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        statistics = stream.stats
    print(summary(statistics), file=sys.stderr)


def _print_json(model: Inkling, prompt: str | list[int], settings: dict[str, Any]) -> None:
    generation = model.generate([prompt], **settings)
    completion, statistics = generation[0], generation.stats
    result = {
        "text": completion.text,
        "tokens": [int(token) for token in completion.tokens],
        "finish_reason": completion.finish_reason,
        "statistics": figures(statistics),
    }
    print(json.dumps(result, allow_nan=False))


def figures(statistics: Statistics) -> dict[str, Any]:
    """Statistics as JSON takes them."""
    return {
        "rounds": int(statistics.rounds),
        "tokens": int(statistics.tokens),
        "tokens_per_round": _finite(statistics.tokens_per_round),
        "acceptance": [_finite(rate) for rate in statistics.acceptance],
        "prefill_seconds": _finite(statistics.prefill_seconds),
        "decode_seconds": _finite(statistics.decode_seconds),
        "compile_seconds": _finite(statistics.compile_seconds),
    }


def summary(statistics: Statistics) -> str:
    """One line for a person: tokens, rounds, acceptance by draft position, time."""
    parts = [f"{statistics.tokens} tokens in {statistics.rounds} rounds ({statistics.tokens_per_round:.2f} a round)"]
    if statistics.acceptance:
        rates = " ".join("-" if math.isnan(rate) else f"{100 * rate:.0f}" for rate in statistics.acceptance)
        parts.append(f"drafts accepted by position: {rates} %")
    rate = statistics.tokens / max(statistics.decode_seconds, 1e-9)
    parts.append(
        f"prefill {statistics.prefill_seconds:.2f} s, decode {statistics.decode_seconds:.2f} s ({rate:,.0f} tokens/s)"
    )
    return "; ".join(parts)


def _finite(value: float) -> float | None:
    """JSON has no NaN: a rate of nothing is null."""
    return float(value) if math.isfinite(value) else None
