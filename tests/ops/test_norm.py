import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.ops import rms_norm
from tests.precision import bf16, half_ulps_bf16
from tests.reference import rms_norm as exact_rms_norm


def drawn(rows=64, width=48, seed=0):
    rng = np.random.default_rng(seed)
    return bf16(3 * rng.standard_normal((rows, width))), bf16(1 + 0.3 * rng.standard_normal(width))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_float32_agrees_with_the_oracle(eps):
    x, weight = (np.asarray(a, np.float32) for a in drawn())
    found = rms_norm(jnp.asarray(x), jnp.asarray(weight), eps)
    np.testing.assert_allclose(found, exact_rms_norm(x.astype(float), weight.astype(float), eps), rtol=1e-6)


def test_bfloat16_rounds_once():
    x, weight = drawn()
    exact = exact_rms_norm(np.asarray(x, float), np.asarray(weight, float), 1e-6)
    assert half_ulps_bf16(rms_norm(x, weight, 1e-6), exact) < 1.01
    twice = bf16(exact_rms_norm(np.asarray(x, float), 1.0, 1e-6)) * weight
    assert half_ulps_bf16(twice, exact) > 1.5  # the test would notice a second rounding


def test_a_row_of_zeros_stays_finite():
    assert not rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6).any()
