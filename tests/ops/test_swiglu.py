import jax.numpy as jnp
import numpy as np

from inkling_jax.ops import linear, swiglu
from tests.precision import bf16, half_ulps_bf16, relative_error
from tests.reference import swiglu as exact_swiglu


def drawn(rows=20, hidden=32, width=24, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (rows, hidden), (2, width, hidden), (hidden, width)
    return [(rng.standard_normal(shape) / np.sqrt(shape[-1]) ** (i > 0)) for i, shape in enumerate(shapes)]


def test_float32_agrees_with_the_oracle():
    x, w13, w2 = (a.astype(np.float32) for a in drawn())
    exact = np.stack([exact_swiglu(row, w13.astype(float), w2.astype(float)) for row in x.astype(float)])
    assert relative_error(swiglu(jnp.asarray(x), jnp.asarray(w13), jnp.asarray(w2)), exact) < 1e-6


def test_gate_comes_first():
    """silu(0) is 0, so a closed gate shuts everything; a closed up does too, so both open must differ from swapped."""
    x, w13, w2 = (jnp.asarray(a, jnp.float32) for a in drawn())
    assert np.abs(swiglu(x, w13, w2) - swiglu(x, w13[::-1], w2)).max() > 0.05


def test_bfloat16_rounds_once_before_the_last_product():
    x, w13, w2 = (bf16(a) for a in drawn())
    wide_x, wide_w13, wide_w2 = (np.asarray(a, float) for a in (x, w13, w2))
    gate, up = wide_x @ wide_w13[0].T, wide_x @ wide_w13[1].T
    product = np.asarray(bf16(gate / (1 + np.exp(-gate)) * up), float)
    found = swiglu(x, w13, w2)
    assert found.dtype == jnp.float32
    # Where float32's own error decides a rounding of the product, one term moves by half a unit; hence not 1e-6.
    assert relative_error(found, product @ wide_w2.T) < 1e-3


def test_linear_accumulates_in_float32():
    x, w = bf16(np.ones((1, 4096))), bf16(np.full((3, 4096), 1 / 256))
    x = x.at[0, 0].set(256)
    exact = np.asarray(x, float) @ np.asarray(w, float).T
    assert half_ulps_bf16(linear(x, w), exact) <= 1
    np.testing.assert_allclose(linear(x, w, jnp.float32), exact, rtol=1e-6)
