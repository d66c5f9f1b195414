"""At true widths, experts in 4 bits compute what they unpack to, and on two real devices tokens and logits are those of
one. `pytest -m gpu tests/sharding/test_two_gpus.py`; with one GPU the comparison of two is skipped.

XLA tries many ways to multiply on the plain path, for minutes: `XLA_FLAGS=--xla_gpu_autotune_level=0` takes the first.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import inkling_jax
from inkling_jax.benchmark.weights import random_parameters
from inkling_jax.config import InklingConfig
from inkling_jax.decode.engine import choose_implementation
from inkling_jax.quantization import Quantization
from inkling_jax.sharding import make_mesh, shardings
from pallas_kernels.fp4 import FP4, dequantize

from .on_eight import SAMPLED, check_tokens, engine_on, generated

pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(jax.device_count() < 2, reason=f"needs two devices, here is {jax.device_count()}")

CUT = replace(
    InklingConfig.from_name("inkling-small"),
    num_layers=3,
    dense_layers=(0,),
    local_layers=(0, 1),
    num_experts=16,
    mtp_depths=0,
    mtp_local=(),
)
"""Inkling-Small's widths: a dense layer, a local and a global mixture."""
PACKED = Quantization("nvfp4", (1, 2))
LENGTHS = (24, 100)  # few rows, whose branches are summed whole, and many, which are scattered and gathered


# ------------------------------------------------------------------------------------------------------ tokens, float32


SETTINGS = {"greedy": {}, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def alone():
    steps = engine_on(None, choose_implementation(CUT, None))
    return {name: generated(steps, **settings) for name, settings in SETTINGS.items()}


@two
@pytest.mark.parametrize("mesh", ["1x1x2", "1x2x1", "2x1x1"])
def test_two_devices_generate_what_one_does(alone, mesh):
    steps = engine_on(mesh, choose_implementation(CUT, None))
    for name, settings in SETTINGS.items():
        check_tokens(generated(steps, **settings), alone[name])


# -------------------------------------------------------------------------------------------- logits, experts in 4 bits


def logits_of(config: InklingConfig, params, implementation=None) -> list[np.ndarray]:
    model = inkling_jax.Inkling(config, params, implementation=implementation)
    rng = np.random.default_rng(0)
    return [np.asarray(model.logits(rng.integers(config.real_vocab_size, size=length))) for length in LENGTHS]


def unpacked(params, dtype: str):
    """The same weights, those in 4 bits written out."""
    weights = {path.rpartition(".")[0] for path in params if path.endswith(".codes")}
    plain = {path: x for path, x in params.items() if path.rpartition(".")[0] not in weights}
    for weight in weights:
        codes, scales, expert_scale = (params[f"{weight}.{leaf}"] for leaf in ("codes", "scales", "expert_scale"))
        packed = FP4(codes, scales, expert_scale, "nvfp4")
        plain[weight] = dequantize(packed, dtype)
    return plain


def check_logits(found: list[np.ndarray], exact: list[np.ndarray], dtype: str) -> None:
    """The error of a row in units of its norm: of every row in float32.

    Of most rows in bfloat16, where a near tie may choose another expert for the others.
    """
    share, tolerance = {"float32": (1.0, 1e-4), "bfloat16": (0.5, 0.02)}[dtype]
    for a, b in zip(found, exact, strict=True):
        errors = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
        assert np.quantile(errors, share) < tolerance and np.isfinite(a).all()


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def drawn(request):
    params = random_parameters(CUT, request.param, 0, PACKED)
    return request.param, params, logits_of(CUT, params)


def test_experts_in_4_bits_compute_what_they_unpack_to(drawn):
    dtype, params, found = drawn
    check_logits(found, logits_of(CUT, unpacked(params, dtype), "xla"), dtype)


@two
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"expert": 2}], ids=lambda sizes: next(iter(sizes)))
def test_two_devices_give_the_logits_of_one(drawn, sizes):
    dtype, params, exact = drawn
    where = shardings(CUT, make_mesh(sizes), PACKED)
    spread = {path: jax.device_put(x, where[path]) for path, x in params.items()}
    held = {path: x.addressable_shards[0].data.nbytes / x.nbytes for path, x in spread.items() if ".codes" in path}
    assert set(held.values()) == {0.5}
    check_logits(logits_of(CUT, spread), exact, dtype)
