"""Bytes and operations against sums made by hand from the sizes of a tiny model."""

from dataclasses import replace

import pytest

from inkling_jax.benchmark.traffic import decode_bytes, part, prefill_bytes, prefill_flops, uniform_hits
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Quantization
from tests import reference
from tests.checkpoint.tiny import CONFIG

# wq, wk, wv, wr, wo, both head norms, both convolutions, rel_proj
LOCAL = 12 * 12 + 2 * 6 * 12 + 18 * 12 + 12 * 12 + 2 * 2 + 2 * 6 * 4 + 3 * 5
GLOBAL = 16 * 12 + 2 * 8 * 12 + 12 * 12 + 12 * 16 + 2 * 4 + 2 * 8 * 4 + 3 * 7
DENSE = 3 * 10 * 12 + 1
EXPERT = 3 * 6 * 12
AROUND = 2 * 12 + 2 * 12 * 4  # a layer's norms and convolutions outside attention
BACKBONE = {
    "attention": 2 * (2 * LOCAL + GLOBAL),
    "dense": 2 * DENSE,
    "shared_experts": 2 * 2 * 2 * EXPERT,
    "router": 2 * (2 * 7 * 12 + 4 * 5 + 4),
    "norms_and_convs": 2 * (3 * AROUND + 2 * 12),
}


def test_a_plain_step():
    sizes = decode_bytes(CONFIG, "bfloat16", sequences=3, length=20, drafts=0, hits=[2.5, 4])
    assert sizes == BACKBONE | {
        "experts": pytest.approx(2 * 6.5 * EXPERT),
        "depths": 0,
        "lm_head": pytest.approx(2 * 33 * 12),
        "embedding": 3 * 2 * 12,
        "kv": 3 * 2 * (2 * 2 * 4 * 20 + 2 * 2 * 3 * 2 * 5),  # the global layer sees 20 rows, the local ones 5
    }


def test_a_round_with_a_draft():
    sizes = decode_bytes(CONFIG, "bfloat16", sequences=3, length=20, drafts=1, hits=[2.5, 4])
    depth = 2 * 12 + 24 * 12 + GLOBAL + DENSE + AROUND
    assert sizes == BACKBONE | {
        "experts": pytest.approx(2 * 6.5 * EXPERT),
        "depths": 2 * (depth + 12),  # and the chain norm
        "lm_head": pytest.approx(2 * 2 * 33 * 12),
        "embedding": 3 * 4 * 2 * 12,
        # Two rows a sequence: 21 rows are seen in the global layer, 6 in the local ones, 19 in the global depth.
        "kv": 3 * 2 * (2 * 2 * 4 * (21 + 19) + 2 * 2 * 3 * 2 * 6),
    }


def test_a_context_below_the_window_is_read_once():
    sizes = decode_bytes(CONFIG, "float32", sequences=1, length=3, drafts=0, hits=[0, 0])
    assert sizes["kv"] == 4 * (2 * 2 * 4 * 3 + 2 * 2 * 3 * 2 * 3) and sizes["experts"] == 0


def test_a_prefill_reads_the_weights_once_a_chunk():
    sizes = prefill_bytes(CONFIG, "bfloat16", tokens=40, chunks=[16, 16, 16], drafts=0)
    assert {name: sizes[name] for name in BACKBONE} == {name: 3 * size for name, size in BACKBONE.items()}
    assert sizes["experts"] == pytest.approx(2 * 2 * EXPERT * 5 * (2 * (1 - 0.6**16) + (1 - 0.6**8)))
    assert sizes["kv"] == 2 * (2 * 2 * 4 * (16 + 32) + 2 * 2 * 3 * 2 * (4 + 4))
    assert sizes["lm_head"] == sizes["depths"] == 0 and sizes["embedding"] == 40 * 24
    depths = prefill_bytes(CONFIG, "bfloat16", tokens=40, chunks=[16, 16, 16], drafts=2)["depths"]
    assert depths == 3 * 2 * (2 * (2 * 12 + 24 * 12 + DENSE + AROUND) + GLOBAL + LOCAL + 12)


