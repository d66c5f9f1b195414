"""The table of names covers every parameter, maps no two to one tensor, and its forms only rearrange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_jax.checkpoint.names import (
    CONV,
    HALVES,
    INTERLEAVED,
    PAIR,
    PLAIN,
    TRANSPOSED,
    VARIANTS,
    Form,
    Variant,
    is_tower,
    stored,
    tower_name,
)

from . import tiny

PARAMS = tiny.random_parameters()
LAYOUTS = {
    Variant("original"): tiny.original(PARAMS),
    Variant("transformers"): tiny.transformers(PARAMS),
    Variant("transformers", text_only=True): tiny.transformers(PARAMS, text_only=True),
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_names_and_shapes_are_those_of_the_format(variant: Variant) -> None:
    shapes = {}
    for path, array in PARAMS.items():
        place = stored(path, variant)
        for name, shape in zip(place.names, place.form.shapes(array.shape), strict=True):
            assert name not in shapes
            shapes[name] = shape
    assert shapes == {name: array.shape for name, array in LAYOUTS[variant].items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_views_are_the_tensors_of_the_format(variant: Variant) -> None:
    for path, array in PARAMS.items():
        place = stored(path, variant)
        for name, view in zip(place.names, place.form.views(array), strict=True):
            assert np.shares_memory(view, array)
            np.testing.assert_array_equal(view.reshape(LAYOUTS[variant][name].shape), LAYOUTS[variant][name])


@pytest.mark.parametrize(
    "form",
    [PLAIN, CONV, TRANSPOSED, INTERLEAVED, HALVES, PAIR],
    ids=["plain", "conv", "transposed", "rows", "halves", "pair"],
)
@given(lead=st.integers(1, 4), f=st.integers(1, 5), h=st.integers(1, 4))
def test_forms_move_every_element_once(form: Form, lead: int, f: int, h: int) -> None:
    shape = (f, h) if form in (CONV, TRANSPOSED) else (lead, 2, f, h)
    array = np.arange(np.prod(shape)).reshape(shape)
    pieces = [v.reshape(s) for v, s in zip(form.views(array), form.shapes(shape), strict=True)]
    assert sorted(np.concatenate([piece.ravel() for piece in pieces])) == list(range(array.size))
    back = np.full_like(array, -1)
    for view, piece in zip(form.views(back), pieces, strict=True):
        assert piece.shape[0] % len(view) == 0
        view[...] = piece.reshape(view.shape)
    np.testing.assert_array_equal(back, array)


@given(lead=st.integers(1, 3), f=st.integers(1, 5), h=st.integers(1, 3))
def test_gate_and_up_rows(lead: int, f: int, h: int) -> None:
    """Row r of an interleaved tensor is gate r/2 when even, up r/2 when odd; halves hold all the gates first."""
    array = np.random.default_rng(0).normal(size=(lead, 2, f, h))
    [rows] = INTERLEAVED.views(array)
    [halves] = HALVES.views(array)
    gates, ups = PAIR.views(array)
    for r in range(2 * f):
        np.testing.assert_array_equal(rows.reshape(lead, 2 * f, h)[:, r], array[:, r % 2, r // 2])
        np.testing.assert_array_equal(halves.reshape(lead, 2 * f, h)[:, r], (gates if r < f else ups)[:, r % f])
    np.testing.assert_array_equal(gates, array[:, 0])


def test_paths_the_model_cannot_have() -> None:
    for path in ("layers.0.attn.wz.weight", "mtp.0.layer.mlp.nothing", "head.weight"):
        with pytest.raises(KeyError):
            stored(path, VARIANTS[0])


def test_tower_names() -> None:
    ours, theirs = tiny.towers()
    for original, transformers in zip(ours, theirs, strict=True):
        for name in (original, transformers):
            assert is_tower(name)
            assert tower_name(name, "original") == original
            assert tower_name(name, "transformers") == transformers
    assert tower_name("model.visual.layers.gate_0.weight", "transformers") is None
    assert not any(is_tower(name) for tensors in LAYOUTS.values() for name in tensors)
