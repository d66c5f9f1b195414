"""The steps that a prompt is prefilled in."""

import pytest

from inkling_jax.decode.engine import chunk_sizes, make_chunks

SIZES = [32, 128, 512, 2048, 8192]


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 64, 65, 127, 300, 1023, 1025, 2047, 2049, 8191, 8192, 9000, 70_001])
def test_steps_cover_the_rows_in_order_and_waste_less_than_half(rows):
    steps = make_chunks(rows, SIZES)
    assert [start for start, _ in steps] == [sum(size for _, size in steps[:i]) for i in range(len(steps))]
    covered = sum(size for _, size in steps)
    assert {size for _, size in steps} <= set(SIZES) and covered >= rows
    assert covered - rows < 32 or 2 * (covered - rows) < steps[-1][1]
    assert len(steps) <= rows // SIZES[-1] + 12


def test_known_prompts():
    assert make_chunks(1023, SIZES) == [(0, 512), (512, 512)]
    assert make_chunks(2047, SIZES) == [(0, 2048)]
    assert make_chunks(8193, SIZES) == [(0, 8192), (8192, 32)]


def test_the_kernels_take_larger_steps_and_a_large_batch_smaller_ones():
    assert chunk_sizes("triton", 1) == SIZES and chunk_sizes("xla", 1) == SIZES[:3]
    assert chunk_sizes("triton", 16) == [32, 128, 512] and chunk_sizes("xla", 64) == chunk_sizes("triton", 1000) == [32]
