"""Training: heads aligned with their targets, the stand-in for the mixture, balancing, and one whole small run."""

import dataclasses
import json
import sysconfig
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from inkling_jax.cache import Rows
from inkling_jax.checkpoint import load_parameters
from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.nn.mlp import MoE
from inkling_jax.tokenizer import Tokenizer
from inkling_jax.train import loop
from inkling_jax.train.__main__ import _recipe, main, parser
from inkling_jax.train.evaluate import make_heldout
from inkling_jax.train.experts import AllExperts
from inkling_jax.train.presets import NANO, TOY

SIZES = dict(hidden_size=16, num_layers=2, local_layers=(0,), num_experts=3, expert_size=8, dense_size=16)
DEPTHS = dict(mtp_depths=2, mtp_local=(0,))
CONFIG = dataclasses.replace(TOY.config(40), vocab_size=48, **SIZES, **DEPTHS)


def test_nano_fits_in_12_mb_with_every_feature_on():
    config = NANO.config(NANO.real_vocab_size)
    bytes = sum(x.size * x.dtype.itemsize for x in abstract_parameters(config).values())
    assert 10_500_000 < bytes < 11_800_000  # the tokenizer and the card take the rest
    assert 0 < len(config.local_layers) < config.num_layers
    assert 0 < len(config.dense_layers) < config.num_layers
    assert config.mtp_depths >= 4 and len(config.mtp_local) == config.mtp_depths - 1
    assert config.log_scaling_floor is not None and config.log_scaling_floor < NANO.recipe.length


def test_every_head_sees_the_tokens_before_its_target_and_no_others():
    """Entry j, row i knows tokens 0 .. i + j and predicts token i + j + 1."""
    graph, params = loop.initialise(CONFIG, 0)
    rows, width = 6, 6 + CONFIG.mtp_depths + 1
    window = np.repeat(np.arange(width)[None], width, axis=0)
    changed = window.copy()
    changed[np.arange(width), np.arange(width)] = 39

    @jax.jit
    def heads(window):
        return jnp.stack(loop.predict(loop.assemble(graph, params), window))

    before, after = heads(jnp.asarray(window)), heads(jnp.asarray(changed))
    assert before.shape == (CONFIG.mtp_depths + 1, width, rows, 40)
    depends = np.abs(np.asarray(after - before)).max(axis=-1) > 0  # [head, changed token, row]
    head, token, row = np.indices(depends.shape)
    np.testing.assert_array_equal(depends, token <= row + head)
    for j in range(CONFIG.mtp_depths + 1):
        np.testing.assert_array_equal(loop.targets(jnp.asarray(window), j, rows)[0], window[0, j + 1 : j + 1 + rows])


def test_all_experts_agree_with_the_mixture_and_count_its_choices():
    moe = MoE(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(3))
    moe.router.bias[...] = jnp.array([0.3, 0.0, -0.3])
    x = jax.random.normal(jax.random.key(1), (2, 9, CONFIG.hidden_size))
    rows = Rows(jnp.zeros(2, jnp.int32), jnp.full(2, 9, jnp.int32))
    everything = AllExperts(moe)
    expected = moe(x, rows)
    np.testing.assert_allclose(everything(x, rows), expected, atol=2e-6 * float(jnp.abs(expected).max()))
    assert float(everything.load.sum()) == 2 * 9 * CONFIG.experts_per_token
    assert everything.load[0] > everything.load[2]


def test_balancing_moves_only_the_bias_and_against_the_load():
    params = {"a.bias": jnp.zeros(3), "w": jnp.ones(2)}
    moved = loop.balanced(params, {"a.bias": jnp.array([9.0, 3.0, 0.0])}, 0.5)
    np.testing.assert_array_equal(moved["a.bias"], [-0.5, 0.5, 0.5])
    np.testing.assert_array_equal(moved["w"], params["w"])


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_training_learns_a_pattern_evens_the_experts_and_repeats_itself():
    pattern = np.random.default_rng(0).integers(0, 40, 50)
    tokens = np.tile(pattern, 40).astype(np.uint16)
    recipe = dataclasses.replace(TOY.recipe, steps=40, report_every=20, length=32)
    graph, start = loop.initialise(CONFIG, recipe.seed)
    heldout = make_heldout(graph, CONFIG, tokens[:500], recipe.length)
    optimizer = loop.make_optimizer(recipe)
    steps = loop.make_steps(graph, CONFIG, recipe, optimizer)

    def trained():
        own = jax.tree.map(jnp.copy, start)  # a step takes its state away
        state = loop.State(jnp.zeros((), jnp.int32), own, optimizer.init(own))
        for _ in range(2):
            state, _ = steps(state, jnp.asarray(tokens))
        return state.params

    params, again = trained(), trained()
    before, after = heldout(start), heldout(params)
    assert all(b < a - 1 for a, b in zip(before.losses, after.losses, strict=True))
    assert after.tokens_per_round > before.tokens_per_round + 0.5
    assert sorted(after.accepted, reverse=True) == after.accepted
    bias = "layers.1.mlp.router.bias"
    moved = np.abs(params[bias]) / recipe.balance_rate
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-3)  # whole steps of the rate: no gradient, no decay
    assert moved.max() >= 1
    for path, array in params.items():
        np.testing.assert_array_equal(array, again[path])


