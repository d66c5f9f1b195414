import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.ops import short_conv
from tests.precision import bf16, half_ulps_bf16
from tests.reference import short_conv as exact_short_conv

WIDTH = 4


def drawn(rows=11, channels=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, channels)).astype(np.float32), rng.standard_normal((channels, WIDTH)).astype(
        np.float32
    )


def run(x, weight, left=None):
    left = np.zeros((WIDTH - 1, x.shape[1]), x.dtype) if left is None else left
    return np.asarray(short_conv(jnp.asarray(x)[None], jnp.asarray(left)[None], jnp.asarray(weight))[0])


def test_the_last_tap_is_the_current_token_and_the_input_is_added():
    x = np.zeros((8, 1), np.float32)
    x[2] = 1
    weight = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    np.testing.assert_allclose(run(x, weight)[:, 0], [0, 0, 1.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-7)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11])
def test_agrees_with_the_oracle_from_a_zero_left_context(rows):
    x, weight = drawn(rows)
    np.testing.assert_allclose(run(x, weight), exact_short_conv(x.astype(float), weight), atol=1e-6)


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_sequence_in_two_pieces_equals_the_whole(cut):
    x, weight = drawn()
    padded = np.concatenate([np.zeros((WIDTH - 1, x.shape[1]), np.float32), x])
    second = run(x[cut:], weight, left=padded[cut : cut + WIDTH - 1])
    np.testing.assert_array_equal(np.concatenate([run(x[:cut], weight), second]), run(x, weight))


def test_sequences_do_not_touch_each_other():
    x, weight = drawn()
    zeros = jnp.zeros((2, WIDTH - 1, x.shape[1]))
    both = short_conv(jnp.stack([jnp.asarray(x), jnp.asarray(x[::-1].copy())]), zeros, jnp.asarray(weight))
    np.testing.assert_array_equal(both[0], run(x, weight))
    np.testing.assert_array_equal(both[1], run(x[::-1].copy(), weight))


def test_bfloat16_rounds_once():
    x, weight = (bf16(a) for a in drawn(64, 32))
    left = jnp.zeros((1, WIDTH - 1, 32), jnp.bfloat16)
    exact = exact_short_conv(np.asarray(x, float), np.asarray(weight, float))
    # Where the sum nearly cancels, float32's own error shows beside a tiny unit of the last place.
    large = np.abs(exact) > 0.1
    found = np.asarray(short_conv(x[None], left, weight)[0], float)
    assert half_ulps_bf16(found[large], exact[large]) < 1.01
