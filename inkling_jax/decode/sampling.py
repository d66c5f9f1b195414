"""From logits to tokens, and the arithmetic that makes drafts lossless.

Randomness is addressed like everything else: by the sequence's seed, the absolute position, and the use. A
position's draws are therefore the same whatever stands beside it in the batch. A draft that is thrown away because
an earlier one was rejected has revealed nothing, so its draws may serve again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from ..collectives import all_reduce, exchange, index, parts
from .state import Leaf, Settings


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """Logits with the largest of each row and its id, the lowest of equals; of NaN, NaN.

    On a mesh `values` are this device's part of the padded vocabulary, -inf in the padding; `top` and `token` are of
    the whole: the devices exchange these two and no more.
    """

    values: Leaf  # float32 [B.. V]
    top: Leaf  # float32 [B..]
    token: Leaf  # int32 [B..]
    vocabulary: int = field(metadata={"static": True})  # of the whole, without padding

    @classmethod
    def of(cls, values: Float[Array, "*rows V"], vocabulary: int | None = None) -> "Logits":
        """`vocabulary` is V where these are all logits."""
        top, token = values.max(axis=-1), jnp.argmax(values, axis=-1).astype(jnp.int32)
        # Whoever reads them would take in the end of these reductions, and run it in a single thread.
        top, token = lax.optimization_barrier((top, token))
        if parts("vocab") > 1:
            token += index("vocab") * values.shape[-1]
            found = exchange(jnp.stack([lax.bitcast_convert_type(top, jnp.int32), token]), "vocab")
            tops, tokens = lax.bitcast_convert_type(found[:, 0], jnp.float32), found[:, 1]
            best = jnp.argmax(tops, axis=0)[None]
            top, token = (jnp.take_along_axis(x, best, axis=0)[0] for x in (tops, tokens))
        return cls(values, top, token, vocabulary or values.shape[-1])

    def row(self, j: int) -> "Logits":
        """Row j of each sequence."""
        return Logits(self.values[:, j], self.top[:, j], self.token[:, j], self.vocabulary)


def distribution(logits: Logits, settings: Settings) -> Float[Array, "B V"]:
    """The distribution that sampling draws from: temperature, then top-k, then top-p; one-hot at temperature 0.

    top-p keeps the fewest most likely tokens whose probabilities reach it; tokens that tie with the last one kept
    are kept.
    """
    greedy = settings.temperature <= 0.0
    # Less the maximum first: however small the temperature, nothing overflows, and inf - inf is NaN.
    temperature = jnp.maximum(settings.temperature, jnp.finfo(jnp.float32).tiny)
    scaled = (logits.values - logits.top[:, None]) / temperature[:, None]
    own = logits.values.shape[1]
    restricted = jnp.any((settings.top_k < logits.vocabulary) | (settings.top_p < 1.0))
    restrict = _restrict if parts("vocab") == 1 else _restrict_parts
    probabilities = lax.cond(restricted, restrict, lambda x, _: _softmax(x), scaled, settings)
    best = jax.nn.one_hot(logits.token - index("vocab") * own, own, dtype=jnp.float32)
    return jnp.where(greedy[:, None], best, probabilities)


def _softmax(scaled: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Over the whole vocabulary; the largest of `scaled` is 0."""
    if parts("vocab") == 1:
        return jax.nn.softmax(scaled, axis=-1)
    weights = jnp.exp(scaled)
    return weights / all_reduce(weights.sum(axis=-1, keepdims=True), "vocab")


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


def _restrict_parts(scaled: Float[Array, "B V"], settings: Settings) -> Float[Array, "B V"]:
    """The same without a sort, which would need the whole vocabulary in one place.

    The least probable token kept is searched for among all float32 numbers at or below 0, by counts and by sums over
    the devices.
    """
    size = lax.bitcast_convert_type(-scaled, jnp.int32) & 0x7FFFFFFF  # ordered as -scaled is

    def reach(weights: Float[Array, "B V"], wanted: Float[Array, " B"]) -> Bool[Array, "B V"]:
        """The most probable tokens, the fewest whose weights reach what is wanted, and those that tie with the last."""

        def reached(limits: Int[Array, "B n"]) -> Bool[Array, "B n"]:
            below = size[:, None, :] <= limits[:, :, None]
            sums = jnp.where(below, weights[:, None, :], 0.0).sum(axis=-1)
            return all_reduce(sums, "vocab") >= wanted[:, None]

        return size <= _least(reached, scaled.shape[0])[:, None]

    # Counts up to 2^24 are exact; more than there are tokens is never reached and keeps all.
    inside = reach(jnp.ones_like(scaled), settings.top_k.astype(jnp.float32))
    kept = _softmax(jnp.where(inside, scaled, -jnp.inf))
    # top_p == 1 keeps all, whatever the sum rounds to.
    inside &= reach(kept, settings.top_p) | (settings.top_p >= 1.0)[:, None]
    return _softmax(jnp.where(inside, scaled, -jnp.inf))


