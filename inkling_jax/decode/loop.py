"""Prefill and the decoding loop, as pure functions of the model and a donated state.

One round, with L tokens committed and the target's cache holding positions 0 .. L - 2:

1. draft: the depths propose K tokens for positions L .. L + K - 1. All K come from the depths' rows at position
   L - 2, each depth joining the previous one's output with the token that came out before it.
2. verify: the target runs over the last committed token and the K drafts, K + 1 rows.
3. accept a prefix of the drafts and one more token from the target; stop at an end token or at the limit.

Depth d's row i is computed from the token at i + d + 1. A round that accepted c drafts moved the frontier by c + 1;
every row before the old frontier whose token was accepted is right as it stands, and the rejected ones lie at most
d rows before the new frontier. So the K + 1 rows before the frontier are all that can be missing or spoiled, for
every depth, and each round every depth runs over just these.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..cache import Cache, Rows
from ..collectives import all_gather
from ..nn import InklingModel
from .sampling import Kept, Logits, Use, accept, keys, sample
from .state import FULL, NOT_FINITE, RUNNING, STOPPED, DecodeState, Settings

Choose = Callable[[int, Logits, DecodeState, Settings], tuple[Int[Array, " B"], Kept]]


def prefill(model: InklingModel, state: DecodeState, start: Int[Array, ""], chunk: int, drafts: int) -> DecodeState:
    """Runs positions start .. start + chunk - 1 of every prompt through the target and the drafting depths.

    The last token of a prompt is left to the first round, whose window also completes the depths' last rows.
    """
    end = state.length - 1
    outputs, cache = _chunk(model, state.cache, state.tokens, end, end, start, chunk, drafts)
    hidden = state.hidden.write(outputs[0], _rows(cache, end, start, chunk))
    return dataclasses.replace(state, cache=cache, hidden=hidden)


def teacher_forced(
    model: InklingModel,
    cache: Cache,
    tokens: Int[Array, "B capacity"],
    length: Int[Array, " B"],
    start: Int[Array, ""],
    chunk: int,
    depth: int | None,
) -> tuple[Float[Array, "B chunk V"], Cache]:
    """Logits of rows start .. start + chunk - 1 of given tokens: the backbone's, or those of one depth.

    The one step that puts the logits of a mesh together, for who asks to see them.
    """
    depths = 0 if depth is None else depth + 1
    outputs, cache = _chunk(model, cache, tokens, length, length - 1, start, chunk, depths)
    return all_gather(model.logits(outputs[-1], cache.implementation), "vocab")[..., : model.unembed.real], cache


def _chunk(
    model: InklingModel,
    cache: Cache,
    tokens: Int[Array, "B capacity"],
    end: Int[Array, " B"],
    depth_end: Int[Array, " B"],
    start: Int[Array, ""],
    chunk: int,
    depths: int,
) -> tuple[list[Float[Array, "B chunk H"]], Cache]:
    """Hidden rows of the target before position `end`, then of each depth d before `depth_end - d`."""
    first = jnp.full_like(end, start)
    rows = _rows(cache, end, start, chunk)
    h, filled = model.hidden(_tokens(tokens, first, chunk), rows, cache)
    outputs = [h]
    for d in range(depths):
        later = _tokens(tokens, first + d + 1, chunk)
        h, filled = model.depth(d, h, later, _rows(cache, depth_end - d, start, chunk), filled)
        outputs.append(h)
    return outputs, _some(filled)


def _rows(cache: Cache, end: Int[Array, " B"], start: Int[Array, ""], chunk: int) -> Rows:
    """The rows of a chunk that lie before `end`."""
    return cache.rows(jnp.full_like(end, start), jnp.clip(end - start, 0, chunk))


def decode(
    model: InklingModel,
    state: DecodeState,
    settings: Settings,
    rounds: Int[Array, ""],
    drafts: int,
    choose: Choose | None = None,
) -> DecodeState:
    """Runs up to `rounds` rounds, fewer when all have finished. `choose` replaces how a depth picks its draft."""

    def unfinished(carry: tuple[Int[Array, ""], DecodeState]):
        done, state = carry
        return (done < rounds) & jnp.any(state.status == RUNNING)

    def step(carry: tuple[Int[Array, ""], DecodeState]):
        done, state = carry
        return done + 1, one_round(model, state, settings, drafts, choose or pick)

    return lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), state))[1]


def one_round(model: InklingModel, state: DecodeState, settings: Settings, drafts: int, choose: Choose) -> DecodeState:
    """Draft, verify, accept, commit."""
    state, proposals, offered = propose(model, state, settings, drafts, choose)
    proposed = _tokens(state.tokens, state.length, drafts)
    state, target = verify(model, state, drafts)
    count, bonus = accept(proposed, proposals, target, offered, state.length, settings, state.cache.implementation)
    # A sum or a maximum over NaN is NaN; only rows that are about to be committed matter.
    finite = jnp.isfinite(target.top) | (jnp.arange(drafts + 1) > count[:, None])
    return commit(state, settings, proposed, count, bonus, offered, finite.all(axis=1))


def pick(j: int, logits: Logits, state: DecodeState, settings: Settings) -> tuple[Int[Array, " B"], Kept]:
    """Draft j as its depth would have it, greedy or sampled with the sequence's settings, and what it is drawn from."""
    return sample(logits, settings, keys(settings, state.length + j, Use.DRAFT), state.cache.implementation)


