"""How many experts a round hits: with few rows, that decides what a step must read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ..cache import Rows
from ..collectives import index, parts
from ..decode.engine import Engine
from ..decode.loop import one_round, pick
from ..decode.state import DecodeState, Settings
from ..nn import InklingModel
from ..sharding import AXES

EXTRA_ROUNDS = 4  # beside the timed ones: too few to cost time, enough for a mean


def experts_hit(ids: Int[Array, "M A"], valid: Bool[Array, " M"], experts: int) -> Int[Array, ""]:
    """Distinct ones of `experts` experts among those of the valid rows; other ids are those of other devices."""
    flat = jnp.where(valid[:, None] & (ids >= 0) & (ids < experts), ids, experts)
    return jnp.zeros(experts + 1, jnp.int32).at[flat].set(1)[:experts].sum()


class Watched:
    """An MoE that notes how many experts its rows hit, on a mesh how many of the device's own."""

    def __init__(self, moe: Any, seen: list[Int[Array, ""]]):
        self._moe, self._seen = moe, seen

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        router = self._moe.router
        ids, _ = router(x.reshape(-1, x.shape[-1]), rows.implementation)
        experts = router.bias[...].shape[0] // parts("expert")
        ids = ids - index("expert") * experts
        self._seen.append(experts_hit(ids, rows.real(x.shape[1]).reshape(-1), experts))
        return self._moe(x, rows)


def watch(model: InklingModel) -> list[Int[Array, ""]]:
    """Wraps the MoEs of a model that is being traced; the list fills, one count a layer, as its layers are called."""
    seen: list[Int[Array, ""]] = []
    for layer in model.layers:
        if hasattr(layer.mlp, "router"):
            object.__setattr__(layer, "mlp", Watched(layer.mlp, seen))
    return seen


def counted_round(engine: Engine, drafts: int) -> Callable[..., tuple[Int[Array, "devices L"], DecodeState]]:
    """A jitted round that also gives the experts that each device hits in each MoE layer.

    Takes leaves, the donated state, settings.
    """

    def step(model: InklingModel, state: DecodeState, settings: Settings) -> tuple[Int[Array, "1 L"], DecodeState]:
        seen = watch(model)
        state = one_round(model, state, settings, drafts, pick)
        return jnp.array(seen, jnp.int32)[None], state

    def run(leaves: list[Array], state: DecodeState, settings: Settings) -> tuple[Int[Array, "devices L"], DecodeState]:
        return engine.on_shards(step, leaves, state, settings, beside=PartitionSpec(AXES))

    return jax.jit(run, donate_argnums=1)


def routing(engine: Engine, state: DecodeState, settings: Settings, drafts: int) -> list[float]:
    """Mean over a few more rounds of the experts that the verify's rows hit, layer by layer, on the busiest device.

    Consumes the state.
    """
    step, counts = counted_round(engine, drafts), []
    for _ in range(EXTRA_ROUNDS):
        seen, state = step(engine.leaves, state, settings)
        counts.append(np.asarray(seen).max(axis=0))
    return np.mean(counts, axis=0).tolist()
