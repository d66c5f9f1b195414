"""In bfloat16 on a card, drafts change no bit: a row's result does not depend on how many rows run beside it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import inkling_jax
from inkling_jax.benchmark.weights import random_parameters
from inkling_jax.config import InklingConfig
from inkling_jax.decode.engine import Engine
from tests.decode.tiny import request
from tests.kernels.oracle import bits

TOKENS, BATCH = 20_480, 64
PROMPT = 16

pytestmark = pytest.mark.gpu


def slice_of_three() -> Engine:
    """True widths: a dense local layer, a local and a global one with experts, two depths."""
    layers = dict(num_layers=3, local_layers=(0, 1), dense_layers=(0,), mtp_depths=2, mtp_local=(0,))
    config = replace(InklingConfig.from_name("slice-8"), num_experts=16, **layers)
    return Engine(config, random_parameters(config, "bfloat16", seed=1), "bfloat16")


def nano() -> Engine:
    model = inkling_jax.load("nano", dtype="bfloat16")
    return Engine(model.config, model.params, "bfloat16")


def decoded(engine: Engine, drafts: int) -> tuple[np.ndarray, list[np.ndarray], float]:
    """Every token, every key and value of the global layers, and how many tokens a round made."""
    rng, new = np.random.default_rng(0), TOKENS // BATCH
    prompts = rng.integers(engine.config.real_vocab_size, size=(BATCH, PROMPT))
    state, settings = engine.start([request(p, new, top_k=engine.config.real_vocab_size) for p in prompts], drafts)
    for start, chunk in engine.chunks(PROMPT - 1, BATCH):
        state = engine.prefill(engine.leaves, state, np.int32(start), chunk=chunk, drafts=drafts)
    state = engine.decode(engine.leaves, state, settings, np.int32(10**6), drafts=drafts)
    assert (np.asarray(state.length) == PROMPT + new).all()
    rows = PROMPT + new - 1  # those of all tokens but the last
    cache = state.cache
    pages = cache.global_pages[:, : -(-rows // cache.layers[0].kv.k.shape[2])]
    live = jnp.arange(pages.shape[1] * cache.layers[0].kv.k.shape[2])[None] < jnp.full((BATCH, 1), rows)
    kept = [kv for layer in cache.layers if layer.kv.ring is None for kv in layer.kv.read(pages, live)]
    rounds = float(np.asarray(state.rounds).sum())
    return np.asarray(state.tokens)[:, : PROMPT + new], [bits(np.asarray(x)) for x in kept], TOKENS / rounds


@pytest.mark.parametrize("make", [nano, slice_of_three])
def test_drafts_change_no_bit(make):
    engine = make()
    tokens, kept, _ = decoded(engine, 0)
    assert kept and all(x.any() for x in kept)
    for drafts in (1, engine.config.mtp_depths):
        same, same_kept, per_round = decoded(engine, drafts)
        print(f"{make.__name__}, {drafts} drafts: {per_round:.2f} tokens a round")
        assert make is not nano or per_round > 1.2
        np.testing.assert_array_equal(same, tokens)
        for one, other in zip(same_kept, kept, strict=True):
            np.testing.assert_array_equal(one, other)
