"""What the program for eight H200s sends between them: what docs/distributed.md lists for each layer, and no more."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from inkling_jax.cache import specs
from inkling_jax.config import InklingConfig
from inkling_jax.decode import engine as engines
from inkling_jax.decode.engine import Engine
from inkling_jax.nn import abstract_parameters
from inkling_jax.sharding import AXES
from tests.decode.tiny import request
from tests.h200 import HAS_PLUGIN, Collective, cards, compiled, indent

BATCH, DRAFTS, CHUNK, H = 2, 1, 512, 6144
EXPERT, TENSOR = 2, 4
RING = 3 + DRAFTS + 1  # rows
CONFIG = replace(
    InklingConfig.from_name("slice-8"),
    **dict(num_layers=1, local_layers=(), dense_layers=(), num_experts=8),
    **dict(vocab_size=20096, real_vocab_size=20000),
)
"""slice-8's widths: one layer, global with (fewer) experts, and a dense local depth."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_PLUGIN, reason="jax[cuda13-local] is for Linux on x86-64"),
]


@pytest.fixture
def program(request, monkeypatch, tmp_path):
    step, implementation, drafts = request.param
    mesh = Mesh(np.array(cards(EXPERT * TENSOR)).reshape(1, EXPERT, TENSOR), AXES)
    monkeypatch.setattr(engines, "choose_implementation", lambda *_: implementation)
    monkeypatch.setattr(Engine, "place", lambda _, array: jnp.asarray(array))  # the cards are not here
    steps = Engine(CONFIG, abstract_parameters(CONFIG), "bfloat16", mesh=mesh)
    state, settings = jax.eval_shape(lambda: steps.start([one_request()] * BATCH, drafts))

    def placed(tree):
        struct = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
        return jax.tree.map(struct, tree, specs(tree))

    number = jax.ShapeDtypeStruct((), jnp.int32)
    if step == "decode":
        return compiled(steps.decode, (steps.leaves, *placed((state, settings, number))), tmp_path, mesh, drafts=drafts)
    arrays = steps.leaves, *placed((state, number))
    return compiled(steps.prefill, arrays, tmp_path, mesh, chunk=CHUNK, drafts=drafts)


def one_request():
    return request([1, 2, 3], 1000)


def made(found: list[Collective]) -> Counter:
    return Counter((each.kind, each.makes) for each in found)


@pytest.mark.parametrize("program", [("decode", "triton", DRAFTS)], indirect=True)
def test_a_round_sums_each_branch_once_and_exchanges_tokens(program):
    whole, branches = [], []
    for each in program.collectives():
        (branches if each.in_branch else whole).append(each)
    rows = f"{BATCH},{DRAFTS + 1},{H}]"
    parts = EXPERT * TENSOR
    assert made(whole) == {
        ("all-gather", (f"f32[{TENSOR},{rows}",)): 2,  # attention, of the layer and of the depth
        ("all-gather", (f"f32[{parts},{rows}",)): 2,  # MLP
        ("all-gather", (f"bf16[{parts},{BATCH},{DRAFTS + 1},{H // parts}]",)): 1,  # the depth's joined input
        ("all-gather", (f"s32[{parts},2,{BATCH}]",)): 1,  # (value, id) of the draft
        ("all-gather", (f"s32[{parts},2,{BATCH},{DRAFTS + 1}]",)): 1,  # and of the target
    }
    sampling = {
        *(("all-gather", (f"f32[{parts},{n}]",)) for n in (BATCH, BATCH * (DRAFTS + 1))),  # sums of weights
        *(("all-gather", (f"f32[{parts},{n},32]",)) for n in (BATCH, BATCH * (DRAFTS + 1))),  # of 32 blocks of logits
        ("all-gather", (f"f32[{parts},2,{BATCH}]",)),  # p and q of the one draft
        ("all-gather", (f"s32[{parts},2,{BATCH}]",)),
    }
    assert set(made(branches)) == sampling
    # A round's own collectives are captured with its kernels: between two graphs there are only branches.
    body = program.loop_body()
    outermost = {line.split()[1] for line in body if indent(line) == min(map(indent, body))}
    assert outermost == {"kCommandBuffer", "kConditional"}
    # Every byte that comes out lies where it came in: the state is donated on a mesh as on one device.
    assert program.memory.alias_size_in_bytes > 1e6
    assert program.memory.output_size_in_bytes - program.memory.alias_size_in_bytes < 1024


@pytest.mark.parametrize("program", [("prefill", "triton", DRAFTS)], indirect=True)
def test_a_chunk_scatters_before_each_convolution_and_gathers_behind_it(program):
    attn = [f"bf16[{TENSOR},{BATCH},{rows},{H // TENSOR}]" for rows in (RING, CHUNK)]  # the ring rides along
    parts = EXPERT * TENSOR
    mlp = [f"bf16[{parts},{BATCH},{rows},{H // parts}]" for rows in (RING, CHUNK)]
    assert made(program.collectives()) == {
        ("reduce-scatter", (f"bf16[{BATCH},{CHUNK},{H // TENSOR}]",)): 2,  # attention, of the layer and of the depth
        ("reduce-scatter", (f"bf16[{BATCH},{CHUNK},{H // TENSOR // EXPERT}]",)): 2,  # MLP
        ("all-gather", tuple(attn)): 2,
        ("all-gather", tuple(mlp)): 1,
        ("all-gather", (mlp[1],)): 1,  # the depth's joined input
        ("all-gather", (mlp[0],)): 1,  # nobody reads the last depth's stream
    }


@pytest.mark.parametrize("program", [("decode", "triton", 0)], indirect=True)
def test_without_drafts_a_layer_sums_twice(program):
    """And the program compiles at all: XLA crashes on arrays of no elements that are split over devices."""
    sums = [each for each in program.collectives() if not each.in_branch and str(H) in each.makes[0]]
    assert made(sums) == {
        ("all-gather", (f"f32[{TENSOR},{BATCH},{H}]",)): 1,
        ("all-gather", (f"f32[{EXPERT * TENSOR},{BATCH},{H}]",)): 1,
    }


def test_collectives_are_captured_only_where_there_are_any():
    for sizes, captured in (((2, 1, 1), False), ((1, 1, 1), False), ((1, 2, 1), True), ((2, 1, 2), True)):
        mesh = Mesh(np.array(cards(int(np.prod(sizes)))).reshape(sizes), AXES)
        assert (engines._loop_options(mesh) is not None) == captured
    assert engines._loop_options(Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)) is None
