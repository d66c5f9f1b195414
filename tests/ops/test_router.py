import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.ops import route
from tests.precision import bf16
from tests.reference import BASE
from tests.reference import route as exact_route

E, S, A, H = BASE.num_experts, BASE.num_shared_experts, BASE.experts_per_token, BASE.hidden_size


def drawn(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, H)).astype(np.float32)
    weight = (rng.standard_normal((E + S, H)) / np.sqrt(H)).astype(np.float32)
    return x, weight, (0.2 * rng.standard_normal(E)).astype(np.float32)


def run(x, weight, bias, scale=1.0):
    ids, weights = route(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias), jnp.float32(scale), A)
    return np.asarray(ids), np.asarray(weights)


def test_agrees_with_the_oracle():
    x, weight, bias = drawn()
    ids, weights = run(x, weight, bias, BASE.route_scale * 0.7)
    params = {"router.weight": weight.astype(float), "router.bias": bias, "router.scale": np.array([0.7])}
    for t, row in enumerate(x.astype(float)):
        expected_ids, expected_weights = exact_route(params, row, BASE)
        np.testing.assert_array_equal(ids[t], expected_ids)
        np.testing.assert_allclose(weights[t], expected_weights, rtol=1e-5)


def test_weights_of_chosen_and_shared_sum_to_the_scale():
    x, weight, bias = drawn()
    _, weights = run(x, weight, bias, 2.5)
    assert weights.shape == (len(x), A + S)
    np.testing.assert_allclose(weights.sum(axis=1), 2.5, rtol=1e-6)


def test_the_selection_bias_chooses_and_never_weighs():
    x, weight, bias = drawn()
    ids, weights = run(x, weight, bias)
    np.testing.assert_array_equal(run(x, weight, bias + 3.0)[1], weights)  # the same choice, the same weights
    pushed = np.where(np.arange(E) >= E - A, 10.0, 0.0).astype(np.float32)
    chosen, forced = run(x, weight, pushed)
    assert {tuple(sorted(row)) for row in chosen} == {tuple(range(E - A, E))}
    assert not np.array_equal(chosen, ids)
    logits = x.astype(float) @ weight.T.astype(float)
    odds = 1 / (1 + np.exp(-np.concatenate([np.take_along_axis(logits, chosen, 1), logits[:, E:]], axis=1)))
    np.testing.assert_allclose(forced, odds / odds.sum(axis=1, keepdims=True), rtol=1e-5)


def test_ties_go_to_the_lowest_index():
    x = np.ones((1, H), np.float32)
    weight = np.zeros((E + S, H), np.float32)
    weight[1] = -1.0  # the one expert that is worse than all others
    ids, _ = run(x, weight, np.zeros(E, np.float32))
    np.testing.assert_array_equal(ids[0], [0, 2, 3])


def test_logits_and_weights_stay_float32_for_bfloat16_rows():
    x, weight, bias = drawn()
    rounded_x, rounded_weight = bf16(x), bf16(weight)
    ids, weights = run(rounded_x, rounded_weight, bias)
    assert weights.dtype == np.float32
    expected = run(np.asarray(rounded_x, np.float32), np.asarray(rounded_weight, np.float32), bias)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(weights, expected[1])


def test_far_logits_stay_finite():
    x, weight, bias = drawn()
    for factor in (1e4, -1e4):
        assert np.isfinite(run(x * np.float32(factor), weight, bias)[1]).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_broken_expert_is_chosen_and_shows(sign):
    weight = np.ones((6, 4), np.float32)
    weight[3] = np.copysign(np.nan, sign)
    x, bias = jnp.ones((2, 4)), jnp.zeros(4)
    ids, weights = route(x, jnp.asarray(weight), bias, jnp.float32(1.0), 2)
    assert (np.asarray(ids) == 3).any(axis=1).all()
    assert np.isnan(np.asarray(weights)).any(axis=1).all()
