"""From logits to tokens, and the arithmetic that makes drafts lossless.

Randomness is addressed like everything else: by the sequence's seed, the absolute position, and the use. A
position's draws are therefore the same whatever stands beside it in the batch. A draft that is thrown away because
an earlier one was rejected has revealed nothing, so its draws may serve again.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from .state import Settings


class Use(IntEnum):
    """What a random draw at a position is for."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


def keys(settings: Settings, positions: Int[Array, " B"], use: Use) -> Key[Array, " B"]:
    """One key a sequence, for one use at one position."""

    def fold(seed: UInt[Array, ""], position: Int[Array, ""]) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), use)

    return jax.vmap(fold)(settings.seed, positions)


def distribution(logits: Float[Array, "B V"], settings: Settings) -> Float[Array, "B V"]:
    """The distribution that sampling draws from: temperature, then top-k, then top-p; one-hot at temperature 0.

    top-p keeps the fewest most likely tokens whose probabilities reach it; tokens that tie with the last one kept
    are kept.
    """
    greedy = settings.temperature <= 0.0
    # Less the maximum first: however small the temperature, nothing overflows, and inf - inf is NaN.
    temperature = jnp.maximum(settings.temperature, jnp.finfo(jnp.float32).tiny)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    restricted = jnp.any((settings.top_k < logits.shape[1]) | (settings.top_p < 1.0))
    probabilities = lax.cond(restricted, _restrict, lambda x, _: jax.nn.softmax(x, axis=-1), scaled, settings)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[1], dtype=jnp.float32)
    return jnp.where(greedy[:, None], best, probabilities)


def _restrict(scaled: Float[Array, "B V"], settings: Settings) -> Float[Array, "B V"]:
    vocabulary = scaled.shape[1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    kth = jnp.take_along_axis(ordered, jnp.minimum(settings.top_k, vocabulary)[:, None] - 1, axis=1)
    kept = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(kept, axis=-1) - kept
    # At least one token always stays; top_p == 1 keeps all, whatever the cumulative sum rounds to.
    inside = (before < settings.top_p[:, None]) | (settings.top_p[:, None] >= 1.0)
    count = jnp.maximum(jnp.sum(inside & (kept > 0), axis=-1), 1)
    floor = jnp.take_along_axis(ordered, count[:, None] - 1, axis=1)
    return jax.nn.softmax(jnp.where(scaled >= floor, scaled, -jnp.inf), axis=-1)


def draw(probabilities: Float[Array, "B V"], key: Key[Array, " B"]) -> Int[Array, " B"]:
    """One token a sequence. A weight of 0 is never drawn; weights need not sum to 1."""
    noise = jax.vmap(lambda k: jax.random.gumbel(k, probabilities.shape[1:]))(key)
    return jnp.argmax(jnp.log(probabilities) + noise, axis=-1).astype(jnp.int32)


def sample(logits: Float[Array, "B V"], settings: Settings, key: Key[Array, " B"]) -> Int[Array, " B"]:
    return lax.cond(
        jnp.any(settings.temperature > 0.0),
        lambda: draw(distribution(logits, settings), key),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )


def accept(
    drafts: Int[Array, "B drafts"],
    draft_logits: list[Float[Array, "B V"]],
    target_logits: Float[Array, "B rows V"],
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the first `offered[b]` drafts the target accepts, and the token it adds after them.

    Draft j stands at `positions + j`; `target_logits[:, j]` is what the target says of that place. Greedy: a draft
    is accepted while it equals the target's argmax. Sampled: draft x with probability min(1, p(x) / q(x)); after a
    rejection the token comes from max(p - q, 0) renormalised, after none from p: the output has the target's
    distribution exactly (Leviathan et al. 2023; Chen et al. 2023).
    """
    return lax.cond(
        jnp.any(settings.temperature > 0.0),
        lambda: _accept_sampled(drafts, draft_logits, target_logits, offered, positions, settings),
        lambda: _accept_greedy(drafts, target_logits, offered),
    )


def _prefix(good: Bool[Array, "B drafts"], offered: Int[Array, " B"]) -> Int[Array, " B"]:
    good &= jnp.arange(good.shape[1]) < offered[:, None]
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _accept_greedy(
    drafts: Int[Array, "B drafts"], target_logits: Float[Array, "B rows V"], offered: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
    count = _prefix(drafts == best[:, : drafts.shape[1]], offered)
    return count, jnp.take_along_axis(best, count[:, None], axis=1)[:, 0]


def _accept_sampled(
    drafts: Int[Array, "B drafts"],
    draft_logits: list[Float[Array, "B V"]],
    target_logits: Float[Array, "B rows V"],
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    p = [distribution(target_logits[:, j], settings) for j in range(target_logits.shape[1])]
    q = [distribution(logits, settings) for logits in draft_logits]
    good = []
    for j in range(drafts.shape[1]):
        u = jax.vmap(jax.random.uniform)(keys(settings, positions + j, Use.ACCEPT))
        token = drafts[:, j, None]
        p_token, q_token = (jnp.take_along_axis(x[j], token, axis=1)[:, 0] for x in (p, q))
        good.append(u * q_token < p_token)
    count = _prefix(jnp.stack(good, axis=1), offered) if good else jnp.zeros_like(offered)
    at = lambda x: jnp.take_along_axis(jnp.stack(x, axis=1), count[:, None, None], axis=1)[:, 0]  # noqa: E731
    weights = target = at(p)
    if q:
        # After the last offered draft the target speaks alone, as if q were 0.
        proposal = jnp.where((count < offered)[:, None], at([*q, jnp.zeros_like(q[0])]), 0.0)
        rest = jnp.maximum(target - proposal, 0.0)
        weights = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, target)
    return count, draw(weights, keys(settings, positions + count, Use.TARGET))
