"""From logits to tokens, and the arithmetic that makes drafts lossless.

Randomness is addressed like everything else: by the sequence's seed, the absolute position, and the use. A
position's draws are therefore the same whatever stands beside it in the batch. A draft that is thrown away because
an earlier one was rejected has revealed nothing, so its draws may serve again.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt

from pallas_kernels import Implementation, cutoff
from pallas_kernels.cutoff import DEEPEST, depth_of

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What sampling keeps of rows of logits, after temperature, top-k and top-p: no distribution is ever stored.

    depth: int32 [B..], how far below the largest logit it goes (`pallas_kernels.cutoff`).
    total: float32 [B..], the sum of the kept weights, `exp((logit - largest) / temperature)`.
    """

    depth: Leaf
    total: Leaf


def keep(logits: Logits, settings: Settings, implementation: Implementation = "xla") -> Kept:
    """top-p keeps the fewest most likely tokens whose probabilities reach it; tokens that tie with the last one kept
    are kept. Probabilities are those of what top-k has kept."""
    rows = logits.top.shape
    x = lax.optimization_barrier(_scaled(logits, settings).reshape(-1, logits.values.shape[-1]))
    top_k, top_p = (jnp.broadcast_to(_beside(a, len(rows)), rows).reshape(-1) for a in (settings.top_k, settings.top_p))
    search = partial(cutoff, x, add_up=partial(all_reduce, axis="vocab") if parts("vocab") > 1 else None)
    search = partial(search, implementation=implementation)

    def sum_of(depth: Int[Array, " N"]) -> Float[Array, " N"]:
        return all_reduce(jnp.where(depth_of(x) <= depth[:, None], jnp.exp(x), 0.0).sum(axis=1), "vocab")

    def likeliest() -> tuple[Int[Array, " N"], Float[Array, " N"]]:
        found = search(wanted=top_p * total, last=depth, weighted=True)
        # 1 keeps all, whatever the sum rounds to.
        found = jnp.where(top_p >= 1.0, depth, jnp.minimum(found, depth))
        return found, sum_of(found)

    everything = jnp.full_like(top_k, DEEPEST)
    by_count = lambda: search(wanted=top_k.astype(jnp.float32), weighted=False)  # noqa: E731
    depth = lax.cond(jnp.any(top_k < logits.vocabulary), by_count, lambda: everything)
    total = sum_of(depth)
    depth, total = lax.cond(jnp.any(top_p < 1.0), likeliest, lambda: (depth, total))
    return Kept(depth.reshape(rows), total.reshape(rows))


def probabilities(logits: Logits, kept: Kept, settings: Settings) -> Float[Array, "*rows V"]:
    """The distribution that sampling draws from; one-hot at temperature 0. On a mesh, this device's part of it."""
    own = logits.values.shape[-1]
    ids = index("vocab") * own + jnp.arange(own, dtype=jnp.int32)
    best = (ids == logits.token[..., None]).astype(jnp.float32)
    return _weigh(_scaled(logits, settings), best, kept.depth[..., None], kept.total[..., None], settings)


def probability_of(token: Int[Array, "*rows"], logits: Logits, kept: Kept, settings: Settings) -> Float[Array, "*rows"]:
    """The same of one token a row; on a mesh 0 where another device has its logit."""
    own = logits.values.shape[-1]
    at = token - index("vocab") * own
    values = jnp.take_along_axis(logits.values, jnp.clip(at, 0, own - 1)[..., None], axis=-1)[..., 0]
    x = (values - logits.top) * _rate(settings, values.ndim)
    best = (token == logits.token).astype(jnp.float32)
    found = _weigh(x, best, kept.depth, kept.total, settings)
    return jnp.where((at >= 0) & (at < own), found, 0.0)


def _weigh(
    x: Float[Array, "*rows"],
    best: Float[Array, "*rows"],
    depth: Int[Array, "..."],
    total: Float[Array, "..."],
    settings: Settings,
) -> Float[Array, "*rows"]:
    greedy = _beside(settings.temperature, x.ndim) <= 0.0
    return jnp.where(greedy, best, jnp.where(depth_of(x) <= depth, jnp.exp(x) / total, 0.0))


def _scaled(logits: Logits, settings: Settings) -> Float[Array, "*rows V"]:
    """Logits over the temperature, the largest of a row 0."""
    # Less the maximum first: however small the temperature, nothing overflows, and inf - inf is NaN.
    return (logits.values - logits.top[..., None]) * _rate(settings, logits.values.ndim)


