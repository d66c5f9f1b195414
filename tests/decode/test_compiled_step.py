"""The decoding loop at true widths, compiled for an H200 without one: in place, on the kernels, in one graph."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.config import InklingConfig
from inkling_jax.decode import engine as engines
from inkling_jax.decode.engine import Engine
from inkling_jax.nn import abstract_parameters
from tests.decode.tiny import request
from tests.h200 import HAS_PLUGIN, Program, compiled

BATCH, DRAFTS = 2, 1


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Program:
    """slice-8's widths: a dense local layer, a global one with (fewer) experts, and a depth."""
    sizes = dict(num_layers=2, local_layers=(0,), dense_layers=(0,), num_experts=8)
    vocabulary = dict(vocab_size=20096, real_vocab_size=20000)
    config = replace(InklingConfig.from_name("slice-8"), **sizes, **vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "choose_implementation", lambda *_: "triton")  # the card is not here to be asked
        steps = Engine(config, abstract_parameters(config), "bfloat16")
        requests = [request([1, 2, 3], 1000)] * BATCH
        state, settings = jax.eval_shape(lambda: steps.start(requests, DRAFTS))
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = steps.leaves, state, settings, rounds
    return compiled(steps.decode, arguments, tmp_path_factory.mktemp("xla"), drafts=DRAFTS)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_PLUGIN, reason="jax[cuda13-local] is for Linux on x86-64"),
]


def test_the_state_is_updated_in_place(program):
    """Every byte that comes out lies where it came in, and nothing as large as a layer's ring is copied."""
    table = program.memory.output_size_in_bytes - program.memory.alias_size_in_bytes  # a pointer an output
    assert program.memory.alias_size_in_bytes > 10e6 and table < 1024
    assert max(program.copies(), default=0) <= 64 * 1024


def test_every_layer_runs_on_the_kernels(program):
    body = "\n".join(program.loop_body())
    expected = {"qkvr_prep": 3, "chunk": 3, "short_conv": 6, "dual_norm": 1, "embed_norm": 1}
    expected |= {"router_product": 1, "router": 1, "place": 1}
    expected["linear"] = 4 + 2 + 5 + 2  # the dense layer, the global one's attention, the depth and its join, logits
    assert {name: len(re.findall(rf"\b{name}_kernel", body)) for name in expected} == expected


def test_nothing_stands_between_the_launches_of_a_mixture(program):
    """No sort, no conversion and no copy of XLA's between the router and the experts; no weight is transposed."""
    names = re.findall(r"kCustomKernel +\[.*?\] *(\w+)", "\n".join(program.loop_body()))
    first = names.index("router_product_kernel")
    expected = ("router_product", "router", "place", "expert", "expert")
    found = names[first : first + len(expected)]
    assert all(name.startswith(f"{kernel}_kernel") for kernel, name in zip(expected, found, strict=True)), found
    assert not [name for name in names if "transpose" in name]


def test_a_round_is_one_graph(program):
    """A command buffer holds the whole body of the loop: the host launches once a round."""
    body = program.loop_body()
    outermost = min(len(line) - len(line.lstrip()) for line in body)
    held = [line for line in body if len(line) - len(line.lstrip()) == outermost]
    assert len(held) == 1 and "kCommandBuffer" in held[0]


def test_the_search_for_the_largest_logit_ends_before_others_read_it(program):
    """Whether logits are finite is asked of the largest of each row, not of what that is still to be taken from."""
    computations = re.findall(r"^%\S+ \(.*?^}", program.hlo, re.M | re.S)
    asking = [text for text in computations if "is-finite(" in text]
    assert asking
    for text in asking:
        sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"f32\[([\d,]*)\]", text)]
        assert max(sizes) <= BATCH * (DRAFTS + 1)
