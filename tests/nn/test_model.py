"""The modules, uncached, against the oracle."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inkling_jax.cache import Rows
from inkling_jax.config import InklingConfig
from inkling_jax.nn import InklingModel, abstract_parameters, logical_axes
from inkling_jax.ops import linear
from tests import reference
from tests.kernels.oracle import bits
from tests.nn.build import build, run, teacher_forced
from tests.precision import relative_error
from tests.reference import CONFIGS

LENGTH = 40  # past window (8), extent (12) and the floor of the log scaling (20)
TINY = CONFIGS["first_layer_global"]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_depth_agree_with_the_oracle(name):
    config = CONFIGS[name]
    params, tokens = reference.random_params(config, seed=1), reference.random_tokens(config, LENGTH, seed=2)
    found = run(build(config, params), tokens[None])
    expected = reference.forward(params, config, tokens)
    assert found["logits"].dtype == jnp.float32
    assert found["logits"].shape == (1, LENGTH, config.real_vocab_size)
    assert relative_error(found["logits"][0], expected["logits"]) < 1e-5
    assert relative_error(found["hidden"][0], expected["hidden"]) < 1e-5
    expected_depths = reference.depths(params, config, tokens)
    assert len(found["depths"]) == len(expected_depths) == config.mtp_depths
    for logits, depth in zip(found["depths"], expected_depths, strict=True):
        assert relative_error(logits[0], depth["logits"]) < 1e-5


def test_a_row_begins_the_same_among_any_number_of_rows():
    """To the bit, on the kernels: XLA would add a norm's squares in another order for 48 or 80 rows than for 16."""
    config = replace(TINY, hidden_size=192)
    module = InklingModel(config, dtype="float32", rngs=nnx.Rngs(0))
    tokens = jnp.arange(80, dtype=jnp.int32)[:, None] % config.real_vocab_size

    @jax.jit
    def begin(tokens):
        rows = Rows(jnp.zeros(len(tokens), jnp.int32), jnp.ones(len(tokens), jnp.int32), "interpret")
        stream, normed = module.embed.begin(tokens, module.layers[0].attn_norm, rows)
        return stream, linear(normed, module.layers[0].attn.wq.weight[...], implementation="interpret")

    expected = [bits(x) for x in begin(tokens[:16])]
    for count in (48, 80):
        for x, own in zip(begin(tokens[:count]), expected, strict=True):
            np.testing.assert_array_equal(bits(x[:16]), own)


def test_the_sequences_of_a_batch_are_strangers():
    config = replace(TINY, mtp_depths=0, mtp_local=())
    params = reference.random_params(config)
    tokens = np.stack([reference.random_tokens(config, 17, seed) for seed in range(3)])
    found = run(build(config, params), tokens)
    for row, own in enumerate(tokens):
        assert relative_error(found["logits"][row], reference.forward(params, config, own)["logits"]) < 1e-5


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_sequences(length):
    config = replace(TINY, mtp_depths=0, mtp_local=())
    params, tokens = reference.random_params(config), reference.random_tokens(config, length)
    found = run(build(config, params), tokens[None])
    assert relative_error(found["logits"][0], reference.forward(params, config, tokens)["logits"]) < 1e-5


def test_bfloat16_is_close():
    """Against float64 on the same, rounded weights: a per cent or so of noise, and the same favourite token."""
    params = reference.random_params(TINY)
    rounded = {path: np.asarray(jnp.asarray(p, jnp.bfloat16), np.float32) for path, p in params.items()}
    rounded |= {path: p for path, p in params.items() if path.endswith(("router.bias", "router.scale"))}
    tokens = reference.random_tokens(TINY, LENGTH)
    found = run(build(TINY, rounded, "bfloat16"), tokens[None])
    assert found["hidden"].dtype == jnp.bfloat16
    expected = reference.forward(rounded, TINY, tokens)["logits"]
    noise = np.asarray(found["logits"][0], float) - expected
    # The median row: now and then the rounding flips which expert is chosen, and that row moves further.
    assert np.median(np.linalg.norm(noise, axis=1) / np.linalg.norm(expected, axis=1)) < 0.02
    assert (np.argmax(found["logits"][0], axis=1) == np.argmax(expected, axis=1)).mean() > 0.9


def test_padded_ids_do_not_exist():
    params = reference.random_params(TINY)
    tokens = reference.random_tokens(TINY, LENGTH)[None]
    before = run(build(TINY, params), tokens)
    params["unembed.weight"][TINY.real_vocab_size :] = 1e6  # would win every time
    after = run(build(TINY, params), tokens)
    assert after["logits"].shape[-1] == TINY.real_vocab_size
    np.testing.assert_array_equal(before["logits"], after["logits"])
    np.testing.assert_array_equal(before["depths"][0], after["depths"][0])