def _rate(settings: Settings, ndim: int) -> Float[Array, "B ..."]:
    """One over the temperature, to multiply by: XLA rounds a division in one way or another with what stands around it,
    and then the least logit kept would be kept here and not there. Neither bound is near a temperature in use: at 1e37
    all logits are equal, and the inverse of a larger one may be flushed to 0.
    """
    temperature = jnp.clip(settings.temperature, jnp.finfo(jnp.float32).tiny, 1e37)
    return _beside(lax.optimization_barrier(1.0 / temperature), ndim)


def _beside(x: Shaped[Array, " B"], ndim: int) -> Shaped[Array, "B ..."]:
    """What each sequence has, next to arrays [B, ...] of so many dimensions."""
    return x.reshape(-1, *[1] * (ndim - 1))


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


def sample(
    logits: Logits, settings: Settings, key: Key[Array, " B"], implementation: Implementation = "xla"
) -> tuple[Int[Array, " B"], Kept]:
    """A token of each sequence, and what it was drawn from; that is nothing where all are greedy."""

    def drawn() -> tuple[Int[Array, " B"], Kept]:
        kept = keep(logits, settings, implementation)
        return draw(probabilities(logits, kept, settings), key, logits.vocabulary), kept

    nothing = Kept(jnp.zeros_like(logits.token), jnp.ones_like(logits.top))
    return lax.cond(jnp.any(settings.temperature > 0.0), drawn, lambda: (logits.token, nothing))


def accept(
    drafts: Int[Array, "B drafts"],
    proposals: list[tuple[Logits, Kept]],
    target: Logits,
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
    implementation: Implementation = "xla",
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the first `offered[b]` drafts the target accepts, and the token it adds after them.

    Draft j stands at `positions + j`; `proposals[j]` is what it was drawn from, row j of `target` what the target says
    of that place. Greedy: a draft is accepted while it equals the target's argmax. Sampled: draft x with probability
    min(1, p(x) / q(x)); after a rejection the token comes from max(p - q, 0) renormalised, after none from p: the
    output has the target's distribution exactly (Leviathan et al. 2023; Chen et al. 2023).
    """
    return lax.cond(
        jnp.any(settings.temperature > 0.0),
        lambda: _accept_sampled(drafts, proposals, target, offered, positions, settings, implementation),
        lambda: _accept_greedy(drafts, target.token, offered),
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
    proposals: list[tuple[Logits, Kept]],
    target: Logits,
    offered: Int[Array, " B"],
    positions: Int[Array, " B"],
    settings: Settings,
    implementation: Implementation,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    said = target, keep(target, settings, implementation)
    count = jnp.zeros_like(offered)
    if proposals:
        logits, kept = jax.tree.map(lambda x: x[:, :-1], said)
        p = probability_of(drafts, logits, kept, settings)
        q = [probability_of(drafts[:, j], *proposal, settings) for j, proposal in enumerate(proposals)]
        p, q = all_reduce(jnp.stack([p, jnp.stack(q, axis=1)]), "vocab")
        u = [jax.vmap(jax.random.uniform)(keys(settings, positions + j, Use.ACCEPT)) for j in range(len(proposals))]
        count = _prefix(jnp.stack(u, axis=1) * q < p, offered)
    logits, kept = jax.tree.map(lambda x: jnp.take_along_axis(x, _beside(count, x.ndim), axis=1)[:, 0], said)
    weights = probabilities(logits, kept, settings)
    if proposals:
        # After the last offered draft the target speaks alone, as if q were 0.
        logits, kept = _select(count, proposals)
        q = probabilities(logits, kept, settings)
        rest = jnp.where((count < offered)[:, None], jnp.maximum(weights - q, 0.0), weights)
        weights = jnp.where(all_reduce(rest.sum(axis=-1, keepdims=True), "vocab") > 0, rest, weights)
    return count, draw(weights, keys(settings, positions + count, Use.TARGET), target.vocabulary)


def _select[T](which: Int[Array, " B"], trees: list[T]) -> T:
    """Of trees of arrays [B, ...] each sequence's own; the last one past the end."""

    def pick(*leaves: Array) -> Array:
        found = leaves[-1]
        for j, leaf in enumerate(leaves[:-1]):
            found = jnp.where(_beside(which == j, leaf.ndim), leaf, found)
        return found

    return jax.tree.map(pick, *trees)