def small_corpus(root: Path) -> Path:
    """Modules of the running interpreter under names of our own, so that the same ones are held out everywhere."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for i, path in enumerate(sorted(library.glob("[a-z]*.py"))[:100]):
        (root / f"module_{i:03}.py").write_bytes(path.read_bytes()[:4000].rpartition(b"\n")[0])
    return root


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_command_makes_a_checkpoint(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    out = tmp_path / "made"
    corpus = small_corpus(tmp_path / "corpus")
    arguments = ["--preset", "toy", "--steps", "20", "--corpus", str(corpus), "--out", str(out)]
    assert main([*arguments, "--prompts", "0"]) == 0, capsys.readouterr().err
    config = InklingConfig.from_path(out)
    tokenizer = Tokenizer.from_directory(out)
    assert tokenizer is not None and tokenizer.size == config.real_vocab_size
    assert config.eos_token_ids == (tokenizer.size - 1,)
    assert tokenizer.decode(tokenizer.encode("def f():\n    pass\n")) == "def f():\n    pass\n"
    params = load_parameters(out, config, abstract_parameters(config), progress=False)
    learned = float(jnp.abs(params["embed.norm.weight"].astype(jnp.float32) - 1).max())
    assert learned > 1e-3
    card = (out / "README.md").read_text()
    printed = capsys.readouterr().out
    assert "sha256" in printed and card in printed
    for figure in ("20 steps of 8 x 64 tokens", "Apache-2.0", "| depth 3 |", "tokens a round"):
        assert figure in card
    losses = [float(line.split("|")[2]) for line in card.splitlines() if line.startswith(("| backbone", "| depth"))]
    assert len(losses) == 5 and all(loss < np.log(500) for loss in losses)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--length", "15"], "--length must be from 16 to 512, the preset's context, found 15"),
        (["--length", "513"], "--length must be from 16 to 512"),
        (["--peak-rate", "nan"], "--peak-rate must be a finite number above 0, found nan"),
        (["--peak-rate", "-1"], "--peak-rate must be a finite number above 0"),
        (["--seed", "4294967296"], "--seed must be from 0 to 4294967295"),
        (["--prompts", "-1"], "--prompts must be at least 0, found -1"),
        (["--corpus", "missing"], "missing: no such corpus"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, arguments, message):
    assert main(["--out", str(tmp_path / "x"), "--preset", "toy", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_half_an_archive_is_refused(tmp_path, capsys):
    with tarfile.open(tmp_path / "whole.tar.gz", "w:gz") as archive:
        (tmp_path / "some.py").write_bytes(np.random.default_rng(0).bytes(100_000))
        archive.add(tmp_path / "some.py")
    (tmp_path / "half.tar.gz").write_bytes((tmp_path / "whole.tar.gz").read_bytes()[:50_000])
    assert main(["--out", str(tmp_path / "x"), "--preset", "toy", "--corpus", str(tmp_path / "half.tar.gz")]) == 1
    assert "half.tar.gz: damaged, or not a whole archive" in capsys.readouterr().err


def test_as_many_steps_as_asked_for():
    arguments = parser().parse_args(["--out", "x", "--preset", "toy", "--steps", "12"])
    recipe = _recipe(TOY.recipe, arguments, 512)
    assert (recipe.steps, recipe.report_every) == (12, 6)


def test_a_directory_in_use_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("keep")
    assert main(["--out", str(tmp_path), "--preset", "toy"]) == 1
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "keep"
