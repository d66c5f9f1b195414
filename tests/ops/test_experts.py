import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.ops import mixture
from pallas_kernels.fp4 import FP4, dequantize
from tests.precision import bf16, relative_error

E, S, A, H, F = 6, 2, 3, 16, 8


def drawn(rows, experts=E, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.standard_normal((rows, H)),
        "weights": rng.uniform(0.1, 1, (rows, A + S)),
        "w13": rng.standard_normal((experts, 2, F, H)) / np.sqrt(H),
        "w2": rng.standard_normal((experts, H, F)) / np.sqrt(F),
        "shared_w13": rng.standard_normal((S, 2, F, H)) / np.sqrt(H),
        "shared_w2": rng.standard_normal((S, H, F)) / np.sqrt(F),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def exact(ids, x, weights, w13, w2, shared_w13, shared_w2):
    """Every expert for every row, in float64, then weighted: what the package must not do, and must equal."""

    def all_of(w13, w2):
        gate, up = (np.einsum("mh,efh->mef", x.astype(float), w13[:, i].astype(float)) for i in (0, 1))
        return np.einsum("mef,ehf->meh", gate / (1 + np.exp(-gate)) * up, w2.astype(float))

    routed = all_of(w13, w2)[np.arange(len(x))[:, None], ids]
    every = np.concatenate([routed, all_of(shared_w13, shared_w2)], axis=1)
    return np.einsum("mah,ma->mh", every, weights.astype(float))


def run(ids, arrays, valid=None):
    inputs = jax.tree.map(jnp.asarray, arrays)
    valid = None if valid is None else jnp.asarray(valid)
    return jax.jit(mixture)(ids=jnp.asarray(ids, jnp.int32), valid=valid, **inputs)


ROUTES = {
    "one_row": lambda rng: rng.permuted(np.arange(E))[None, :A],
    "spread": lambda rng: rng.permuted(np.tile(np.arange(E), (50, 1)), axis=1)[:, :A],
    "all_rows_to_the_same_experts": lambda rng: np.tile([5, 0, 3], (50, 1)),
    "one_expert_for_everything": lambda rng: np.full((50, A), 4),
    "the_same_expert_twice": lambda rng: np.tile([2, 2, 1], (7, 1)),
    "first_and_last_only": lambda rng: np.tile([0, E - 1, 0], (33, 1)),
}


@pytest.mark.parametrize("name", ROUTES)
def test_agrees_with_every_expert_for_every_row(name):
    ids = ROUTES[name](np.random.default_rng(1))
    arrays = drawn(len(ids))
    assert relative_error(run(ids, arrays), exact(ids, **arrays)) < 1e-5


def test_more_experts_than_rows():
    ids = np.array([[39, 0, 17], [3, 39, 21]])
    arrays = drawn(2, experts=40)
    assert relative_error(run(ids, arrays), exact(ids, **arrays)) < 1e-5


def test_unvisited_experts_are_not_computed():
    ids = np.tile([1, 3, 4], (20, 1))
    arrays = drawn(20)
    expected = exact(ids, **arrays)
    for idle in (0, 2, 5):
        arrays["w13"][idle] = arrays["w2"][idle] = np.nan
    assert relative_error(run(ids, arrays), expected) < 1e-5


def test_padding_visits_no_expert_and_leaves_the_others_alone():
    ids = ROUTES["spread"](np.random.default_rng(2))
    ids[25:] = 5
    ids[:25][ids[:25] == 5] = 0
    arrays = drawn(50)
    valid = np.arange(50) < 25
    whole = np.asarray(run(ids, arrays))
    arrays["w13"][5] = np.nan  # only padding asks for this one
    np.testing.assert_array_equal(run(ids, arrays, valid)[:25], whole[:25])


def test_a_row_does_not_depend_on_its_neighbours():
    ids = ROUTES["spread"](np.random.default_rng(3))
    arrays = drawn(50)
    before = np.asarray(run(ids, arrays))
    crowd = ids.copy()
    crowd[1:] = ids[0]
    arrays["x"][1:] *= -7
    np.testing.assert_array_equal(run(crowd, arrays)[0], before[0])


def test_bfloat16_is_close_and_sums_in_float32():
    ids = ROUTES["spread"](np.random.default_rng(4))
    arrays = drawn(50)
    rounded = {name: array if name == "weights" else bf16(array) for name, array in arrays.items()}
    found = run(ids, rounded)
    assert found.dtype == jnp.bfloat16
    expected = exact(ids, **{name: np.asarray(array, np.float32) for name, array in rounded.items()})
    assert relative_error(found, expected) < 0.006  # bfloat16 keeps 8 bits: one rounding of the product, one of the sum


def packed(rows, experts, format):
    """Inputs with the routed experts in 4 bits, all codes and scales at random, and with what they unpack to."""
    rng = np.random.default_rng(6)

    def drawn_packed(*shape):
        block = {"nvfp4": 16, "mxfp4": 32}[format]
        codes = rng.integers(0, 2**32, (experts, *shape[:-1], shape[-1] // 8), np.uint32)
        least = {"nvfp4": 0x28, "mxfp4": 124}[format]  # from 1/4, or from 1/8
        scales = rng.integers(least, least + 4, (experts, *shape[:-1], shape[-1] // block), np.uint8)
        scale = rng.uniform(0.1, 0.3, experts).astype(np.float32) if format == "nvfp4" else None
        return FP4(*(x if x is None else jnp.asarray(x) for x in (codes, scales, scale)), format)

    shapes = {"x": (rows, 64), "shared_w13": (1, 2, 32, 64), "shared_w2": (1, 64, 32)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    arrays["weights"] = rng.uniform(0.1, 1, (rows, 3)).astype(np.float32)
    small = {"w13": drawn_packed(2, 32, 64), "w2": drawn_packed(64, 32)}
    return arrays | small, arrays | {name: jax.jit(dequantize)(w) for name, w in small.items()}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts_in_4_bits_give_what_they_unpack_to(format):
    ids = np.random.default_rng(7).integers(0, 6, (30, 2))
    small, large = packed(30, 6, format)
    found = run(ids, small)
    np.testing.assert_allclose(found, run(ids, large), rtol=1e-6, atol=1e-6)
    assert relative_error(found, exact(ids, **{name: np.asarray(x) for name, x in large.items()})) < 1e-5


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts_in_4_bits_are_unpacked_only_where_hit(format):
    ids = np.tile([1, 3], (20, 1))
    small, large = packed(20, 6, format)
    nan = {"nvfp4": 0x7F, "mxfp4": 0xFF}[format]
    small = small | {
        name: dataclasses.replace(small[name], scales=small[name].scales.at[jnp.array([0, 2, 4, 5])].set(nan))
        for name in ("w13", "w2")
    }
    np.testing.assert_allclose(run(ids, small), run(ids, large), rtol=1e-6, atol=1e-6)


def test_experts_in_4_bits_are_never_all_unpacked():
    small, large = packed(4, 64, "nvfp4")
    inputs = {name: jax.tree.map(jnp.asarray, array) for name, array in small.items()}
    compiled = jax.jit(mixture).lower(ids=jnp.zeros((4, 2), jnp.int32), **inputs).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < large["w13"].nbytes / 8
