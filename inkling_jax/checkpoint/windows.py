"""Parts of arrays: which elements a device holds, and where they lie in a file."""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple


class Cut(NamedTuple):
    """The elements from `start` up to `stop` of an axis of `size`."""

    start: int
    stop: int
    size: int

    @property
    def extent(self) -> int:
        return self.stop - self.start

    def times(self, n: int) -> "Cut":
        """The same part of an axis that counts in units n times smaller."""
        return Cut(self.start * n, self.stop * n, self.size * n)

    def over(self, n: int) -> "Cut":
        """The smallest part of an axis in units n times larger that covers this one."""
        return Cut(self.start // n, -(-self.stop // n), self.size // n)

    def within(self, other: "Cut") -> slice:
        """Where this part lies in an array that begins with `other`'s first element."""
        return slice(self.start - other.start, self.stop - other.start)


Window = tuple[Cut, ...]  # a box in an array: a cut for each axis


def whole(shape: tuple[int, ...]) -> Window:
    return tuple(Cut(0, size, size) for size in shape)


def window_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Window:
    """A window from the slices by which JAX says what a device holds."""
    return tuple(Cut(*part.indices(size)[:2], size) for part, size in zip(index, shape, strict=True))


def shape_of(window: Window) -> tuple[int, ...]:
    return tuple(cut.extent for cut in window)


def within(window: Window, box: Window) -> tuple[slice, ...]:
    """The index of a window in an array that holds a larger one."""
    return tuple(cut.within(other) for cut, other in zip(window, box, strict=True))


def runs(window: Window) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a window in a row-major array, in order: the first element of each and how many."""
    axis = max((i for i, cut in enumerate(window) if cut.extent < cut.size), default=0)
    strides = [math.prod(cut.size for cut in window[i + 1 :]) for i in range(len(window))]
    for at in product(*(range(cut.start, cut.stop) for cut in window[:axis])):
        start = sum(i * stride for i, stride in zip((*at, window[axis].start), strides, strict=False))
        yield start, window[axis].extent * strides[axis]


def merged(windows: Iterable[Window]) -> list[tuple[Window, list[Window]]]:
    """Boxes to read, each with the windows in it: those that touch along the last axis share one.

    Apart, they would be short runs with gaps between them, and the same pages of the file would be read for each.
    """
    boxes: list[tuple[Window, list[Window]]] = []
    for window in sorted(set(windows)):
        box, members = boxes[-1] if boxes else (window, [])
        if members and box[:-1] == window[:-1] and box[-1].stop == window[-1].start:
            boxes[-1] = ((*box[:-1], box[-1]._replace(stop=window[-1].stop)), [*members, window])
        else:
            boxes.append((window, [window]))
    return boxes
