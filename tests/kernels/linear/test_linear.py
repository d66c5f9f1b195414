import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.linear.tiles import ROWS
from tests.kernels.oracle import DTYPES, ROUNDING, assert_rounds_to, bits, f64, random

# Some that tiles divide, some that they do not; one narrower than any tile.
SIZES = [((64,), 256), ((96, 33, 5), 320), ((70,), 100)]


def linear(*args, **kw):
    return np.asarray(pallas_kernels.linear(*args, **kw))


def operands(rows: int, sizes: tuple[int, ...], inputs: int, dtype) -> tuple[jax.Array, list[jax.Array]]:
    weights = [random(i + 1, (size, inputs), dtype, inputs**-0.5) for i, size in enumerate(sizes)]
    return random(0, (rows, inputs), dtype), weights


def product64(x, weights) -> np.ndarray:
    return np.concatenate([f64(x) @ f64(w).T for w in weights], axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_products_side_by_side_match_float64(implementation, rows, sizes, inputs, dtype):
    x, weights = operands(rows, sizes, inputs, dtype)
    y = linear(x, weights, implementation=implementation)
    assert y.dtype == x.dtype
    assert_rounds_to(y, product64(x, weights), floor=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float32_result_is_not_rounded_to_the_operands_type(implementation, dtype):
    x, weights = operands(3, (40,), 128, dtype)
    y = linear(x, weights[0], out_dtype=jnp.float32, implementation=implementation)
    assert y.dtype == np.float32
    assert_rounds_to(y, product64(x, weights), floor=2e-6)


def test_float32_products_are_exact_and_not_tf32(implementation):
    """1 + 2^-20 needs more than the ten bits of TF32."""
    x = jnp.full((2, 64), 1 + 2.0**-20, jnp.float32)
    y = linear(x, jnp.eye(32, 64, dtype=jnp.float32), implementation=implementation)
    np.testing.assert_array_equal(y, np.full((2, 32), 1 + 2.0**-20, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_bitwise_the_same_among_any_others(kernel, dtype):
    """Its neighbours, their number and its place differ."""
    x, weights = operands(40, (64, 33), 160, dtype)
    run = jax.jit(lambda x: pallas_kernels.linear(x, weights, out_dtype=jnp.float32, implementation=kernel))
    together = bits(np.asarray(run(x)))
    for rows in (1, 5):
        np.testing.assert_array_equal(bits(np.asarray(run(x[:rows]))), together[:rows])
    np.testing.assert_array_equal(bits(np.asarray(run(x[::-1])))[::-1], together)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "inputs", "dtype"),
    [((8192, 2048, 2048, 1024), 6144, jnp.bfloat16), ((6144,), 8192, jnp.bfloat16), ((832,), 4096, jnp.float16)],
)
def test_a_row_is_bitwise_the_same_at_the_models_sizes(sizes, inputs, dtype):
    """With the tiles of every number of rows."""
    weights = [jax.random.normal(jax.random.key(i), (size, inputs), dtype) for i, size in enumerate(sizes)]
    x = jax.random.normal(jax.random.key(9), (ROWS, inputs), dtype)
    run = jax.jit(lambda x, w: pallas_kernels.linear(x, w, out_dtype=jnp.float32, implementation="triton"))
    together = bits(np.asarray(run(x, weights)))
    for rows in (1, 5, 16, 20, 64):
        np.testing.assert_array_equal(bits(np.asarray(run(x[-rows:], weights))), together[-rows:])


def test_more_rows_than_decoding_has_are_right_as_well(implementation):
    x, weights = operands(ROWS + 1, (40, 24), 64, jnp.float32)
    assert_rounds_to(linear(x, weights, implementation=implementation), product64(x, weights), floor=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_comes_before_the_rounding(implementation, dtype):
    x, weights = operands(3, (40,), 128, dtype)
    scale = jnp.asarray(1.1, dtype)
    y = linear(x, weights, scale=scale, implementation=implementation)
    assert y.dtype == dtype
    assert_rounds_to(y, product64(x, weights) * f64(scale), floor=2e-6)


@pytest.mark.parametrize("outputs", [1, 96, 100, 134])
def test_only_the_first_outputs_are_made(implementation, outputs):
    x, weights = operands(4, (96, 33, 5), 64, jnp.float32)
    y = linear(x, weights, outputs=outputs, implementation=implementation)
    assert_rounds_to(y, product64(x, weights)[:, :outputs], floor=2e-6)


def test_values_that_are_not_finite_stay_in_their_row_and_column(implementation):
    x, weights = operands(3, (40,), 100, jnp.float32)
    x, w = x.at[1, 99].set(jnp.nan), weights[0].at[39, 0].set(jnp.inf)
    y = linear(x, w, implementation=implementation)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2], :39]).all() and np.isinf(y[[0, 2], 39]).all()


def test_no_rows_give_no_rows(implementation):
    x, weights = operands(0, (40, 8), 64, jnp.float32)
    assert linear(x, weights, implementation=implementation).shape == (0, 48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inputs"), [(1, 64, 256), (20, 40, 100)])
def test_swiglu_matches_float64(implementation, rows, width, inputs, dtype):
    x, w13 = random(0, (rows, inputs), dtype), random(1, (2, width, inputs), dtype, inputs**-0.5)
    y = np.asarray(pallas_kernels.linear_swiglu(x, w13, implementation=implementation))
    gate, up = f64(x) @ f64(w13[0]).T, f64(x) @ f64(w13[1]).T
    assert y.dtype == x.dtype
    assert_rounds_to(y, gate / (1 + np.exp(-gate)) * up, floor=4e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_swiglu_of_a_row_is_bitwise_the_same_among_any_others(kernel, dtype):
    x, w13 = random(0, (40, 160), dtype), random(1, (2, 70, 160), dtype)
    run = jax.jit(lambda x: pallas_kernels.linear_swiglu(x, w13, implementation=kernel))
    together = bits(np.asarray(run(x)))
    for rows in (1, 5):
        np.testing.assert_array_equal(bits(np.asarray(run(x[:rows]))), together[:rows])


def test_the_oracle_rejects_weights_in_another_order():
    x, weights = operands(5, (40, 24), 64, jnp.bfloat16)
    y = linear(x, weights[::-1], implementation="xla")
    assert np.abs(f64(y) - product64(x, weights)).max() > 100 * ROUNDING["bfloat16"]


def test_bad_arguments_are_named():
    x, weights = operands(2, (40, 24), 64, jnp.float32)
    with pytest.raises(ValueError, match=r"weights\[1\] is bfloat16; expected float32"):
        linear(x, [weights[0], weights[1].astype(jnp.bfloat16)])
    with pytest.raises(ValueError, match=r"weights\[0\] has shape \[40, 64\]; expected \[any, 32\]"):
        linear(x[:, :32], weights[0])
    with pytest.raises(ValueError, match=r"x has shape \[64\]"):
        linear(x[0], weights)
    with pytest.raises(ValueError, match="weights is empty"):
        linear(x, [])
    with pytest.raises(ValueError, match="outputs is 65; expected 1 to 64"):
        linear(x, weights, outputs=65)
    with pytest.raises(ValueError, match="out_dtype is int32; expected bfloat16"):
        linear(x, weights, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"scale has shape \[1\]"):
        linear(x, weights, scale=jnp.ones(1))
    with pytest.raises(ValueError, match=r"w13 has shape \[3, 40, 64\]"):
        pallas_kernels.linear_swiglu(x, jnp.zeros((3, 40, 64)))
