"""The table of blocks, against sorting in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Implementation
from pallas_kernels.moe.blocks import ALONE, CHUNK, Blocks, make_blocks

IMPLEMENTATIONS = ["interpret", pytest.param("triton", marks=pytest.mark.gpu)]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def run(ids, valid, experts: int, size: int, implementation: Implementation) -> Blocks:
    return make_blocks(ids, valid, experts, size, implementation)


def check(ids: np.ndarray, valid: np.ndarray | None, experts: int, size: int, implementation) -> None:
    """Each expert's pairs, in order, cut into blocks that follow one another; every other block is empty."""
    mask = None if valid is None else jnp.asarray(valid)
    blocks = run(jnp.asarray(ids, jnp.int32), mask, experts, size, implementation)
    (expert, first, end), order = np.asarray(blocks.table), np.asarray(blocks.order)
    hit = (ids >= 0) & (ids < experts) if valid is None else (ids >= 0) & (ids < experts) & valid[:, None]
    flat = np.where(hit, ids, experts).reshape(-1)
    expected = np.argsort(flat, kind="stable")[: hit.sum()]
    np.testing.assert_array_equal(order[: hit.sum()], expected)
    wanted, at = [], 0
    for e in range(experts):
        count = (flat == e).sum()
        wanted += [(e, at + i, min(at + i + size, at + count)) for i in range(0, count, size)]
        at += count
    found = np.stack([expert, first, end], axis=1)
    np.testing.assert_array_equal(found[: len(wanted)], np.array(wanted, int).reshape(-1, 3))
    np.testing.assert_array_equal(first[len(wanted) :], end[len(wanted) :])
    assert len(expert) == min(ids.size, min(experts, ids.size) + ids.size // size)


def drawn(rows: int, per_row: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, experts, (rows, per_row))


@pytest.mark.parametrize(
    ("rows", "per_row", "experts", "size"),
    [
        (2, 6, 64, 16),
        (64, 6, 64, 16),
        (64, 8, 256, 8),
        (7, 3, 5, 8),
        (300, 3, 20, 64),
        (171, 6, 7, 128),
        (1500, 6, 64, 128),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_are_those_of_a_stable_sort(implementation, rows, per_row, experts, size):
    check(drawn(rows, per_row, experts), None, experts, size, implementation)


@pytest.mark.parametrize("rows", [9, CHUNK])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_absent_experts_and_rows_that_are_not_real_are_in_no_block(implementation, rows):
    ids = drawn(rows, 4, 16) - 5
    valid = np.random.default_rng(1).integers(0, 2, rows).astype(bool)
    check(ids, valid, 8, 8, implementation)
    check(ids, np.zeros(rows, bool), 8, 8, implementation)


@pytest.mark.parametrize("rows", [40, ALONE])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_expert_for_all(implementation, rows):
    check(np.full((rows, 2), 3), None, 8, 16, implementation)
