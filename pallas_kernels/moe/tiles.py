"""What a program holds at a time, by the shape of the call and the card."""

from dataclasses import dataclass, replace

from pallas_kernels._dispatch import Target, next_power_of_2

DECODE_ROWS = 16  # the most rows an expert has, on average, for which its weights and not its products count
FEW_ROWS = 128  # up to so many rows of x are decoding however few the experts: a row's bits must not turn with others


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of x, rows of the weights (gate and up each), and columns of both; Triton's warps and pipeline stages.

    `weights_first` computes w x^T. Products then take as few as 8 rows of x, and unpacked weights go from registers to
    Hopper's wide products, where as a right operand they would pass through shared memory. `group` blocks of rows go
    through the outputs together: programs that run at a time then share rows of x as well as weights.
    """

    rows: int
    outputs: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3
    weights_first: bool = False
    group: int = 1

    def buffers(self, parts: int, itemsize: float) -> float:
        """Bytes of shared memory, at most: tiles of x and of the weights for each stage, the narrow products' last in
        registers."""
        stages = self.num_stages if self.rows >= 64 else self.num_stages - 1
        return stages * (self.rows + parts * self.outputs) * self.depth * itemsize


def choose_tiles(up: bool, rows: int, pairs: int, experts: int, packed: bool, itemsize: int, where: Target) -> Tiles:
    """Tiles for `pairs` of one of the rows and one of all the experts, those of other devices too.

    Measured on an H200, and cut down to other cards' shared memory.
    Decoding reads weights: few rows, small programs, so that they spread evenly over the card. From about 16 rows an
    expert on, the product counts: large tiles. float32 has no matrix unit, and small ones.
    """
    parts, share = (2 if up else 1), pairs // experts
    few = rows <= FEW_ROWS or share <= DECODE_ROWS
    wide = where.capability in (90, 100, 103)  # cards whose products read shared memory
    if itemsize == 4:
        tiles = Tiles(16, 32, 128 if packed else 32, 4, 2)
    elif few and packed:
        least = 16 if where.platform == "rocm" else 8  # rows that matrix units take, beside 16 of the weights
        # Where most experts are hit, the second launch has programs enough to be larger.
        outputs = 64 if not up and share <= 8 and 4 * pairs >= 3 * experts else 32 // parts
        tiles = Tiles(least if share <= 8 else 16, outputs, 256, 2, 3, weights_first=True)
    elif few:
        # With more than 8 rows an expert some have a second block, which then finds the weights in L2.
        tiles = Tiles(16, 64 // parts, 128, 4, 5, weights_first=True, group=16 if share > 8 else 1)
        if pairs <= 16:
            tiles = Tiles(16, 16, 256, 1, 4) if up else Tiles(16, 32, 256, 2, 4)
    elif packed:
        tiles = Tiles(64 if share <= 64 or not wide else 128, 64, 128, 4, 3, weights_first=wide)
    elif not wide:
        tiles = Tiles(64, 128 // parts, 64, 4, 3)
    else:
        tiles = Tiles(64, 256 // parts, 64, 4, 3) if share <= 64 else Tiles(128, 256 // parts, 64, 8, 4, group=4)
    if where.platform == "rocm":  # warps of 64 threads, and one buffer is filled while the other waits in registers
        tiles = replace(tiles, num_warps=max(tiles.num_warps // 2, 1), num_stages=2)
    while tiles.num_stages > 2 and tiles.buffers(parts, itemsize) > where.shared_memory > 0:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def shared_tiles(tiles: Tiles, rows: int, packed: bool) -> Tiles:
    """Tiles of the shared experts, arrays that all rows visit, beside the routed ones'.

    With the weights first, products are the narrow ones for any number of rows up to 64, and add in the same order.
    """
    if tiles.rows > DECODE_ROWS:
        return replace(tiles, depth=64)
    depth = 64
    if rows <= (1 if packed else 16):  # more would take the shared memory of programs beside it
        depth = 128 if packed else tiles.depth
    return replace(tiles, rows=min(max(16, next_power_of_2(rows)), 64), depth=depth, weights_first=True)
