import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import bits, f64, jitted, random

router = jitted(pallas_kernels.router)
SCALE = jnp.float32(2.5)


def route64(logits, bias, scale: float, chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """One row at a time, by sorting and by sigmoids themselves: w_i = sigmoid_i / sum of sigmoids."""
    experts = len(f64(bias))
    ids, weights = [], []
    for row in f64(logits):
        sigmoid = 1 / (1 + np.exp(-row))
        best = np.argsort(-(sigmoid[:experts] + f64(bias)), kind="stable")[:chosen]
        own = np.concatenate([sigmoid[best], sigmoid[experts:]])
        ids.append(best)
        weights.append(own / own.sum() * scale)
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize(("experts", "shared", "chosen"), [(256, 2, 6), (64, 2, 6), (20, 1, 3), (5, 0, 5), (1, 1, 1)])
def test_ids_and_weights_match_float64(implementation, experts, shared, chosen):
    logits, bias = random(0, (9, experts + shared), scale=2.0), random(1, (experts,), scale=0.3)
    ids, weights = router(logits, bias, SCALE, experts_per_token=chosen, implementation=implementation)
    expected_ids, expected = route64(logits, bias, 2.5, chosen)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=3e-6)


def test_the_bias_selects_and_does_not_weigh(implementation):
    logits = jnp.zeros((1, 10), jnp.float32)
    bias = jnp.arange(8, dtype=jnp.float32)
    ids, weights = router(logits, bias, SCALE, experts_per_token=3, implementation=implementation)
    np.testing.assert_array_equal(ids, [[7, 6, 5]])
    np.testing.assert_allclose(weights, np.full((1, 5), 2.5 / 5), rtol=1e-6)


def test_ties_go_to_the_lowest_index(implementation):
    logits = jnp.array([[0, 1, 0, 1, 1, 0, 3, 1, 0.5, 0.5]], jnp.float32)
    ids, _ = router(logits, jnp.zeros(8), SCALE, experts_per_token=4, implementation=implementation)
    np.testing.assert_array_equal(ids, [[6, 1, 3, 4]])


def test_logits_far_below_zero_still_share_the_weight(implementation):
    """sigmoid(-200) is 0 in float32: only the log-sigmoids tell the experts apart."""
    logits = jnp.array([[-200, -201, -300, -200]], jnp.float32)
    ids, weights = router(logits, jnp.array([3.0, 2, 1]), SCALE, experts_per_token=2, implementation=implementation)
    np.testing.assert_array_equal(ids, [[0, 1]])
    e = np.exp([0.0, -1, 0])
    np.testing.assert_allclose(weights, [e / e.sum() * 2.5], rtol=1e-5)


def test_nan_is_seen_in_its_own_row_only(implementation):
    logits = np.array(random(0, (3, 18)))
    logits[1, 4] = np.nan
    ids, weights = router(jnp.asarray(logits), jnp.zeros(16), SCALE, experts_per_token=3, implementation=implementation)
    assert ids[1, 0] == 4 and np.isnan(weights[1]).all()
    assert np.all((ids >= 0) & (ids < 16)) and not np.isnan(weights[[0, 2]]).any()


def test_rows_do_not_depend_on_their_neighbours(implementation):
    logits, bias = random(0, (3, 22)), random(1, (20,), scale=0.1)
    _, together = router(logits, bias, SCALE, experts_per_token=4, implementation=implementation)
    for i in range(3):
        _, alone = router(logits[i : i + 1], bias, SCALE, experts_per_token=4, implementation=implementation)
        np.testing.assert_array_equal(bits(alone[0]), bits(together[i]))


def test_the_oracle_rejects_a_bias_that_leaks_into_the_weights():
    logits, bias = random(0, (9, 22), scale=2.0), random(1, (20,), scale=0.3)
    leaked = jnp.concatenate([logits[:, :20] + bias, logits[:, 20:]], axis=1)
    _, weights = router(leaked, jnp.zeros(20), SCALE, experts_per_token=4, implementation="xla")
    assert np.abs(weights - route64(logits, bias, 2.5, 4)[1]).max() > 1e-3


def test_bad_arguments_are_named():
    logits, bias = jnp.zeros((2, 10)), jnp.zeros(8)
    with pytest.raises(ValueError, match="logits is bfloat16; expected float32"):
        router(logits.astype(jnp.bfloat16), bias, SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match="experts_per_token is 9; expected 1 to 8"):
        router(logits, bias, SCALE, experts_per_token=9)
    with pytest.raises(ValueError, match="bias has 11 experts"):
        router(logits, jnp.zeros(11), SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match=r"scale has shape \[1\]"):
        router(logits, bias, SCALE[None], experts_per_token=2)
