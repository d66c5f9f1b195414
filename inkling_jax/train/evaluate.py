"""What a trained model is worth on files it never saw."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt16

from ..config import InklingConfig
from .data import CorpusError
from .loop import Parameters, assemble, predict, rounded, targets


@dataclass(frozen=True)
class HeldOut:
    """Teacher-forced figures over held-out files, in nats a token."""

    tokens: int
    losses: list[float]  # backbone, then each depth
    accepted: list[float]  # share of rows where the first d + 1 drafts are all the file's own next tokens

    @property
    def tokens_per_round(self) -> float:
        """Tokens a round, were the held-out text what the target says."""
        return 1 + sum(self.accepted)


def make_heldout(
    graph: nnx.GraphDef, config: InklingConfig, tokens: UInt16[np.ndarray, "tokens"], length: int, batch: int = 8
) -> Callable[[Parameters], HeldOut]:
    """A function of the parameters, rounded as in a checkpoint; the text is cut into windows of `length` rows.

    Raises CorpusError where the text is shorter than one window.
    """
    width = length + config.mtp_depths + 1
    if len(tokens) < width:
        raise CorpusError(f"the held-out files have {len(tokens)} tokens, fewer than one window of {width}")
    windows = tokens[: len(tokens) // width * width].reshape(-1, width).astype(np.int32)
    batch = min(batch, len(windows))
    batches = jnp.asarray(windows[: len(windows) // batch * batch].reshape(-1, batch, width))

    @jax.jit
    def figures(params: Parameters) -> tuple[Float[Array, " heads"], Float[Array, " depths"]]:
        model = rounded(config, params)
        losses, accepted = jax.lax.map(lambda window: _figures(assemble(graph, model), window), batches)
        return losses.mean(axis=0), accepted.mean(axis=0)

    def heldout(params: Parameters) -> HeldOut:
        losses, accepted = figures(params)
        return HeldOut(int(batches.size), [float(x) for x in losses], [float(x) for x in accepted])

    return heldout


def _figures(model, window: Int[Array, "B window"]) -> tuple[Float[Array, " heads"], Float[Array, " depths"]]:
    logits = predict(model, window)
    rows = logits[0].shape[1]
    wanted = [targets(window, j, rows) for j in range(len(logits))]
    losses = [optax.softmax_cross_entropy_with_integer_labels(x, y).mean() for x, y in zip(logits, wanted, strict=True)]
    right: Bool[Array, "B T"] = jnp.ones(window[:, :rows].shape, bool)
    accepted = []
    for x, y in zip(logits[1:], wanted[1:], strict=True):
        right &= x.argmax(axis=-1) == y
        accepted.append(right.mean())
    return jnp.stack(losses), jnp.stack(accepted)


def prompts(files: dict[str, list[int]], count: int, length: int) -> list[list[int]]:
    """The middles of the longest files: `length` ids each, the same for every run."""
    longest = sorted(files, key=lambda path: (-len(files[path]), path))[:count]
    middles = [files[path][len(files[path]) // 2 :][:length] for path in longest]
    return [ids for ids in middles if ids]