def test_operations_of_a_prefill():
    weights = 2 * LOCAL + GLOBAL + DENSE + 2 * 2 * EXPERT + 2 * (7 * 12 + 5 + 1) + 2 * 2 * EXPERT
    pairs = 16 * (40 * 41 // 2) + 2 * 12 * (15 + 35 * 5)
    assert prefill_flops(CONFIG, 40) == pytest.approx(2 * 40 * weights + 4 * pairs)


def test_every_parameter_is_read_where_everything_is_hit():
    config = replace(CONFIG, real_vocab_size=CONFIG.vocab_size)
    sizes = decode_bytes(config, "bfloat16", 1, 1, 2, [5, 5])
    total = sum(x.size * x.dtype.itemsize for x in abstract_parameters(config).values())
    read = sum(sizes.values()) - sizes["kv"] - sizes["embedding"] - 2 * 2 * 40 * 12  # the head is read thrice
    assert read == pytest.approx(total - 2 * 40 * 12)


def test_the_limit_of_the_benchmark_model():
    """Inkling's widths: 11.8 GB for one token, which an H200 (4.3 TB/s of copying) reads in 2.75 ms."""
    config = InklingConfig.from_name("slice-8")
    sizes = decode_bytes(config, "bfloat16", 1, 1024, 0, [6] * 6)
    assert sum(sizes.values()) == pytest.approx(11.8e9, rel=0.01)
    assert sizes["lm_head"] == pytest.approx(200058 * 6144 * 2)
    assert sizes["kv"] == 2 * 2 * 128 * (8 * 1024 + 7 * 16 * 512)


def test_uniform_routing():
    assert uniform_hits(CONFIG, 1) == pytest.approx(2)
    assert uniform_hits(CONFIG, 2) == pytest.approx(5 * (1 - 0.36))


def test_parts():
    assert part("layers.1.mlp.experts.w13") == "experts" and part("mtp.0.layer.mlp.w13") == "depths"
    assert part("norm.weight") == part("layers.2.attn_conv.weight") == part("embed.norm.weight") == "norms_and_convs"


def test_a_device_of_a_mesh_reads_its_part():
    """Halves of what is split, all of what is not, and the experts that are hit there, of eight in 4 bits."""
    config = replace(reference.BASE, num_layers=2, local_layers=(0,), hidden_size=32, expert_size=64)
    config = replace(config, mtp_depths=0, mtp_local=())
    packed, mesh = Quantization("nvfp4", (1,)), {"data": 2, "expert": 2, "tensor": 2}
    sizes = decode_bytes(config, "bfloat16", 5, 1000, 0, [2.5], mesh, packed)
    whole = decode_bytes(config, "bfloat16", 3, 1000, 0, [5])
    expert = 3 * 32 * config.expert_size / 2 * (1 / 2 + 1 / 16) + 8  # codes, block scales; two expert scales
    assert sizes["experts"] == pytest.approx(2.5 * expert)
    assert sizes["router"] == whole["router"] and sizes["norms_and_convs"] == whole["norms_and_convs"]
    assert sizes["embedding"] == whole["embedding"]  # of three of the sequences
    assert sizes["shared_experts"] == whole["shared_experts"] / 4
    assert sizes["kv"] == whole["kv"] / 2
    assert sizes["lm_head"] == 2 * 32 * min(config.real_vocab_size, config.vocab_size // 4)
    assert uniform_hits(config, 3, mesh) == uniform_hits(config, 3) / 2


def test_inkling_small_in_4_bits_over_two_cards():
    """13.9 GB a token at one sequence: 1.6 ms over two H200s at 4.3 TB/s of copying (issue figures of the layout)."""
    config = InklingConfig.from_name("inkling-small")
    packed = Quantization.of_model(config, "nvfp4")
    sizes = decode_bytes(config, "bfloat16", 1, 1024, 0, [6] * 40, {"tensor": 2}, packed)
    assert 2 * sum(sizes.values()) == pytest.approx(13.9e9, rel=0.03)
