"""What a program holds at a time, by the shape of the product and the card."""

from dataclasses import dataclass, replace

from pallas_kernels._dispatch import Target, next_power_of_2

MULTIPROCESSORS = 132  # of an H200
ROWS = 128  # most rows for which reading the weights, and not multiplying, is the work


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of x, rows of a weight, and columns of both; Triton's warps and pipeline stages."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int

    def buffers(self, parts: int, itemsize: int) -> int:
        """Bytes of shared memory, at most."""
        return self.num_stages * (self.rows + parts * self.outputs) * self.depth * itemsize


def choose_tiles(rows: int, outputs: int, parts: int, itemsize: int, where: Target) -> Tiles:
    """Tiles for `rows` of x and all `outputs` of all parts; measured on an H200, cut down to other cards' memory.

    The instructions do not matter to a row's bits on the H200, where both kinds add in the same order (seen for every
    tile below). Cards that have not been asked stay with the narrow kind for any number of rows.
    """
    if not where.shared_memory:  # the interpreter, whose order of K follows the size of the operands
        return Tiles(16, 32, 128, 4, 2)
    if itemsize == 4:
        return Tiles(16, 32, 32, 4, 2)
    tile = min(max(next_power_of_2(rows), 16 if where.platform == "rocm" else 8), ROWS)
    tiles = hopper_tiles(tile, outputs, parts) if where.capability == 90 else Tiles(tile, 32 // parts, 128, 2, 4)
    if where.platform == "rocm":  # warps of 64 threads, and one buffer is filled while the other waits in registers
        tiles = replace(tiles, num_warps=1, num_stages=2)
    while tiles.num_stages > 2 and tiles.buffers(parts, itemsize) > where.shared_memory > 0:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def hopper_tiles(rows: int, outputs: int, parts: int) -> Tiles:
    """Small tiles, and with them many programs, where outputs are few; else large ones, since every program reads x.

    All programs of a product run at once or in very many turns: a few left for a second turn would have the card to
    themselves.
    """
    if outputs < (MULTIPROCESSORS * 64 if rows == 8 else 5760):
        return Tiles(rows, 16, 256 if rows < 128 else 128, 1 if rows <= 16 else 2, 4)
    many = outputs >= 10240
    if parts == 2:
        return Tiles(rows, 64, 128 if rows < 128 else 64, 4, 3 if rows < 64 else 4)
    if rows <= 32:
        return Tiles(rows, 64, 128 if many else 256, 4, 4)
    if rows == 64:
        return Tiles(rows, 128, 128, 4, 4) if many else Tiles(rows, 64, 128, 4, 6)
    if outputs >= MULTIPROCESSORS * 256:  # the LM head's; with 128 of its rows a program reads as much of x as of it
        return Tiles(rows, 256, 64, 8, 4)
    return Tiles(rows, 128, 64, 4, 6) if many else Tiles(rows, 64, 128, 4, 4)
