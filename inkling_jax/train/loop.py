"""The training step and the loop around it.

Parameters are a flat dict of float32 master copies by dotted path; each step rounds them to bfloat16 for the forward
and backward pass. The corpus lies on the device and batches are drawn there, so that one dispatch runs many steps.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt16
from tqdm import tqdm

from ..config import InklingConfig
from ..nn import InklingModel, abstract_parameters
from .data import CorpusError
from .experts import with_all_experts
from .presets import Recipe

Parameters = dict[str, Array]


class State(NamedTuple):
    """What a step carries over; donated."""

    step: Int[Array, ""]
    params: Parameters
    optimizer: optax.OptState


def initialise(config: InklingConfig, seed: int) -> tuple[nnx.GraphDef, Parameters]:
    """The modules' structure, and their random initial parameters in float32."""
    graph, state = nnx.split(InklingModel(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)))
    return graph, {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def assemble(graph: nnx.GraphDef, params: Parameters) -> InklingModel:
    """The model that holds `params`."""
    flat = {tuple(int(part) if part.isdigit() else part for part in path.split(".")): x for path, x in params.items()}
    return nnx.merge(graph, nnx.from_flat_state([(path, nnx.Param(x)) for path, x in flat.items()]))


def rounded(config: InklingConfig, params: Parameters) -> Parameters:
    """The parameters in the types of a bfloat16 checkpoint: routers' bias and scale stay float32."""
    return {path: params[path].astype(like.dtype) for path, like in abstract_parameters(config).items()}


def predict(model: InklingModel, window: Int[Array, "B window"]) -> list[Float[Array, "B T V"]]:
    """Logits of the backbone, then of each depth, teacher forced over T = window - depths - 1 rows.

    Row i of entry j predicts token i + j + 1 of the window, so every row of every entry has its target inside.
    """
    rows = window.shape[1] - len(model.mtp) - 1
    h, _ = model.hidden(window[:, :rows])
    outputs = [model.logits(h)]
    for d in range(len(model.mtp)):
        h, _ = model.depth(d, h, window[:, d + 1 : d + 1 + rows])
        outputs.append(model.logits(h))
    return outputs


def targets(window: Int[Array, "B window"], j: int, rows: int) -> Int[Array, "B T"]:
    """What entry j of `predict` should have said."""
    return window[:, j + 1 : j + 1 + rows]


def loss(
    params: Parameters, window: Int[Array, "B window"], graph: nnx.GraphDef, config: InklingConfig, recipe: Recipe
) -> tuple[Float[Array, ""], tuple[Float[Array, " heads"], Parameters]]:
    """Cross-entropy of the backbone plus that of the depths; also each alone, and every expert's load by bias path.

    A draft counts when the backbone would have said the same, so part of a depth's target is what the backbone says
    about that token.
    """
    # Many rows add up in one row of the embedding's gradient: too many for bfloat16.
    embed = {path: x for path, x in params.items() if path.startswith("embed.")}
    model = assemble(graph, rounded(config, params) | embed)
    mixtures = with_all_experts(model)
    logits = predict(model, window)
    rows = logits[0].shape[1]
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    hard = [cross_entropy(x, targets(window, j, rows)).mean() for j, x in enumerate(logits)]
    backbone = jax.nn.softmax(jax.lax.stop_gradient(logits[0]))
    total = hard[0]
    for j, x in enumerate(logits[1:], 1):
        soft = optax.softmax_cross_entropy(x[:, : rows - j], backbone[:, j:]).mean()
        total += recipe.depth_weight * ((1 - recipe.distilled) * hard[j] + recipe.distilled * soft)
    return total, (jnp.stack(hard), {path: mixture.load for path, mixture in mixtures.items()})


def balanced(params: Parameters, loads: Parameters, rate: float) -> Parameters:
    """Moves each selection bias by `rate` towards equal loads: up where an expert saw less than its share.

    The bias takes part in the choice only and has no gradient; nothing else keeps the experts even.
    """
    nudged = {path: params[path] + rate * jnp.sign(load.mean() - load) for path, load in loads.items()}
    return params | nudged


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping, linear warm-up and a cosine to zero; decay on matrices only."""
    rate = optax.warmup_cosine_decay_schedule(0.0, recipe.peak_rate, recipe.warmup, recipe.steps)
    adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay, mask=_decayed)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adam)


def _decayed(params: Parameters) -> dict[str, bool]:
    spared = ("conv", "embed.", "rel_proj")
    return {path: x.ndim > 1 and not any(part in f"{path}." for part in spared) for path, x in params.items()}


def make_steps(
    graph: nnx.GraphDef, config: InklingConfig, recipe: Recipe, optimizer: optax.GradientTransformation
) -> Callable[[State, Array], tuple[State, Array]]:
    """A jitted function that runs `report_every` steps and returns each head's mean loss over them."""
    width = recipe.length + config.mtp_depths + 1

    def step(data: UInt16[Array, "tokens"], state: State, _: None) -> tuple[State, Float[Array, " heads"]]:
        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        starts = jax.random.randint(key, (recipe.batch,), 0, data.shape[0] - width + 1)
        window = data[starts[:, None] + jnp.arange(width)].astype(jnp.int32)
        gradient = jax.grad(functools.partial(loss, graph=graph, config=config, recipe=recipe), has_aux=True)
        gradients, (losses, loads) = gradient(state.params, window)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = balanced(jax.tree.map(jnp.add, state.params, updates), loads, recipe.balance_rate)
        return State(state.step + 1, params, optimizer_state), losses

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state: State, data: UInt16[Array, "tokens"]) -> tuple[State, Float[Array, " heads"]]:
        state, losses = jax.lax.scan(functools.partial(step, data), state, length=recipe.report_every)
        return state, losses.mean(axis=0)

    return steps


def train(
    config: InklingConfig,
    recipe: Recipe,
    tokens: UInt16[np.ndarray, "tokens"],
    watch: Callable[[Parameters], str] | None = None,
) -> tuple[Parameters, list[list[float]]]:
    """Trains from scratch on a row of token ids; returns float32 parameters and the losses by report.

    `watch` is called about ten times with the parameters, and what it returns is printed. Raises CorpusError where the
    row is shorter than one window, FloatingPointError where the loss is no longer finite.
    """
    if len(tokens) <= recipe.length + config.mtp_depths:
        raise CorpusError(f"{len(tokens)} tokens to learn from are fewer than a window of {recipe.length} rows takes")
    graph, params = initialise(config, recipe.seed)
    optimizer = make_optimizer(recipe)
    state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    steps = make_steps(graph, config, recipe, optimizer)
    data, history = jnp.asarray(tokens), []
    reports = -(-recipe.steps // recipe.report_every)
    with tqdm(total=reports * recipe.report_every, unit="step", mininterval=2) as bar:
        for i in range(1, reports + 1):
            state, losses = steps(state, data)
            history.append([round(float(x), 4) for x in losses])
            if not np.isfinite(history[-1]).all():
                raise FloatingPointError(f"the loss is not finite after step {int(state.step)}; lower --peak-rate")
            bar.update(recipe.report_every)
            bar.set_postfix_str("loss " + " ".join(f"{x:.3f}" for x in history[-1]))
            if watch and i % max(1, reports // 10) == 0:
                tqdm.write(f"step {int(state.step)}: {watch(state.params)}")
    return state.params, history
