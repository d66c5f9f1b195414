"""The golden folders as checkpoints: read and computed by the package, against what transformers computed."""

import numpy as np
import pytest

import inkling_jax
from tests import golden
from tests.precision import relative_error


@pytest.fixture(scope="module", params=golden.NAMES)
def loaded(request):
    return request.param, inkling_jax.load(golden.folder(request.param), dtype="float32", progress=False)


def test_every_tensor_arrives_where_it_belongs(loaded):
    name, model = loaded
    config, params, _ = golden.read(name)
    assert model.config == config
    assert set(model.params) == set(params)
    for path, array in params.items():
        np.testing.assert_array_equal(model.params[path], array, err_msg=path)


def test_logits_agree_with_transformers(loaded):
    name, model = loaded
    _, _, expected = golden.read(name)
    found = model.logits(expected["tokens"])
    assert found.shape == expected["logits"].shape
    assert relative_error(found, expected["logits"]) < 1e-5


def test_the_last_depth_agrees_with_transformers(loaded):
    """It reads what all the depths before it have made."""
    name, model = loaded
    config, _, expected = golden.read(name)
    last = config.mtp_depths - 1
    found = model.mtp_logits(expected["tokens"], last)
    assert found.shape == expected[f"depth_{last}"].shape
    assert relative_error(found, expected[f"depth_{last}"]) < 1e-5