def _least(reached: Callable[[Int[Array, "B n"]], Bool[Array, "B n"]], batch: int) -> Int[Array, " B"]:
    """The least non-negative int32 for which a monotone condition holds, 32 candidates a pass; the largest if none."""

    def step(i: Int[Array, ""], first: Int[Array, " B"]) -> Int[Array, " B"]:
        shift = jnp.maximum(26 - 5 * i, 0)
        last = first[:, None] + (jnp.arange(1, 33, dtype=jnp.int32) << shift) - 1  # of 32 blocks of 2^shift
        short = jnp.sum(~reached(last), axis=1, dtype=jnp.int32)
        return first + (jnp.minimum(short, 31) << shift)

    return lax.fori_loop(0, 7, step, jnp.zeros(batch, jnp.int32))


def draw(probabilities: Float[Array, "B V"], key: Key[Array, " B"], vocabulary: int | None = None) -> Int[Array, " B"]:
    """One token a sequence. A weight of 0 is never drawn; weights need not sum to 1.

    On a mesh each device draws its part of the noise that a single one, with the whole `vocabulary`, would draw.
    """
    own = probabilities.shape[1]
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (vocabulary or own,)))(key)
    if parts("vocab") > 1:
        noise = jnp.pad(noise, ((0, 0), (0, own * parts("vocab") - noise.shape[1])))
        noise = lax.dynamic_slice_in_dim(noise, index("vocab") * own, own, axis=1)
    return Logits.of(jnp.log(probabilities) + noise).token


def sample(logits: Logits, settings: Settings, key: Key[Array, " B"]) -> Int[Array, " B"]:
    return lax.cond(
        jnp.any(settings.temperature > 0.0),
        lambda: draw(distribution(logits, settings), key, logits.vocabulary),
        lambda: logits.token,
    )


def accept(
    drafts: Int[Array, "B drafts"],
    draft_logits: list[Logits],
    target_logits: Logits,
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the first `offered[b]` drafts the target accepts, and the token it adds after them.

    Draft j stands at `positions + j`; row j of `target_logits` is what the target says of that place. Greedy: a draft
    is accepted while it equals the target's argmax. Sampled: draft x with probability min(1, p(x) / q(x)); after a
    rejection the token comes from max(p - q, 0) renormalised, after none from p: the output has the target's
    distribution exactly (Leviathan et al. 2023; Chen et al. 2023).
    """
    return lax.cond(
        jnp.any(settings.temperature > 0.0),
        lambda: _accept_sampled(drafts, draft_logits, target_logits, offered, positions, settings),
        lambda: _accept_greedy(drafts, target_logits.token, offered),
    )


def _prefix(good: Bool[Array, "B drafts"], offered: Int[Array, " B"]) -> Int[Array, " B"]:
    good &= jnp.arange(good.shape[1]) < offered[:, None]
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _accept_greedy(
    drafts: Int[Array, "B drafts"], best: Int[Array, "B rows"], offered: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    count = _prefix(drafts == best[:, : drafts.shape[1]], offered)
    return count, jnp.take_along_axis(best, count[:, None], axis=1)[:, 0]


def _accept_sampled(
    drafts: Int[Array, "B drafts"],
    draft_logits: list[Logits],
    target_logits: Logits,
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    p = [distribution(target_logits.row(j), settings) for j in range(target_logits.token.shape[1])]
    q = [distribution(logits, settings) for logits in draft_logits]
    good = []
    if q:
        pairs = [(_own(p[j], drafts[:, j]), _own(q[j], drafts[:, j])) for j in range(drafts.shape[1])]
        pairs = all_reduce(jnp.stack(jax.tree.leaves(pairs)), "vocab").reshape(-1, 2, drafts.shape[0])
        for j, (p_token, q_token) in enumerate(pairs):
            u = jax.vmap(jax.random.uniform)(keys(settings, positions + j, Use.ACCEPT))
            good.append(u * q_token < p_token)
    count = _prefix(jnp.stack(good, axis=1), offered) if good else jnp.zeros_like(offered)
    at = lambda x: jnp.take_along_axis(jnp.stack(x, axis=1), count[:, None, None], axis=1)[:, 0]  # noqa: E731
    weights = target = at(p)
    if q:
        # After the last offered draft the target speaks alone, as if q were 0.
        proposal = jnp.where((count < offered)[:, None], at([*q, jnp.zeros_like(q[0])]), 0.0)
        rest = jnp.maximum(target - proposal, 0.0)
        weights = jnp.where(all_reduce(rest.sum(axis=-1, keepdims=True), "vocab") > 0, rest, target)
    return count, draw(weights, keys(settings, positions + count, Use.TARGET), target_logits.vocabulary)


def _own(weights: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """The weight of one token a sequence, 0 where another device has it."""
    if parts("vocab") == 1:
        return jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0]
    at = token - index("vocab") * weights.shape[1]
    here = (at >= 0) & (at < weights.shape[1])
    found = jnp.take_along_axis(weights, jnp.where(here, at, 0)[:, None], axis=1)[:, 0]
    return jnp.where(here, found, 0.0)