def propose(
    model: InklingModel, state: DecodeState, settings: Settings, drafts: int, choose: Choose
) -> tuple[DecodeState, list[tuple[Logits, Kept]], Int[Array, " B"]]:
    """The depths' drafts, written behind the committed tokens; what they are of; and how many of them may be verified.

    A sequence of one token has no hidden row to draft from. A depth whose logits are not finite ends the offer.
    """
    window = drafts + 1
    running = state.status == RUNNING
    start = jnp.maximum(state.length - 1 - window, 0)
    rows = state.cache.rows(start, jnp.where(running, jnp.minimum(state.length - 1, window), 0))
    last = jnp.maximum(rows.count - 1, 0)
    offered = jnp.where(rows.count > 0, drafts, 0)
    h, cache, proposals = state.hidden.read(start, window), state.cache, []
    for d in range(drafts):
        h, cache = model.depth(d, h, _tokens(state.tokens, start + d + 1, window), rows, cache)
        row = jnp.take_along_axis(h, last[:, None, None], axis=1)
        logits = Logits.of(model.logits(row, rows.implementation)[:, 0], model.unembed.real)
        token, kept = choose(d, logits, state, settings)
        proposals.append((logits, kept))
        offered = jnp.where(jnp.isfinite(logits.top), offered, jnp.minimum(offered, d))
        state = dataclasses.replace(state, tokens=_put(state.tokens, state.length + d, token))
    return dataclasses.replace(state, cache=_some(cache)), proposals, offered


def verify(model: InklingModel, state: DecodeState, drafts: int) -> tuple[DecodeState, Logits]:
    """The target over the last committed token and the drafts: row j gives the logits for position length + j."""
    rows = state.cache.rows(state.length - 1, jnp.where(state.status == RUNNING, drafts + 1, 0))
    # Plain JAX takes at least two rows: the CPU multiplies a single one in another order, and rounds it otherwise.
    least = 2 if rows.implementation == "xla" else 1
    tokens = _tokens(state.tokens, state.length - 1, max(drafts + 1, least))
    h, cache = model.hidden(tokens, rows, state.cache)
    state = dataclasses.replace(state, cache=_some(cache), hidden=state.hidden.write(h, rows))
    return state, Logits.of(model.logits(h, rows.implementation)[:, : drafts + 1], model.unembed.real)


def commit(
    state: DecodeState,
    settings: Settings,
    proposed: Int[Array, "B drafts"],
    count: Int[Array, " B"],
    bonus: Int[Array, " B"],
    offered: Int[Array, " B"],
    finite: Bool[Array, " B"],
) -> DecodeState:
    """The one place where tokens become final: `count` drafts and the bonus, cut at an end token and at the limit."""
    drafts = proposed.shape[1]
    step = jnp.arange(drafts + 1)
    running = state.status == RUNNING
    new = jnp.where(step == count[:, None], bonus[:, None], jnp.pad(proposed, ((0, 0), (0, 1))))
    room = jnp.minimum(count + 1, state.limit - state.length)
    ends = (new[:, :, None] == settings.stop_ids[:, None, :]).any(axis=-1) & (step < room[:, None])
    stopped = ends.any(axis=1)
    added = jnp.where(stopped, jnp.argmax(ends, axis=1) + 1, room)
    added = jnp.where(running & finite, added, 0)
    length = state.length + added

    at = state.length[:, None] + step
    at = jnp.where(step < added[:, None], at, state.tokens.shape[1])
    turned_down = (step == count[:, None]) & (count < offered)[:, None]
    refused = jnp.where(turned_down, jnp.pad(proposed, ((0, 0), (0, 1))), -1)
    status = jnp.where(stopped, STOPPED, jnp.where(length >= state.limit, FULL, RUNNING))
    status = jnp.where(finite, status, NOT_FINITE)
    place = jnp.arange(state.offered.shape[1])
    tried = running[:, None] & (place < offered[:, None])
    return dataclasses.replace(
        state,
        tokens=_scatter(state.tokens, at, new),
        drafted=_scatter(state.drafted, at, jnp.where(step < count[:, None], step + 1, 0)),
        rejected=_scatter(state.rejected, at, refused),
        length=length,
        status=jnp.where(running, status, state.status),
        rounds=state.rounds + running.astype(jnp.int32),
        offered=state.offered + tried.astype(jnp.int32),
        accepted=state.accepted + (tried & (place < count[:, None])).astype(jnp.int32),
    )


def _tokens(tokens: Int[Array, "B capacity"], first: Int[Array, " B"], count: int) -> Int[Array, "B count"]:
    """Tokens at positions first .. first + count - 1; past the end (padding rows only) the last one."""
    at = first[:, None] + jnp.arange(count)
    return jnp.take_along_axis(tokens, jnp.clip(at, 0, tokens.shape[1] - 1), axis=1)


def _put(tokens: Int[Array, "B capacity"], at: Int[Array, " B"], token: Int[Array, " B"]) -> Int[Array, "B capacity"]:
    return _scatter(tokens, at[:, None], token[:, None])


def _scatter(
    target: Int[Array, "B capacity"], at: Int[Array, "B n"], values: Int[Array, "B n"]
) -> Int[Array, "B capacity"]:
    """Writes along the second axis; places at or past the end are dropped."""
    return target.at[jnp.arange(target.shape[0])[:, None], at].set(values.astype(target.dtype), mode="drop")


def _some[X](value: X | None) -> X:
    assert value is not None
    return value
