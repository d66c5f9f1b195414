import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import DTYPES, bits, f64, jitted, random

router = jitted(pallas_kernels.router)
SCALE = jnp.float32(2.5)


def route64(x, weight, bias, scale: float, chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """One row at a time, by sorting and by sigmoids themselves: w_i = sigmoid_i / sum of sigmoids."""
    experts = len(f64(bias))
    ids, weights = [], []
    for row in f64(x) @ f64(weight).T:
        sigmoid = 1 / (1 + np.exp(-row))
        best = np.argsort(-(sigmoid[:experts] + f64(bias)), kind="stable")[:chosen]
        own = np.concatenate([sigmoid[best], sigmoid[experts:]])
        ids.append(best)
        weights.append(own / own.sum() * scale)
    return np.array(ids), np.array(weights)


def drawn(rows: int, outputs: int, hidden: int, dtype=jnp.float32):
    return random(0, (rows, hidden), dtype, 2.0), random(1, (outputs, hidden), dtype, hidden**-0.5)


def given(logits) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Operands whose product is these logits exactly."""
    logits = jnp.asarray(logits, jnp.float32)
    return logits, jnp.eye(logits.shape[1])


@pytest.mark.parametrize(
    ("experts", "shared", "chosen", "hidden"),
    [(256, 2, 6, 640), (64, 2, 6, 1024), (20, 1, 3, 96), (5, 0, 5, 600), (1, 1, 1, 40)],
)
def test_ids_and_weights_match_float64(implementation, experts, shared, chosen, hidden):
    (x, weight), bias = drawn(9, experts + shared, hidden), random(2, (experts,), scale=0.3)
    ids, weights = router(x, weight, bias, SCALE, experts_per_token=chosen, implementation=implementation)
    expected_ids, expected = route64(x, weight, bias, 2.5, chosen)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_half_types_are_summed_in_float32(implementation, dtype, rows):
    (x, weight), bias = drawn(rows, 22, 600, dtype), random(2, (20,), scale=0.3)
    ids, weights = router(x, weight, bias, SCALE, experts_per_token=4, implementation=implementation)
    expected_ids, expected = route64(x, weight, bias, 2.5, 4)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_the_bias_selects_and_does_not_weigh(implementation):
    bias = jnp.arange(8, dtype=jnp.float32)
    ids, weights = router(*given(np.zeros((1, 10))), bias, SCALE, experts_per_token=3, implementation=implementation)
    np.testing.assert_array_equal(ids, [[7, 6, 5]])
    np.testing.assert_allclose(weights, np.full((1, 5), 2.5 / 5), rtol=1e-6)


def test_both_scales_multiply_the_weights(implementation):
    x, weight = drawn(3, 10, 40)
    sizes = dict(experts_per_token=2, implementation=implementation)
    _, once = router(x, weight, jnp.zeros(8), SCALE, **sizes)
    _, twice = router(x, weight, jnp.zeros(8), SCALE, route_scale=8.0, **sizes)
    np.testing.assert_array_equal(twice, 8 * once)


def test_ties_go_to_the_lowest_index(implementation):
    operands = given([[0, 1, 0, 1, 1, 0, 3, 1, 0.5, 0.5]])
    ids, _ = router(*operands, jnp.zeros(8), SCALE, experts_per_token=4, implementation=implementation)
    np.testing.assert_array_equal(ids, [[6, 1, 3, 4]])


def test_logits_far_below_zero_still_share_the_weight(implementation):
    """sigmoid(-200) is 0 in float32: only the log-sigmoids tell the experts apart."""
    operands, bias = given([[-200, -201, -300, -200]]), jnp.array([3.0, 2, 1])
    ids, weights = router(*operands, bias, SCALE, experts_per_token=2, implementation=implementation)
    np.testing.assert_array_equal(ids, [[0, 1]])
    e = np.exp([0.0, -1, 0])
    np.testing.assert_allclose(weights, [e / e.sum() * 2.5], rtol=1e-5)


def test_nan_is_seen_in_its_own_row_only(implementation):
    x, weight = drawn(3, 18, 40)
    x = x.at[1, 4].set(jnp.nan)
    ids, weights = router(x, weight, jnp.zeros(16), SCALE, experts_per_token=3, implementation=implementation)
    assert np.isnan(weights[1]).all()
    assert np.all((ids >= 0) & (ids < 16)) and not np.isnan(weights[[0, 2]]).any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_expert_that_gives_nan_is_chosen_first(implementation, sign):
    x, weight = drawn(3, 18, 40)
    weight = weight.at[4].set(np.copysign(np.nan, sign))
    ids, weights = router(x, weight, jnp.zeros(16), SCALE, experts_per_token=3, implementation=implementation)
    assert np.all(ids[:, 0] == 4) and np.isnan(weights).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_do_not_depend_on_their_neighbours(implementation, dtype):
    """Few rows and many take other tiles; XLA's product on a CPU adds a single row up in another order."""
    (x, weight), bias = drawn(70, 22, 600, dtype), random(2, (20,), scale=0.1)
    ids, together = router(x, weight, bias, SCALE, experts_per_token=4, implementation=implementation)
    sizes = (2, 64) if implementation == "xla" else (1, 3, 16, 64)
    for size in sizes:
        few, alone = router(x[5 : 5 + size], weight, bias, SCALE, experts_per_token=4, implementation=implementation)
        np.testing.assert_array_equal(few, ids[5 : 5 + size])
        if implementation == "triton":
            np.testing.assert_array_equal(bits(alone), bits(together[5 : 5 + size]))
        else:
            np.testing.assert_allclose(alone, together[5 : 5 + size], rtol=1e-6)


def test_the_oracle_rejects_a_bias_that_leaks_into_the_weights():
    (x, weight), bias = drawn(9, 22, 40), random(2, (20,), scale=0.3)
    logits = x @ weight.T
    leaked = given(jnp.concatenate([logits[:, :20] + bias, logits[:, 20:]], axis=1))
    _, weights = router(*leaked, jnp.zeros(20), SCALE, experts_per_token=4, implementation="xla")
    assert np.abs(weights - route64(x, weight, bias, 2.5, 4)[1]).max() > 1e-3


def test_bad_arguments_are_named():
    x, weight, bias = jnp.zeros((2, 16)), jnp.zeros((10, 16)), jnp.zeros(8)
    with pytest.raises(ValueError, match="x is int32; expected"):
        router(x.astype(jnp.int32), weight, bias, SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match="weight is bfloat16; expected float32"):
        router(x, weight.astype(jnp.bfloat16), bias, SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match=r"weight has shape \[10, 16\]; expected \[any, 15\]"):
        router(x[:, 1:], weight, bias, SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match="experts_per_token is 9; expected 1 to 8"):
        router(x, weight, bias, SCALE, experts_per_token=9)
    with pytest.raises(ValueError, match="bias has 11 experts"):
        router(x, weight, jnp.zeros(11), SCALE, experts_per_token=2)
    with pytest.raises(ValueError, match=r"scale has shape \[1\]"):
        router(x, weight, bias, SCALE[None], experts_per_token=2)
