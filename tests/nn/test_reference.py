"""The oracle itself, held against what transformers computed in float64."""

import numpy as np
import pytest

from tests import golden, reference


@pytest.mark.parametrize("name", golden.NAMES)
def test_oracle_agrees_with_transformers(name):
    config, params, expected = golden.read(name)
    assert set(params) == set(reference.parameter_shapes(config))
    assert {path: array.shape for path, array in params.items()} == reference.parameter_shapes(config)
    logits = reference.forward(params, config, expected["tokens"])["logits"]
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", golden.NAMES)
def test_oracle_depths_agree_with_transformers(name):
    config, params, expected = golden.read(name)
    found = reference.depths(params, config, expected["tokens"])
    assert len(found) == config.mtp_depths == sum(key.startswith("depth_") for key in expected)
    for d, depth in enumerate(found):
        np.testing.assert_allclose(depth["logits"], expected[f"depth_{d}"], rtol=0, atol=1e-10)


def test_golden_files_reach_past_every_boundary():
    assert len(golden.NAMES) == 3
    for name in golden.NAMES:
        config, _, expected = golden.read(name)
        length = len(expected["tokens"])
        assert length > max(config.window, config.rel_extent, config.log_scaling_floor or 0)
        assert expected["logits"].shape == (length, config.real_vocab_size)
        assert config.real_vocab_size < config.vocab_size
