"""The planner against the published figures, sums made here by hand, and arrays that really lie on a mesh."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from inkling_jax import plan
from inkling_jax.cache import cache_bytes
from inkling_jax.config import InklingConfig
from inkling_jax.decode.engine import Engine
from inkling_jax.nn import abstract_parameters
from inkling_jax.planning import GPUS
from inkling_jax.quantization import Quantization
from inkling_jax.sharding import make_mesh, shardings

from .checkpoint import tiny

SMALL = InklingConfig.from_name("inkling-small")
TOWERS = 80 * 16 * 4096 + 4096 + 128 * 75 + 320 * 512 + 4800 * 5120 + 4096 * 9600 + 128 + 320 + 4800 + 4096
TINY = replace(tiny.WIDE, num_experts=8, dense_size=64, expert_size=64, num_heads=8, num_kv_heads=4)
TINY = replace(TINY, local_num_heads=8, local_num_kv_heads=2)


def test_published_figures_of_inkling_small() -> None:
    """531,912,898,740 bytes with the towers; 22.3 GB of weights and 28,672 bytes a token plus 70 MiB of KV are read."""
    found = plan(SMALL, context=100_000)
    assert found.weights == 531_912_898_740 - 2 * TOWERS
    read = found.traffic
    assert round((read.dense + read.experts + read.head) / 1e9, 1) == 22.3
    assert read.kv == 100_000 * 28_672 + (70 << 20)
    assert read.depths == 0 and found.hit == pytest.approx(6)


def test_published_figures_of_inkling_in_4_bits() -> None:
    config = InklingConfig.from_name("inkling")
    read = plan(config, quantization="nvfp4").traffic
    assert round((read.dense + read.experts + read.head) / 1e9, 1) == 48.9


def test_a_device_of_eight_by_hand() -> None:
    """Inkling-Small over tensor=2, expert=4, two sequences with three drafts, every part from its widths."""
    h, layers, moe, vocabulary, f, d = 4096, 42, 40, 201024, 2048, 16384
    attention = (2 * 32 * 128 + 2 * 8 * 128 + 32 * 16) * h // 2  # q and o, k and v, r: by heads
    small = 2 * 128 + 2 * 8 * 128 * 4 // 2 + 2 * h + 2 * 4 * h  # head norms, k and v taps, two norms, residual taps
    rel = (35 * 512 + 7 * 1024) * 16
    dense_mlp = 3 * h * d // 8  # the width over both axes
    experts = 256 // 4 * 3 * h * f // 2
    shared = 2 * 3 * h * f // 8
    router = 2 * 258 * h + 4 * 256 + 4  # float32 bias and scale
    dense = 2 * (layers * (attention + small) + rel + 2 * (dense_mlp + 1) + moe * shared + 2 * h) + moe * router
    head, embedding = 2 * vocabulary * h // 8, 2 * vocabulary * h
    depth = 2 * (2 * h * h // 8 + 2 * h + attention + small + dense_mlp + 1 + 16 * 512)
    global_depth = depth + 2 * 16 * 512
    found = plan(SMALL, {"tensor": 2, "expert": 4}, batch=2, context=4096, draft_tokens=3)
    assert found.weights == dense + 2 * moe * experts + head + embedding + 6 * depth + 2 * global_depth
    assert (found.traffic.dense, found.traffic.head) == (dense, 4 * head)
    assert found.traffic.depths == 2 * depth + global_depth
    hit = 1 - (1 - 6 / 256) ** 8
    assert found.hit == pytest.approx(64 * hit)
    assert found.traffic.experts == pytest.approx(hit * 2 * moe * experts, abs=1)
    # 4 of 8 KV heads of 128, keys and values, two sequences; 35 local layers and 2 depths, 7 global ones and 1.
    assert found.traffic.kv == 2 * 2 * 2 * 4 * 128 * ((35 + 2) * 512 + (7 + 1) * 4096)


def test_what_devices_send_by_hand() -> None:
    """42 layers of 4096, 2 of them dense; sums in float32 but for experts that `expert` does not split."""
    assert plan(SMALL, {"data": 4}, batch=8, draft_tokens=3).received == 0
    assert plan(SMALL, {"tensor": 2}).received == 4096 * (42 * 4 + 2 * 4 + 40 * 2)
    with_drafts = plan(SMALL, {"tensor": 2, "expert": 4}, batch=3, draft_tokens=1)  # 4 sequences, 2 rows each
    assert with_drafts.received == 8 * 4096 * (43 * 4 + 7 * 43 * 4) + 8 * 4096 * 2 * 7 // 8
    assert plan(SMALL, {"tensor": 4}, batch=128).received == 2 * 84 * 128 * 4096 * 4 * 3 // 4  # too many to gather
    assert plan(SMALL, {"tensor": 4}, batch=512).received == 2 * 84 * 512 * 4096 * 2 * 3 // 4  # scattered


@pytest.mark.parametrize("sizes", [{}, {"tensor": 8}, {"expert": 4, "tensor": 2}, {"data": 2, "tensor": 4}], ids=str)
@pytest.mark.parametrize("format", [None, "nvfp4"])
def test_weights_are_those_that_lie_on_each_device(sizes: dict[str, int], format: Any) -> None:
    config = replace(TINY, expert_size=128)
    quantization = Quantization(format, (2,)) if format else None
    mesh = make_mesh(sizes)
    where = shardings(config, mesh, quantization)
    held = dict.fromkeys(mesh.devices.flat, 0)
    for path, spec in abstract_parameters(config, quantization=quantization).items():
        for shard in jax.device_put(jax.numpy.zeros(spec.shape, spec.dtype), where[path]).addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {plan(config, sizes, quantization).weights}


def test_the_cache_of_a_device() -> None:
    """Sequences over data, KV heads over tensor; of fewer heads than devices each has one."""
    whole = plan(TINY, batch=4, context=200).cache
    assert whole == cache_bytes(TINY, 4, 200, 0)
    assert plan(TINY, {"data": 2}, batch=4, context=200).cache == cache_bytes(TINY, 2, 200, 0)
    assert plan(TINY, {"data": 4}, batch=5, context=200).sequences == 2
    assert plan(TINY, {"expert": 4}, batch=4, context=200).cache == whole
    four = plan(TINY, {"tensor": 4}, batch=4, context=200).cache
    assert 4 * four["global_kv"] == whole["global_kv"] and 2 * four["local_kv"] == whole["local_kv"]
    assert plan(TINY, {"tensor": 8}, batch=4, context=200).cache["global_kv"] == four["global_kv"]


@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"tensor": 2}], ids=str)
def test_the_cache_is_what_an_engine_allocates(sizes, batch) -> None:
    """But for the page tables, two of 32-bit numbers."""
    config = replace(TINY, max_context=2048)
    steps = Engine(config, abstract_parameters(config, "bfloat16"), "bfloat16", mesh=make_mesh(sizes))
    needed = np.where(np.arange(steps.batch(batch)) < batch, 1500 + 1 + 1, 0)
    shape = steps.shape(needed, 1)
    tables = 2 * 4 * shape.batch * shape.width // sizes.get("data", 1)
    planned = plan(config, sizes, batch=batch, context=1500, draft_tokens=1).cache["total"]
    assert steps.cache_bytes(shape) == planned + tables


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_format_is_that_of_quantize(format) -> None:
    assert plan(SMALL, quantization=format) == plan(SMALL, quantization=Quantization(format, tuple(range(3, 42))))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(quantization="int4"), "format: expected nvfp4 or mxfp4, found 'int4'"),
        (dict(dtype="foo"), "dtype = 'foo'; expected bfloat16 or float32"),
    ],
)
def test_no_plan_of_these(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(SMALL, **wrong)


def test_drafts_take_cache_and_traffic_and_no_weights() -> None:
    without, with_drafts = (plan(SMALL, {"tensor": 8}, draft_tokens=n) for n in (0, 8))
    assert without.weights == with_drafts.weights
    assert without.cache["depths"] == 0 < with_drafts.cache["depths"]
    assert without.traffic.total < with_drafts.traffic.total
    assert without.traffic.dense == with_drafts.traffic.dense


def test_what_fits() -> None:
    """Inkling-Small in bf16 is 66.5 GB on each of eight devices by expert and tensor, with the embedding on each."""
    eight = plan(SMALL, {"tensor": 2, "expert": 4})
    assert {name for name, gpu in GPUS.items() if eight.fits(gpu)} == {"H100", "H200", "B200", "MI300X", "MI355X"}
    four = plan(SMALL, {"tensor": 4})
    assert {name for name, gpu in GPUS.items() if four.fits(gpu)} == {"B200", "MI300X", "MI355X"}
    assert not any(plan(SMALL).fits(gpu) for gpu in GPUS.values())
    assert four.seconds(GPUS["H200"]) == four.traffic.total / 4.8e12


def test_more_devices_than_there_are() -> None:
    found = plan(InklingConfig.from_name("inkling"), {"data": 16, "expert": 32, "tensor": 2}, batch=64)
    assert math.prod(found.mesh.values()) == 1024 and found.sequences == 4


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ({"model": 2}, {}, "mesh: there is no axis 'model'; expected data, expert, tensor"),
        ({"tensor": 0}, {}, "mesh: tensor = 0; expected an integer of at least 1"),
        ({"expert": 3}, {}, "num_experts = 256 does not divide by 3"),
        ({}, {"batch": 0}, "batch = 0; expected an integer of at least 1"),
        ({}, {"context": 1 << 21}, "context = 2097152; expected an integer from 1 to 1048576"),
        ({}, {"draft_tokens": 9}, "draft_tokens = 9; expected an integer from 0 to 8"),
    ],
)
def test_bad_input(mesh: dict[str, int], options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(SMALL, mesh, **options)
