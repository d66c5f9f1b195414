"""Models with their experts in 4 bits: which parameters they have, and that they compute what these unpack to."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inkling_jax.nn import InklingModel, abstract_parameters, logical_axes
from inkling_jax.quantization import Quantization, quantization_of
from pallas_kernels.fp4 import FP4, dequantize
from tests.checkpoint.tiny import WIDE

from .build import build, run


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_parameters(format):
    quantization = Quantization(format, (2,))
    plain, found = abstract_parameters(WIDE), abstract_parameters(WIDE, "bfloat16", quantization)
    block = {"nvfp4": 16, "mxfp4": 32}[format]
    expected = dict(plain)
    for name, shape in (("w13", (5, 2, 64, 32)), ("w2", (5, 32, 64))):
        path = f"layers.2.mlp.experts.{name}"
        assert expected.pop(path).shape == shape
        expected[f"{path}.codes"] = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // 8), jnp.uint32)
        expected[f"{path}.scales"] = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // block), jnp.uint8)
        if format == "nvfp4":
            expected[f"{path}.expert_scale"] = jax.ShapeDtypeStruct((5,), jnp.float32)
    assert found == expected
    axes = logical_axes(WIDE, quantization)
    assert {path: len(names) for path, names in axes.items()} == {path: len(x.shape) for path, x in found.items()}
    assert axes["layers.2.mlp.experts.w2.scales"] == logical_axes(WIDE)["layers.2.mlp.experts.w2"]
    assert quantization_of(found) == quantization and quantization_of(plain) is None


def test_a_drawn_model_computes_what_its_weights_unpack_to():
    format, config = (
        "mxfp4",
        replace(WIDE, num_layers=2, local_layers=(0,), mtp_depths=0, mtp_local=(), chain_norm=False),
    )
    quantization = Quantization(format, (1,))
    model = InklingModel(config, dtype="float32", quantization=quantization, rngs=nnx.Rngs(3))
    state = {".".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    params = {path: x for path, x in state.items() if ".experts." not in path}
    for path in (f"layers.1.mlp.experts.{name}" for name in ("w13", "w2")):
        scale = state.get(f"{path}.expert_scale")
        params[path] = dequantize(FP4(state[f"{path}.codes"], state[f"{path}.scales"], scale, format))
    tokens = np.random.default_rng(1).integers(0, WIDE.real_vocab_size, (2, 7))
    found, expected = run(model, tokens), run(build(config, params), tokens)
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
    assert float(jnp.std(found["logits"])) > 0.01


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match="format: expected nvfp4 or mxfp4, found 'int8'"):
        Quantization("int8", (1,))  # type: ignore[arg-type]
    for layers in ((-1,), (True,), ("1",)):
        with pytest.raises(ValueError, match="layers: expected ids of layers"):
            Quantization("nvfp4", layers)  # type: ignore[arg-type]
    for layer in (0, 3):  # dense; not there
        with pytest.raises(ValueError, match=f"layer {layer} of 3 has no routed experts"):
            abstract_parameters(WIDE, "bfloat16", Quantization("nvfp4", (layer,)))
    with pytest.raises(ValueError, match="hidden_size = 16: mxfp4 needs a multiple of 32"):
        abstract_parameters(replace(WIDE, hidden_size=16), "bfloat16", Quantization("mxfp4", (1,)))
    with pytest.raises(ValueError, match="expert_size = 24: nvfp4 needs a multiple of 16"):
        abstract_parameters(replace(WIDE, expert_size=24), "bfloat16", Quantization("nvfp4", (1,)))


def test_order_and_repetition_of_layers_do_not_matter():
    assert Quantization("nvfp4", (2, 1, 2)) == Quantization("nvfp4", (1, 2))
    assert hash(Quantization("nvfp4", (2, 1))) == hash(Quantization("nvfp4", (1, 2)))
