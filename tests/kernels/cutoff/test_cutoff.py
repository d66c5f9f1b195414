import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.cutoff import DEEPEST
from tests.kernels.oracle import f64

cutoff = jax.jit(pallas_kernels.cutoff, static_argnames=("weighted", "add_up", "implementation"))


def logits(seed: int, rows: int, columns: int, scale: float = 3.0) -> np.ndarray:
    x = (np.random.default_rng(seed).normal(size=(rows, columns)) * scale).astype(np.float32)
    return x - x.max(axis=1, keepdims=True)


def depth_of(x: np.ndarray) -> np.ndarray:
    """The order of the numbers as integers, by NumPy."""
    return np.abs(x).view(np.int32)


def wanted(values) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("columns", [3, 1024, 5000])
def test_top_k_is_the_kth_largest(implementation, columns):
    x = logits(0, 3, columns)
    for k in {1, min(17, columns), columns}:
        found = cutoff(x, wanted([k] * 3), weighted=False, implementation=implementation)
        np.testing.assert_array_equal(found, depth_of(-np.sort(-x, axis=1)[:, k - 1]))
    more = cutoff(x, wanted([columns + 1] * 3), weighted=False, implementation=implementation)
    np.testing.assert_array_equal(more, [DEEPEST] * 3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.95, 0.9999])
def test_top_p_takes_the_fewest_that_reach_it(implementation, p, scale):
    x = logits(1, 4, 3000, scale)
    weights = np.exp(f64(x))
    share = weights / weights.sum(axis=1, keepdims=True)
    found = np.asarray(cutoff(x, wanted(p * weights.sum(axis=1)), weighted=True, implementation=implementation))
    taken = depth_of(x) <= found[:, None]
    above = depth_of(x) < np.where(taken, depth_of(x), 0).max(axis=1, keepdims=True)
    assert ((share * taken).sum(axis=1) > p - 1e-6).all()
    assert ((share * above).sum(axis=1) < p + 1e-6).all()


def test_numbers_that_tie_are_taken_together(implementation):
    x = np.array([[0, -1, -2, -1, -1, -3, -np.inf, -np.inf]], np.float32)
    for k, last in ((1, 0), (2, -1), (3, -1), (4, -1), (5, -2), (6, -3), (7, -np.inf), (8, -np.inf)):
        found = cutoff(x, wanted([k]), weighted=False, implementation=implementation)
        assert found == depth_of(np.float32([last])), k


def test_what_lies_deeper_than_the_last_weighs_nothing(implementation):
    x = logits(2, 2, 400)
    last = depth_of(-np.sort(-x, axis=1)[:, [9, 29]].diagonal())
    weights = np.where(depth_of(x) <= last[:, None], np.exp(f64(x)), 0)
    kept = np.where(depth_of(x) <= last[:, None], x, -np.inf).astype(np.float32)
    options = dict(weighted=True, implementation=implementation)
    for p in (0.3, 0.9):
        goal = wanted(p * weights.sum(axis=1))
        np.testing.assert_array_equal(cutoff(x, goal, jnp.asarray(last), **options), cutoff(kept, goal, **options))
    counted = dict(weighted=False, implementation=implementation)
    np.testing.assert_array_equal(cutoff(x, wanted([10, 30]), jnp.asarray(last), **counted), last)
    np.testing.assert_array_equal(cutoff(x, wanted([11, 31]), jnp.asarray(last), **counted), [DEEPEST] * 2)


def test_rows_differ_in_what_they_want(implementation):
    x = logits(3, 5, 200)
    found = cutoff(x, wanted([1, 200, 0, 7, 500]), weighted=False, implementation=implementation)
    ordered = depth_of(-np.sort(-x, axis=1))
    np.testing.assert_array_equal(found, [0, ordered[1, -1], 0, ordered[3, 6], DEEPEST])


def test_rows_do_not_depend_on_their_neighbours(kernel):
    x = logits(4, 6, 3000)
    goal = wanted(0.9 * np.exp(x).sum(axis=1))
    together = cutoff(x, goal, weighted=True, implementation=kernel)
    x[[0, 5]] = np.nan
    np.testing.assert_array_equal(cutoff(x, goal, weighted=True, implementation=kernel)[1:5], together[1:5])
    alone = cutoff(x[2:3], goal[2:3], weighted=True, implementation=kernel)
    np.testing.assert_array_equal(alone, together[2:3])


def test_sums_of_several_devices_are_added(implementation):
    """Two devices with the same columns have each number twice."""
    x = logits(5, 2, 1500)
    options = dict(weighted=False, implementation=implementation)
    twice = cutoff(x, wanted([20, 31]), add_up=lambda sums: 2 * sums, **options)
    np.testing.assert_array_equal(twice, cutoff(x, wanted([10, 16]), **options))


def test_bad_arguments_are_named():
    x, goal = jnp.zeros((2, 16)), jnp.ones(2)
    with pytest.raises(ValueError, match="x is bfloat16; expected float32"):
        pallas_kernels.cutoff(x.astype(jnp.bfloat16), goal, weighted=True)
    with pytest.raises(ValueError, match=r"x has shape \[16\]; expected \[any, any\]"):
        pallas_kernels.cutoff(x[0], goal, weighted=True)
    with pytest.raises(ValueError, match=r"wanted has shape \[1\]; expected \[2\]"):
        pallas_kernels.cutoff(x, goal[:1], weighted=True)
    with pytest.raises(ValueError, match=r"last is float32; expected int32"):
        pallas_kernels.cutoff(x, goal, goal, weighted=True)