def hidden(config, params, tokens, start=0):
    return np.asarray(run(build(config, params), tokens[None], start)["hidden"][0])


def test_log_scaling_begins_at_the_floor():
    config = replace(TINY, num_layers=1, local_layers=(), mtp_depths=0, mtp_local=())
    params, tokens = reference.random_params(config), reference.random_tokens(config, 24)
    scaled, plain = (hidden(replace(config, log_scaling_floor=floor), params, tokens) for floor in (20, None))
    np.testing.assert_allclose(scaled[:20], plain[:20], atol=1e-6)  # position 19 is the 20th token
    assert (np.abs(scaled[20:] - plain[20:]).max(axis=1) > 1e-4).all()


def test_log_scaling_knows_no_largest_position():
    config = replace(TINY, mtp_depths=0, mtp_local=(), max_context=2**20)
    params, tokens = reference.random_params(config), reference.random_tokens(config, 15)
    far = hidden(config, params, tokens, start=2**20 - 15)
    expected = reference.forward(params, config, tokens, start=2**20 - 15)["hidden"]
    assert relative_error(far, expected) < 1e-5
    assert relative_error(far, reference.forward(params, config, tokens)["hidden"]) > 1e-2


def test_the_bias_reaches_every_kind_of_layer():
    params = reference.random_params(TINY)
    tokens = reference.random_tokens(TINY, LENGTH)[None]
    before = run(build(TINY, params), tokens)
    for path in [path for path in params if path.endswith("rel_proj")]:
        without = run(build(TINY, params | {path: np.zeros_like(params[path])}), tokens)
        last = before["depths"][-1] if path.startswith("mtp.1") else before["depths"][0]
        changed = without["depths"][-1] if path.startswith("mtp.1") else without["depths"][0]
        assert np.abs(last - changed).max() > 1e-2, path


def test_every_parameter_matters_and_has_a_finite_gradient():
    """Also says that nothing is detached: only the selection bias, which is not trained by gradient, has none."""
    config = replace(TINY, num_layers=2, local_layers=(0,), chain_norm=True)
    model = build(config, reference.random_params(config))
    tokens = jnp.asarray(reference.random_tokens(config, 20))[None]
    graph, state = nnx.split(model)

    def loss(state):
        found = teacher_forced(graph, state, tokens, jnp.int32(0))
        return sum(jnp.square(logits - 1).sum() for logits in (found["logits"], *found["depths"]))

    gradients = nnx.to_flat_state(jax.jit(jax.grad(loss))(state))
    largest = {".".join(map(str, path)): float(jnp.abs(leaf.get_value()).max()) for path, leaf in gradients}
    assert all(math.isfinite(value) for value in largest.values())
    assert {path for path, value in largest.items() if value == 0} == {"layers.1.mlp.router.bias"}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_architecture(name):
    found = abstract_parameters(CONFIGS[name], "bfloat16")
    assert {path: spec.shape for path, spec in found.items()} == reference.parameter_shapes(CONFIGS[name])
    kept = {path for path, spec in found.items() if spec.dtype == jnp.float32}
    assert kept == {path for path in found if path.endswith(("router.bias", "router.scale"))}
    assert all(found[path].dtype == jnp.bfloat16 for path in found if path not in kept)


def test_every_axis_of_every_parameter_has_a_known_name_or_none():
    shapes, axes = reference.parameter_shapes(TINY), logical_axes(TINY)
    known = {"token", "joined", "vocab", "hidden", "heads", "kv_heads", "mlp", "expert", "expert_mlp", None}
    assert {path: len(names) for path, names in axes.items()} == {path: len(shape) for path, shape in shapes.items()}
    assert {name for names in axes.values() for name in names} == known


TOWER_ROWS = {"audio": 80 * 16 + 1, "vision": 9600 + 1}  # of the hidden size: tables, last map and final norms
TOWER_REST = 128 * 75 + 320 * 512 + 4800 * 5120 + 128 + 320 + 4800


@pytest.mark.parametrize(
    ("name", "total", "depths"),
    [("inkling", 952_377_623_626, 5_260_445_704), ("inkling-small", 265_956_439_090, None)],
)
def test_published_sizes_have_the_published_number_of_parameters(name, total, depths):
    """The published totals include the vision and audio towers, which are not built here and are counted by hand."""
    config = InklingConfig.from_name(name)
    counts = {path: math.prod(spec.shape) for path, spec in abstract_parameters(config, "bfloat16").items()}
    towers = sum(TOWER_ROWS.values()) * config.hidden_size + TOWER_REST
    assert sum(counts.values()) + towers == total
    if depths is not None:
        assert sum(count for path, count in counts.items() if path.startswith("mtp")) == depths
