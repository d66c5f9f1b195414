"""The model on the kernels, in their interpreter: cached logits, caches and tokens agree with plain JAX."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inkling_jax
from inkling_jax.decode.engine import Engine, choose_implementation
from inkling_jax.decode.loop import decode, verify
from tests import reference
from tests.decode.tiny import request
from tests.kernels.oracle import bits
from tests.precision import relative_error

CONFIG = replace(
    reference.BASE, num_layers=2, local_layers=(0,), head_dim=32, local_head_dim=48, mtp_depths=2, mtp_local=(0,)
)
"""Local and global, dense and MoE, head sizes the kernels take, one of them no power of two."""
PROMPTS, NEW, CHUNK = (2, 3, 37, 20), 12, 32  # the first has a single hidden row to draft from
IMPLEMENTATIONS = ["interpret", pytest.param("triton", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def engines():
    params = {path: jnp.asarray(p) for path, p in reference.random_params(CONFIG).items()}
    return {name: Engine(CONFIG, params, "float32", name) for name in ("xla", "interpret")} | {None: params}


def engine(engines, implementation: str) -> Engine:
    return engines.get(implementation) or Engine(CONFIG, engines[None], "float32", implementation)


def start(steps: Engine, drafts: int):
    prompts = [reference.random_tokens(CONFIG, length, seed) for seed, length in enumerate(PROMPTS)]
    state, settings = steps.start([request(tokens, NEW) for tokens in prompts], drafts)
    for at in range(0, max(PROMPTS), CHUNK):
        state = steps.prefill(steps.leaves, state, jnp.int32(at), chunk=CHUNK, drafts=drafts)
    return state, settings


def finish(steps: Engine, drafts: int, rounds: int = 10**6):
    state, settings = start(steps, drafts)
    return steps.decode(steps.leaves, state, settings, jnp.int32(rounds), drafts=drafts)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("drafts", [0, 2])
def test_tokens_and_caches_are_those_of_plain_jax(engines, implementation, drafts):
    steps = engine(engines, "xla"), engine(engines, implementation)
    plain, fused = (finish(each, drafts) for each in steps)
    for b, length in enumerate(np.array(PROMPTS) + NEW):  # what lies behind are drafts of a sequence that has ended
        np.testing.assert_array_equal(fused.tokens[b, :length], plain.tokens[b, :length])
    np.testing.assert_array_equal(fused.length, plain.length)
    np.testing.assert_array_equal(fused.accepted, plain.accepted)
    plain, fused = (finish(each, drafts, rounds=2) for each in steps)
    assert fused.cache.implementation == implementation
    for exact, found in zip(jax.tree.leaves(remembered(plain)), jax.tree.leaves(remembered(fused)), strict=True):
        assert relative_error(np.asarray(found), np.asarray(exact)) < 1e-5


def remembered(state):
    return state.cache.layers, state.cache.depths, state.hidden


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_are_bitwise_the_same_with_and_without_drafts(engines, implementation):
    steps = engine(engines, implementation)
    state, _ = start(steps, 2)

    def logits(drafts: int):
        return jax.jit(lambda leaves: verify(steps.model(leaves), state, drafts)[1].values)(steps.leaves)

    np.testing.assert_array_equal(bits(logits(0)), bits(logits(2)[:, :1]))


def kernels_in(jaxpr) -> int:
    """Calls of kernels, those of a function that is called several times each time."""
    found = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found += equation.primitive.name == "pallas_call"
        inner = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        found += sum(kernels_in(x) for x in inner if hasattr(x, "eqns"))
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_kernels_are_what_runs(engines, implementation):
    """No kernel in the plain program; in the other one those of every layer and depth."""

    def count(name: str) -> int:
        steps = engine(engines, name)
        state, settings = jax.eval_shape(lambda: start(steps, 2))
        run = lambda leaves, state, settings: decode(steps.model(leaves), state, settings, jnp.int32(4), 2)  # noqa: E731
        return kernels_in(jax.make_jaxpr(run)(steps.leaves, state, settings))

    layers = CONFIG.num_layers + CONFIG.mtp_depths
    assert count("xla") == 0
    # qkvr_prep, attention and two convolutions a layer; the router; the embedding; what joins a depth's two inputs
    others = 4 * layers + 1 + 1 + CONFIG.mtp_depths
    # q|k|v|r and the output of each layer; two of a dense MLP; those joined inputs; logits
    products = 2 * layers + 2 * (layers - 1) + CONFIG.mtp_depths + 1 + CONFIG.mtp_depths
    assert count(implementation) >= others + products


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks for what a CPU cannot do")
def test_the_choice_is_made_once_and_says_why_not():
    small = replace(CONFIG, head_dim=16)
    assert choose_implementation(small, None) == choose_implementation(CONFIG, None) == "xla"
    assert choose_implementation(CONFIG, "interpret") == "interpret"
    with pytest.raises(NotImplementedError, match=r"head sizes from 32 to 256.*head_dim = 16"):
        choose_implementation(small, "interpret")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA or AMD GPU"):
        inkling_jax.load("nano", progress=False, implementation="triton")
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        inkling_jax.load("nano", progress=False, implementation="cuda")  # pyright: ignore[reportArgumentType]
