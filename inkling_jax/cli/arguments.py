"""Argument types, and the options that `generate` and `chat` share.

A number out of range is refused before a checkpoint of hundreds of gigabytes is read.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from inkling_jax.chat import EFFORTS, MOST_EFFORT
from inkling_jax.model import QUANTIZATIONS
from inkling_jax.sharding import parse_mesh


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded: see `loading`."""
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    parser.add_argument(
        "--implementation",
        choices=("xla", "triton", "interpret"),
        help="plain JAX, the GPU kernels, or their interpreter (default: the kernels where there is a GPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="keep",
        help="of experts in 4 bits: keep (default) them so, or none: turn them into --dtype when loading",
    )
    parser.add_argument("--mesh", metavar="SIZES", type=mesh, help="spread over devices: tensor=2,expert=4")


def loading(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `inkling_jax.load` besides the path."""
    return {name: getattr(arguments, name) for name in ("dtype", "implementation", "quantization", "mesh")}


def add_decoding(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """How text is made: see `decoding`."""
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=whole(1), default=max_new_tokens, help=f"default {max_new_tokens}"
    )
    parser.add_argument("--draft-tokens", metavar="N", type=whole(0), help="drafts a round: 0 to the number of depths")
    parser.add_argument("--temperature", metavar="X", type=temperature, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", metavar="N", type=whole(1), help="sample among the N likeliest tokens")
    parser.add_argument("--top-p", metavar="X", type=probability, help="sample among the likeliest that sum to X")
    parser.add_argument("--seed", metavar="N", type=whole(0, 2**32 - 1), default=0, help="of sampling (default 0)")
    parser.add_argument(
        "--stop", metavar="TEXT", type=some_text, action="append", help="end before this text; may be repeated"
    )


def decoding(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Inkling.generate` and `Inkling.chat` besides what they continue."""
    names = ("max_new_tokens", "draft_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    return {name: getattr(arguments, name) for name in names}


def effort(text: str) -> str | float:
    """A name of a level of thinking, or its number."""
    if text in EFFORTS:
        return text
    if 0 <= (value := _number(text)) <= MOST_EFFORT:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(EFFORTS)} and no number from 0 to {MOST_EFFORT}")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An integer from `least` to `most`."""
    wanted = f"from {least} up" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return parse


def wholes(least: int) -> Callable[[str], list[int]]:
    """Integers of at least `least`, separated by commas."""
    one = whole(least)
    return lambda text: [one(part) for part in text.split(",")]


def points(text: str) -> list[tuple[int, int, int]]:
    """Rows of a table separated by commas: sequences x tokens, and + drafts if there are any: 1x1024,64x1024+1."""
    rows = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+(\d+))?", part) for part in text.split(",")]
    if not all(rows):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rows like 1x1024,64x1024+1")
    return [(int(row[1]), int(row[2]), int(row[3] or 0)) for row in rows if row]


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these words, separated by commas, in their own order."""

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [word for word in asked if word not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return [name for name in names if name in asked]

    return parse


def some_text(text: str) -> str:
    """A text of at least one character."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return text


def temperature(text: str) -> float:
    """A finite number from 0 up."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def probability(text: str) -> float:
    """A number above 0 and up to 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = [-1]
    if min(ids) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3")
    return ids


def mesh(text: str) -> dict[str, int]:
    """Sizes of a mesh of devices by axis."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
