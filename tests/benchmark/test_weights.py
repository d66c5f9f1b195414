"""Drawn weights: distributed as the modules draw theirs, in place, every element of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inkling_jax import memory
from inkling_jax.benchmark import weights
from inkling_jax.nn import InklingModel, abstract_parameters
from inkling_jax.planning import held
from inkling_jax.quantization import Quantization
from inkling_jax.sharding import make_mesh, shardings
from pallas_kernels.fp4 import FP4, dequantize
from tests import reference
from tests.checkpoint import tiny
from tests.h200 import HAS_PLUGIN, compiled

CONFIG = replace(tiny.CONFIG, num_layers=2, local_layers=(0,), mtp_depths=1, mtp_local=())
EVEN = replace(reference.BASE, num_layers=2, local_layers=(0,), mtp_depths=0, mtp_local=())
"""What two devices divide."""


@pytest.fixture(scope="module")
def arrays():
    with jax.numpy_dtype_promotion("strict"):  # as in every test: what is compiled here is theirs too
        return weights.random_parameters(CONFIG, "bfloat16", 0)


@pytest.fixture(scope="module")
def drawn(arrays):
    return {path: np.asarray(x, np.float32) for path, x in arrays.items()}


def test_they_are_the_parameters_of_the_model(arrays):
    expected = {path: (x.shape, x.dtype) for path, x in abstract_parameters(CONFIG).items()}
    assert {path: (x.shape, x.dtype) for path, x in arrays.items()} == expected


def test_each_has_the_distribution_of_the_modules_own(drawn):
    model = InklingModel(CONFIG, rngs=nnx.Rngs(0))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        own, ours = np.asarray(variable.get_value(), np.float32), drawn[name]
        if own.std() == 0:
            np.testing.assert_array_equal(ours, own, err_msg=name)
        else:  # five standard errors of the ratio of two deviations
            assert abs(ours.std() / own.std() - 1) < 5 / np.sqrt(own.size), name
            assert abs(ours.mean()) < 5 * own.std() / np.sqrt(own.size), name


def test_the_seed_decides_and_no_two_tensors_are_alike(drawn):
    again = weights.random_parameters(CONFIG, "bfloat16", 0)
    other = weights.random_parameters(CONFIG, "bfloat16", 3)
    same = [path for path, x in again.items() if x.ndim > 1]
    assert all((np.asarray(again[path], np.float32) == drawn[path]).all() for path in same)
    assert not any((np.asarray(other[path], np.float32) == drawn[path]).all() for path in same)
    assert len({drawn[path].tobytes() for path in same}) == len(same)


def test_every_block_is_drawn_and_none_twice(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 7 * 64 + 5)  # blocks of 7 rows, the last one overlapping
    rows = np.asarray(weights.fill(jnp.zeros((3, 251, 64), jnp.float32), np.uint32(5), 2.0)).reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert rows.std() == pytest.approx(2, rel=0.02) and abs(rows.mean()) < 0.05
    assert (rows**4).mean() / rows.var() ** 2 == pytest.approx(3, rel=0.05)  # a normal distribution's
    assert np.abs(np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]) < 0.02
    assert np.abs(rows.std(axis=1) / 2 - 1).max() < 0.5


def test_weights_that_do_not_fit_are_refused_before_any_is_drawn(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(weights, "fill", lambda *_: pytest.fail("drawn"))
    with pytest.raises(MemoryError, match="the weights need 0.00 GiB on each device, and 0.00 GiB are free"):
        weights.random_parameters(CONFIG, "bfloat16", 0)


def test_the_fullest_device_decides_with_the_cache_beside_the_weights(monkeypatch):
    mesh = make_mesh({"tensor": 2})
    here = sum(held(EVEN, {"tensor": 2}, None, "bfloat16").values())
    free = dict(zip(jax.devices(), (here + 10**9, here + 2**20), strict=False))
    monkeypatch.setattr(memory, "free_bytes", free.__getitem__)
    memory.check_memory(EVEN, "bfloat16", None, mesh, 2**20)
    with pytest.raises(MemoryError, match="GiB and the cache 0.00 GiB on each device"):
        memory.check_memory(EVEN, "bfloat16", None, mesh, 2**20 + 1)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_matrices_in_4_bits_have_the_variance_of_plain_ones(format):
    config = replace(tiny.WIDE, mtp_depths=0, mtp_local=(), chain_norm=False)
    params = weights.random_parameters(config, "float32", 1, Quantization(format, (2,)))
    for name, fan_in in (("w13", 32), ("w2", 64)):
        codes, scales, scale = (
            params.get(f"layers.2.mlp.experts.{name}.{x}") for x in ("codes", "scales", "expert_scale")
        )
        assert codes is not None and scales is not None
        drawn = np.asarray(dequantize(FP4(codes, scales, scale, format)))
        assert (
            drawn.var() * fan_in == pytest.approx(1, rel=0.05) and abs(drawn.mean()) < 5 * drawn.std() / drawn.size**0.5
        )
        nibbles = np.asarray(codes)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
        counts = np.bincount(nibbles.ravel(), minlength=16) / nibbles.size
        assert np.abs(counts * 16 - 1).max() < 0.2
        assert len(np.unique(np.asarray(scales))) == {"nvfp4": 8, "mxfp4": 2}[format]


def test_each_device_draws_its_own_part():
    """Nothing whole passes through: parts differ where they are parts, and are alike where they are copies."""
    mesh = make_mesh({"data": 2, "tensor": 2})
    drawn = weights.random_parameters(EVEN, "float32", 0, None, mesh)
    where = shardings(EVEN, mesh)
    assert {path: x.sharding for path, x in drawn.items()} == where
    w13 = drawn["layers.1.mlp.experts.w13"]
    parts = {shard.device.id: np.asarray(shard.data) for shard in w13.addressable_shards}
    np.testing.assert_array_equal(parts[0], parts[2])
    assert parts[0].shape[2] * 2 == w13.shape[2] and not (parts[0] == parts[1]).any()
    whole = np.asarray(w13)
    assert whole.std() * whole.shape[-1] ** 0.5 == pytest.approx(1, rel=0.1)


@pytest.mark.skipif(not HAS_PLUGIN, reason="jax[cuda13-local] is for Linux on x86-64")
def test_the_experts_of_a_wide_layer_are_drawn_in_place(tmp_path):
    """Compiled for an H200: 4.8 GB in, the same 4.8 GB out, and a block of scratch."""
    experts = jax.ShapeDtypeStruct((64, 2, 3072, 6144), jnp.bfloat16)
    seed, scale = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    memory = compiled(weights.fill, (experts, seed, scale), tmp_path).memory
    assert memory.alias_size_in_bytes == experts.size * 2
    assert memory.temp_size_in_bytes <= 2 * 4 * weights.BLOCK


@pytest.mark.gpu
def test_elements_past_two_to_the_31st():
    """The experts of one wide layer are 2.4 billion weights: the last expert's are drawn like the first's."""
    experts = weights.fill(jnp.zeros((64, 2, 3072, 6144), jnp.bfloat16), np.uint32(1), 1.0)
    first, last = (np.asarray(experts[i], np.float32) for i in (0, 63))
    assert first.std() == pytest.approx(1, rel=1e-2) and last.std() == pytest.approx(1, rel=1e-2)
    assert abs(np.corrcoef(first.ravel(), last.ravel())[0, 1]) < 1e-2
