"""On eight devices of one process: a model gives over any mesh what it gives on one. Run by `test_meshes.py`."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax import collectives
from inkling_jax.cache import LayerCache
from inkling_jax.compilation import announce
from inkling_jax.decode.state import DecodeState, Settings
from inkling_jax.sharding import AXES, make_mesh
from pallas_kernels import Implementation
from tests import reference
from tests.decode.tiny import SmallPages, request
from tests.precision import relative_error

CONFIG = replace(
    reference.BASE,
    num_layers=2,
    local_layers=(0,),
    num_heads=8,
    head_dim=32,
    local_num_heads=8,
    local_num_kv_heads=4,
    local_head_dim=48,
    mtp_depths=2,
    mtp_local=(0,),
)
"""Dense and MoE, local and global; two KV heads in global layers, four in local ones, so that either may be too few."""
MESHES = ["1x1x8", "1x8x1", "1x2x4", "2x2x2"]  # data, expert, tensor
PROMPTS, NEW, CHUNK, DRAFTS = (2, 3, 37, 20), 12, 32, 1
SAMPLED = dict(temperature=1.1, top_k=20, top_p=0.9)


class Pages(SmallPages):
    page = 16  # the least that the kernels take


def engine_on(mesh: str | None, implementation: Implementation = "xla") -> SmallPages:
    params = {path: jnp.asarray(p) for path, p in reference.random_params(CONFIG).items()}
    devices = make_mesh(dict(zip(AXES, map(int, mesh.split("x")), strict=True))) if mesh else None
    return Pages(CONFIG, params, "float32", implementation, devices)


@cache
def alone() -> SmallPages:
    return engine_on(None)


@pytest.fixture(params=MESHES, scope="module")
def steps(request) -> SmallPages:
    return engine_on(request.param)


def started(steps: SmallPages, **settings) -> tuple[DecodeState, Settings]:
    prompts = [reference.random_tokens(CONFIG, length, seed) for seed, length in enumerate(PROMPTS)]
    return steps.start([request(tokens, NEW, **{"seed": i, **settings}) for i, tokens in enumerate(prompts)], DRAFTS)


def generated(steps: SmallPages, rounds: int = 10**6, **settings) -> DecodeState:
    state, options = started(steps, **settings)
    for at in range(0, max(PROMPTS), CHUNK):
        state = steps.prefill(steps.leaves, state, np.int32(at), chunk=CHUNK, drafts=DRAFTS)
    return steps.decode(steps.leaves, state, options, np.int32(rounds), drafts=DRAFTS)


def check_tokens(found: DecodeState, exact: DecodeState) -> None:
    for name in ("length", "status", "rounds", "accepted"):
        np.testing.assert_array_equal(getattr(found, name)[: len(PROMPTS)], getattr(exact, name))
    for b, length in enumerate(np.add(PROMPTS, NEW)):
        np.testing.assert_array_equal(found.tokens[b, :length], exact.tokens[b, :length])


def rows_of(layer: LayerCache, table: np.ndarray, groups: int, kv_heads: int) -> list[np.ndarray]:
    """Keys and values of a layer by sequence and position, one copy of each head, and what its rings hold."""
    found = []
    batch = len(PROMPTS)
    for pool in (layer.kv.k, layer.kv.v):
        pool = np.asarray(pool)
        copies = pool.shape[1] // kv_heads
        own = table + np.arange(len(table))[:, None] // (len(table) // groups) * (len(pool) // groups)
        rows = np.where((table >= 0)[..., None, None, None], pool[:, ::copies][own], 0)[:batch]
        found.append(rows)
    for ring in (layer.k_conv, layer.v_conv):
        rows = np.asarray(ring.rows)[:batch]
        copies = rows.shape[-1] // (layer.kv.k.shape[-1] * kv_heads)
        heads = rows.reshape(*rows.shape[:2], -1, layer.kv.k.shape[-1])
        found.append(heads[:, :, ::copies].reshape(*rows.shape[:2], -1))
    return [*found, np.asarray(layer.attn_conv.rows)[:batch], np.asarray(layer.mlp_conv.rows)[:batch]]


def remembered(state: DecodeState, groups: int) -> list[np.ndarray]:
    found = [np.asarray(state.hidden.rows)[: len(PROMPTS)]]
    for layer in (*state.cache.layers, *state.cache.depths):
        kv_heads = CONFIG.attention(layer.kv.ring is not None).kv_heads
        found += rows_of(layer, np.asarray(state.cache.page_table(layer)), groups, kv_heads)
    return found


def check_memory(found: list[np.ndarray], exact: list[np.ndarray]) -> None:
    for own, wanted in zip(found, exact, strict=True):
        assert relative_error(own, wanted) < 1e-5


@cache
def truth(**settings) -> DecodeState:
    return generated(alone(), **settings)


def test_tokens_are_those_of_one_device(steps):
    check_tokens(generated(steps), truth())


def test_sampled_tokens_are_those_of_one_device(steps):
    check_tokens(generated(steps, **SAMPLED), truth(**SAMPLED))


def test_a_step_compiles_once(steps):
    """What it returns lies on the devices as what it was first given: else the second call would compile it again."""
    generated(steps, rounds=1)
    with announce("nothing") as watch:
        state, settings = started(steps)
        for _ in range(2):
            state = steps.prefill(steps.leaves, state, np.int32(0), chunk=CHUNK, drafts=DRAFTS)
        for _ in range(2):
            state = steps.decode(steps.leaves, state, settings, np.int32(1), drafts=DRAFTS)
    assert watch.seconds == 0.0


def test_an_empty_cache_is_made_in_its_parts(steps):
    length = np.full(8, 40)
    shape = steps.shape(length, DRAFTS)
    cache = steps.cache(shape, length)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert held == steps.cache_bytes(shape)
    assert all(len(leaf.sharding.device_set) == steps.mesh.size for leaf in jax.tree.leaves(cache))


def test_memory_is_that_of_one_device(steps):
    found, exact = generated(steps, rounds=2), truth(rounds=2)
    check_memory(remembered(found, steps.groups), remembered(exact, 1))


def test_logits_are_those_of_one_device(steps):
    """Of the last depth, which come through the backbone and the depths before it."""
    tokens = np.stack([reference.random_tokens(CONFIG, 48, seed) for seed in range(8)])

    def logits(steps: SmallPages) -> jax.Array:
        length = np.full(len(tokens), tokens.shape[1])
        cache = steps.cache(steps.shape(length, CONFIG.mtp_depths), length)
        arrays = steps.place(tokens), steps.place(length.astype(np.int32)), jnp.int32(0)
        return steps.teacher_forced(steps.leaves, cache, *arrays, chunk=48, depth=CONFIG.mtp_depths - 1)[0]

    assert relative_error(np.asarray(logits(steps)), np.asarray(logits(alone()))) < 1e-5


def test_every_step_with_the_residual_rings_split(monkeypatch):
    """Reduce-scatter, convolution on the shard and all-gather in decoding too, as with many sequences."""
    monkeypatch.setattr(collectives, "WHOLE_ROWS", 0)
    steps = engine_on("1x2x4")
    state = generated(steps, rounds=2)
    assert {layer.mlp_conv.axis for layer in state.cache.layers} == {"mlp"}
    assert state.cache.layers[0].mlp_conv.rows.addressable_shards[0].data.shape[-1] == CONFIG.hidden_size // 8
    check_memory(remembered(state, 1), remembered(truth(rounds=2), 1))
    check_tokens(generated(steps), truth())


def test_kernels_on_each_shard(monkeypatch):
    """Chunks, whose branches are scattered, and a round, whose branches are summed whole."""
    monkeypatch.setattr(collectives, "WHOLE_ROWS", 2 * len(PROMPTS))
    steps = engine_on("1x2x4", "interpret")
    found = generated(steps, rounds=1)
    check_memory(remembered(found, 1), remembered(truth(rounds=1), 1))
    np.testing.assert_array_equal(found.length, truth(rounds=1).length)


def test_no_device_holds_more_than_its_part():
    steps = engine_on("1x2x4")
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in steps.leaves)
    split = {path: p for path, p in reference.random_params(CONFIG).items() if not path.endswith("embed.weight")}
    assert held < sum(p.nbytes for p in split.values()) / 2
