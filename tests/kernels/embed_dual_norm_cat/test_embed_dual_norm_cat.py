import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.kernels.oracle import DTYPES, assert_rounds_to, bits, f64, jitted, random, rms_norm64

embed_dual_norm_cat = jitted(pallas_kernels.embed_dual_norm_cat)
embed_norm = jitted(pallas_kernels.embed_norm)
EPS = 1e-6
VOCAB = 37
SHAPES = [(1, 96), (5, 300), (3, 768)]
GRID = [  # 32: float32 for the last two shapes
    (*shape, dtype, gather, pre_norm)
    for shape, dtype, gather, pre_norm in itertools.product(SHAPES, DTYPES, [True, False], [True, False])
    if not (shape == SHAPES[0] and dtype == jnp.float32)
]


def arguments(rows: int, width: int, dtype, gather: bool, pre_norm: bool):
    ids = np.random.default_rng(9).integers(0, VOCAB, rows, np.int32)
    table = random(0, (VOCAB, width), dtype, scale=3.0)
    weights = [random(i, (width,), dtype) for i in (1, 2, 3)]
    embeds = jnp.asarray(np.asarray(table)[ids])
    source = dict(token_ids=jnp.asarray(ids), embed_table=table) if gather else dict(embeds=embeds)
    if pre_norm:
        source["pre_norm_weight"] = weights[2]
    return random(4, (rows, width), dtype), weights[0], weights[1], source, embeds


def unfused(hidden, hidden_weight, embed_weight, rows, pre_norm_weight, implementation):
    """The same by one norm a launch: a gather of rows 0, 1, 2, ... is the rows themselves."""

    def norm(x, weight):
        return embed_norm(np.arange(len(x), dtype=np.int32), x, weight, eps=EPS, implementation=implementation)

    embeds = rows if pre_norm_weight is None else norm(rows, pre_norm_weight)
    return np.concatenate([norm(hidden, hidden_weight), norm(embeds, embed_weight)], axis=-1)


@pytest.mark.parametrize(("rows", "width", "dtype", "gather", "pre_norm"), GRID)
def test_bitwise_the_unfused_sequence(implementation, rows, width, dtype, gather, pre_norm):
    hidden, hidden_weight, embed_weight, source, embeds = arguments(rows, width, dtype, gather, pre_norm)
    fused = embed_dual_norm_cat(hidden, hidden_weight, embed_weight, eps=EPS, implementation=implementation, **source)
    pre = source.get("pre_norm_weight")
    expected = unfused(hidden, hidden_weight, embed_weight, embeds, pre, implementation)
    assert fused.dtype == dtype
    if dtype == jnp.float32:  # two units in the last place
        np.testing.assert_allclose(fused, expected, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(bits(fused), bits(expected))


@pytest.mark.parametrize(("rows", "width", "dtype", "gather", "pre_norm"), GRID[8:])
def test_float64(implementation, rows, width, dtype, gather, pre_norm):
    hidden, hidden_weight, embed_weight, source, embeds = arguments(rows, width, dtype, gather, pre_norm)
    fused = embed_dual_norm_cat(hidden, hidden_weight, embed_weight, eps=EPS, implementation=implementation, **source)
    inner = f64(embeds)
    if pre_norm:
        inner = f64(rms_norm64(inner, source["pre_norm_weight"], EPS).astype(np.float32).astype(dtype))
    assert_rounds_to(fused[:, :width], rms_norm64(f64(hidden), hidden_weight, EPS))
    # An inner value next to a tie may round the other way: that is one more rounding.
    assert_rounds_to(fused[:, width:], rms_norm64(inner, embed_weight, EPS), roundings=3 if pre_norm else 1)


def test_the_inner_rounding_matters():
    """Were the inner rounding left out, the test above could not tell; bitwise equality can."""
    hidden, hidden_weight, embed_weight, source, embeds = arguments(5, 768, jnp.bfloat16, False, True)
    fused = embed_dual_norm_cat(hidden, hidden_weight, embed_weight, eps=EPS, implementation="xla", **source)
    pre_norm_weight = source["pre_norm_weight"]
    operands = [x.astype(jnp.float32) for x in (hidden, hidden_weight, embed_weight, embeds, pre_norm_weight)]
    wide = unfused(*operands, implementation="xla")
    assert np.any(bits(fused) != bits(wide.astype(jnp.bfloat16)))


def test_bad_arguments_are_named():
    hidden, hw, ew, source, embeds = arguments(5, 32, jnp.bfloat16, True, False)
    with pytest.raises(ValueError, match="either token_ids and embed_table, or embeds"):
        embed_dual_norm_cat(hidden, hw, ew, eps=EPS, embeds=embeds, **source)
    with pytest.raises(ValueError, match="either token_ids and embed_table, or embeds"):
        embed_dual_norm_cat(hidden, hw, ew, eps=EPS, token_ids=source["token_ids"])
    with pytest.raises(ValueError, match="embeds is float32; expected bfloat16"):
        embed_dual_norm_cat(hidden, hw, ew, eps=EPS, embeds=embeds.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"hidden has shape \[1, 5, 32\]"):
        embed_dual_norm_cat(hidden[None], hw, ew, eps=EPS, **source)
    with pytest.raises(ValueError, match=r"token_ids has shape \[4\]; expected \[5\]"):
        embed_dual_norm_cat(
            hidden, hw, ew, eps=EPS, token_ids=source["token_ids"][1:], embed_table=source["embed_table"]
        )
    with pytest.raises(NotImplementedError, match="needs an NVIDIA or AMD GPU"):
        embed_dual_norm_cat(hidden, hw, ew, eps=EPS, implementation="triton", **source)
