import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import DTYPES, assert_rounds_to, bits, f64, jitted, random, rms_norm64

embed_norm = jitted(pallas_kernels.embed_norm)
EPS = 1e-6
IDS = jnp.array([3, 0, 10, 3, 7], jnp.int32)


def arguments(width: int, dtype):
    return random(0, (11, width), dtype), random(1, (width,), dtype), random(2, (width,), dtype)


@pytest.mark.parametrize(
    ("width", "dtype"), [(16, jnp.float32), (257, jnp.bfloat16), (2052, jnp.bfloat16), *((768, d) for d in DTYPES)]
)
def test_both_outputs_match_float64(implementation, width, dtype):
    table, weight, following = arguments(width, dtype)
    first, second = embed_norm(IDS, table, weight, eps=EPS, next_weight=following, implementation=implementation)
    assert_rounds_to(first, rms_norm64(f64(table)[np.asarray(IDS)], weight, EPS))
    assert_rounds_to(second, rms_norm64(f64(first), following, EPS))  # reads the rounded first output


def test_one_output_without_next_weight(implementation):
    table, weight, following = arguments(96, jnp.bfloat16)
    alone = embed_norm(IDS, table, weight, eps=EPS, implementation=implementation)
    first, _ = embed_norm(IDS, table, weight, eps=EPS, next_weight=following, implementation=implementation)
    np.testing.assert_array_equal(bits(alone), bits(first))


def test_ids_of_any_shape_and_rows_that_ignore_their_neighbours(implementation):
    table, weight, _ = arguments(96, jnp.float32)
    whole = embed_norm(IDS[:4].reshape(2, 2), table, weight, eps=EPS, implementation=implementation)
    assert whole.shape == (2, 2, 96)
    for i in range(4):
        alone = embed_norm(IDS[i : i + 1], table, weight, eps=EPS, implementation=implementation)
        np.testing.assert_array_equal(bits(whole.reshape(4, 96)[i]), bits(alone[0]))


def test_ids_outside_the_table_read_the_nearest_row(implementation):
    table, weight, _ = arguments(32, jnp.float32)
    outside = embed_norm(jnp.array([-5, 999], jnp.int32), table, weight, eps=EPS, implementation=implementation)
    inside = embed_norm(jnp.array([0, 10], jnp.int32), table, weight, eps=EPS, implementation=implementation)
    np.testing.assert_array_equal(bits(outside), bits(inside))


def test_no_rows(implementation):
    table, weight, _ = arguments(32, jnp.float32)
    assert embed_norm(IDS[:0], table, weight, eps=EPS, implementation=implementation).shape == (0, 32)


def test_bad_arguments_are_named():
    table, weight, _ = arguments(32, jnp.float32)
    with pytest.raises(ValueError, match="token_ids is uint8; expected int32"):
        embed_norm(IDS.astype(jnp.uint8), table, weight, eps=EPS)
    with pytest.raises(ValueError, match=r"weight has shape \[31\]; expected \[32\]"):
        embed_norm(IDS, table, weight[1:], eps=EPS)
    with pytest.raises(ValueError, match="embed_table is int32"):
        embed_norm(IDS, table.astype(jnp.int32), weight, eps=EPS)
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        embed_norm(IDS, table, weight, eps=EPS, implementation="cuda")
