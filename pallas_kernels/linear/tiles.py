"""What a program holds at a time, by the shape of the product and the card."""

from dataclasses import dataclass, replace

from pallas_kernels._dispatch import Target, next_power_of_2

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


def choose_tiles(rows: int, outputs: int, inputs: int, parts: int, itemsize: int, where: Target) -> Tiles:
    """Tiles for `rows` of x and all `outputs` of all parts; measured on an H200, cut down to other cards' memory."""
    del inputs
    if not where.shared_memory:  # the interpreter, whose order of K follows the size of the operands
        return Tiles(16, 32, 128, 4, 2)
    if itemsize == 4:
        return Tiles(16, 32, 32, 4, 2)
    least = 16 if where.platform == "rocm" else 8
    tile = min(max(next_power_of_2(rows), least), ROWS)
    tiles = Tiles(tile, 64 // parts, 128 if tile <= 64 else 64, 4, 4)
    if outputs < 96 * 32:
        tiles = replace(tiles, outputs=16, depth=256 if tile <= 16 else 128, num_warps=1)
    if where.platform == "rocm":
        tiles = replace(tiles, num_warps=max(tiles.num_warps // 2, 1), num_stages=2)
    while tiles.num_stages > 2 and tiles.buffers(parts, itemsize) > where.shared_memory > 0:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles
