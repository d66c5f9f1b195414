"""Argument types: a number out of range is refused before a checkpoint of hundreds of gigabytes is read."""

import argparse
import math
import re
from collections.abc import Callable, Sequence

from inkling_jax.sharding import parse_mesh


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
