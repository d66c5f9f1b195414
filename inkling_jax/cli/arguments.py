"""Argument types: a number out of range is refused before a checkpoint of hundreds of gigabytes is read."""

import argparse
import math
from collections.abc import Callable

from inkling_jax.sharding import parse_mesh


def whole(least: int) -> Callable[[str], int]:
    """An integer of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return value

    return parse


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
