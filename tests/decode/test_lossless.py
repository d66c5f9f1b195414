"""Drafts change the speed and nothing else: tokens, counts, caches with every kind of drafter, against the oracle."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inkling_jax.cache import Cache, LayerCache, Ring
from inkling_jax.decode.loop import decode, pick
from inkling_jax.decode.state import FULL, RUNNING, STOPPED
from tests import reference
from tests.decode.tiny import CONFIG, DRAFTS, PAGE, engine, request
from tests.precision import relative_error

PROMPTS = (1, 2, 3, 9, PAGE, 30, 2 * PAGE + 1, 5)
NEW = (24, 24, 24, 4, 24, 24, 24, 23)  # the fourth finishes long before the others
OWN, RIGHT, WRONG = 0, 1, 2
CYCLE = 6  # rounds after which a pattern repeats
CHUNK = 32


def start(drafts: int, more: int = 0, **settings):
    """State after prefill, and settings, of all prompts in one batch."""
    prompts = [reference.random_tokens(CONFIG, length, seed) for seed, length in enumerate(PROMPTS)]
    requests = [request(tokens, new + more, **settings) for tokens, new in zip(prompts, NEW, strict=True)]
    steps = engine()
    state, settings = steps.start(requests, drafts)
    return steps.prefill(steps.leaves, state, jnp.int32(0), chunk=CHUNK, drafts=drafts), settings


def finish(drafts: int, more: int = 0):
    state, settings = start(drafts, more)
    steps = engine()
    return steps.decode(steps.leaves, state, settings, jnp.int32(10**6), drafts=drafts)


@cache
def truth() -> list[np.ndarray]:
    """Each prompt and what greedy decoding without drafts makes of it, a few tokens past its limit."""
    state = finish(0, more=DRAFTS + 1)
    return [np.asarray(row)[:length] for row, length in zip(state.tokens, np.asarray(state.length), strict=True)]


@cache
def oracle(b: int):
    """What every row of the backbone and of the depths is, in float64, for the true tokens of sequence b."""
    params = reference.random_params(CONFIG)
    return reference.forward(params, CONFIG, truth()[b]), reference.depths(params, CONFIG, truth()[b])


def test_without_drafts_every_token_is_the_oracles():
    for b, tokens in enumerate(truth()):
        logits = np.sort(oracle(b)[0]["logits"][PROMPTS[b] - 1 : -1], axis=1)
        assert (logits[:, -1] - logits[:, -2]).min() > 1e-3, "a near tie: the test needs another seed"
        best = oracle(b)[0]["logits"].argmax(axis=1)
        np.testing.assert_array_equal(tokens[PROMPTS[b] :], best[PROMPTS[b] - 1 : -1])


def ends() -> np.ndarray:
    return np.add(PROMPTS, NEW)


@pytest.mark.parametrize("drafts", range(1, DRAFTS))
def test_tokens_are_the_same_for_every_number_of_drafts(drafts):
    """The largest number follows below, with drafters of every kind."""
    check_tokens(finish(drafts))


def check_tokens(state):
    np.testing.assert_array_equal(state.length, ends())
    for b, end in enumerate(ends()):
        np.testing.assert_array_equal(state.tokens[b, :end], truth()[b][:end])


# ---------------------------------------------------------------------------------------------------- injected drafters


@cache
def injected():
    """One round in which `modes` [B, CYCLE, drafts] says of each draft if it is the depth's own, right or wrong."""

    @jax.jit
    def run(leaves, state, settings, tokens, modes):
        def choose(j, logits, state, settings):
            right = jnp.take_along_axis(tokens, (state.length + j)[:, None], axis=1)[:, 0]
            wrong = (right + 1 + j) % CONFIG.real_vocab_size
            mode = modes[jnp.arange(len(right)), state.rounds % CYCLE, j]
            token, kept = pick(j, logits, state, settings)
            return jnp.select([mode == RIGHT, mode == WRONG], [right, wrong], token), kept

        return decode(engine().model(leaves), state, settings, jnp.int32(1), DRAFTS, choose)

    tokens = np.zeros((len(PROMPTS), max(ends()) + DRAFTS + 1), np.int32)
    for row, own in zip(tokens, truth(), strict=True):
        row[: len(own)] = own
    return lambda state, settings, modes: run(engine().leaves, state, settings, jnp.asarray(tokens), modes)


def wrong_at(*places: int) -> np.ndarray:
    """[CYCLE, drafts]: in round r draft `places[r % n]` is wrong and all others are right; -1 for none, -2 for all."""
    modes = np.full((CYCLE, DRAFTS), RIGHT)
    for r in range(CYCLE):
        place = places[r % len(places)]
        if place != -1:
            modes[r, slice(None) if place == -2 else place] = WRONG
    return modes


RANDOM = np.random.default_rng(7).integers(RIGHT, WRONG + 1, (3, CYCLE, DRAFTS))
PATTERNS = [wrong_at(-1), wrong_at(-2), wrong_at(0), wrong_at(1), wrong_at(2), wrong_at(0, 1, 2, -1), *RANDOM]


def assign(shift: int) -> np.ndarray:
    """[B, CYCLE, drafts]: one pattern a sequence; all shifts together give every sequence every pattern."""
    return np.stack([PATTERNS[(b + shift) % len(PATTERNS)] for b in range(len(PROMPTS))])


def prefix(modes: np.ndarray) -> int:
    """Right drafts before the first wrong one."""
    return int(np.cumprod(modes == RIGHT).sum())


@pytest.mark.parametrize("shift", range(len(PATTERNS)))
def test_any_rejections_give_the_expected_counts_the_same_tokens_and_sound_caches(shift):
    """Every pattern on every prompt, and after each round the caches of a run from scratch."""
    modes = assign(shift)
    state, settings = start(DRAFTS)
    check_caches(state)
    for r in range(max(NEW)):
        before, state = state, injected()(state, settings, jnp.asarray(modes))
        for b, end in enumerate(ends()):
            length = int(before.length[b])
            count = prefix(modes[b, r % CYCLE]) if length > 1 else 0  # nothing drafts after a single token
            assert int(state.length[b]) == min(length + count + 1, end), (b, r)
        check_caches(state)
    assert (np.asarray(state.status) == FULL).all()
    check_tokens(state)


def test_own_drafts_give_the_same_tokens():
    state, settings = start(DRAFTS)
    own = jnp.asarray(np.full((len(PROMPTS), CYCLE, DRAFTS), OWN))
    while (np.asarray(state.status) == RUNNING).any():
        state = injected()(state, settings, own)
        check_caches(state)
    check_tokens(state)
    assert np.asarray(state.accepted).sum() > 0, "the depths never guessed right: rejections were all that was tested"


def test_flags_tell_where_each_token_came_from():
    """Round after round: two right drafts, then a wrong one at place 2, in whose favour the target's token stands."""
    state, settings = start(DRAFTS)
    modes = jnp.asarray(np.stack([wrong_at(2)] * len(PROMPTS)))
    for _ in range(max(NEW)):
        state = injected()(state, settings, modes)
    b = 5
    first, end = PROMPTS[b], ends()[b]
    np.testing.assert_array_equal(state.drafted[b, first:end], [1, 2, 0] * (NEW[b] // 3))
    refused = np.asarray(state.rejected[b, first:end])
    np.testing.assert_array_equal(refused[2::3], (truth()[b][first + 2 : end : 3] + 3) % CONFIG.real_vocab_size)
    assert (refused.reshape(-1, 3)[:, :2] == -1).all()
    np.testing.assert_array_equal(state.offered[b], [8, 8, 8])
    np.testing.assert_array_equal(state.accepted[b], [8, 8, 0])
    assert int(state.rounds[b]) == 8


@pytest.mark.parametrize("place", range(DRAFTS + 1))
def test_a_stop_id_ends_the_sequence_wherever_it_falls_in_a_round(place):
    """All drafts are right, so several tokens come at once; those behind the stop id must not be committed."""
    b, at = 5, PROMPTS[5] + place
    stop = int(truth()[b][at])
    assert stop not in truth()[b][PROMPTS[b] : at]
    state, settings = start(DRAFTS, stop_ids=(stop,))
    state = injected()(state, settings, jnp.asarray(np.stack([wrong_at(-1)] * len(PROMPTS))))
    assert int(state.length[b]) == at + 1
    assert int(state.status[b]) == STOPPED


# --------------------------------------------------------------------------------------------------------------- caches


WINDOW = DRAFTS + 1  # rows that a round runs through every depth
SPOILED = DRAFTS + 1  # rows before the frontier that a round may leave unwritten or wrong in a depth


def check_caches(state):
    """All that a later round can read: rows before its new ones, back to where the window and the taps reach.

    With c of K drafts accepted the frontier moves by c + 1, while depth d has seen true tokens up to d + 1 before the
    last accepted one at best: K + 1 rows are then due, and those before them must be right for good.
    """
    state = jax.tree.map(np.asarray, state)
    for b in range(len(PROMPTS)):
        backbone, depths = oracle(b)
        frontier = int(state.length[b]) - 1  # the first row that the next round runs through the target
        for layer, exact in zip(state.cache.layers, backbone["layers"], strict=True):
            check_layer(state.cache, layer, b, frontier, frontier, exact)
        for layer, exact in zip(state.cache.depths, depths, strict=True):
            check_layer(state.cache, layer, b, frontier - WINDOW, frontier - SPOILED, exact["layer"])
        check_ring(state.hidden, b, span(frontier - WINDOW, frontier), backbone["hidden"])


def span(first: int, end: int) -> np.ndarray:
    return np.arange(max(first, 0), max(end, 0))


def check_layer(cache: Cache, layer: LayerCache, b: int, start: int, end: int, exact: dict[str, np.ndarray]):
    """Rows before `end` that a step beginning at `start` or later can read."""
    at = span(0 if layer.kv.ring is None else start - CONFIG.window + 1, end)
    page = table(cache, layer)[b, at // PAGE]
    assert (page >= 0).all()
    for pool, rows in ((layer.kv.k, exact["k"]), (layer.kv.v, exact["v"])):
        check_rows(pool[page, :, at % PAGE], rows[at])
    for name in ("k_conv", "v_conv", "attn_conv", "mlp_conv"):
        check_ring(getattr(layer, name), b, span(start - CONFIG.conv_width + 1, end), exact[name])


def table(cache: Cache, layer: LayerCache) -> np.ndarray:
    return np.asarray(cache.global_pages if layer.kv.ring is None else cache.local_pages)


def check_ring(ring: Ring, b: int, at: np.ndarray, exact: np.ndarray):
    check_rows(ring.rows[b, at % ring.rows.shape[1]], exact[at])


def check_rows(found: np.ndarray, exact: np.ndarray):
    if exact.size:
        assert relative_error(found, exact) < 2e-5


def test_a_finished_sequence_is_left_alone():
    """Its pages, rings and tokens are to the bit what they were when it finished, however long the others run."""
    state, settings = start(DRAFTS)
    b, modes = 3, jnp.asarray(assign(1))
    kept = None
    for _ in range(max(NEW)):
        state = injected()(state, settings, modes)
        if int(state.status[b]) == FULL:
            kept = kept or own_rows(state, b)
            for name, rows in own_rows(state, b).items():
                np.testing.assert_array_equal(rows, kept[name], err_msg=name)
    assert kept is not None
    assert int(state.rounds[b]) < max(np.asarray(state.rounds)) - 2


def own_rows(state, b: int) -> dict[str, np.ndarray]:
    """Everything of sequence b by name: its pages of every layer, and its row of everything else."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if ".kv." in name:
            index = int(name.split("[")[1].split("]")[0])
            layer = (state.cache.layers if "layers" in name else state.cache.depths)[index]
            pages = np.unique(table(state.cache, layer)[b])
            found[name] = np.asarray(leaf)[pages[pages >= 0]]
        elif name != ".tokens":  # where a round keeps its drafts, past the length
            found[name] = np.asarray(leaf)[b]
    return found | {"tokens": np.asarray(state.tokens)[b, : int(state.length[b])]}


def test_a_stale_row_would_be_found():
    """The check itself: one value changed in one row that a later round reads makes it fail."""
    state, _ = start(DRAFTS)
    layer = state.cache.depths[1]
    page = int(table(state.cache, layer)[5, 2])
    kv = replace(layer.kv, v=layer.kv.v.at[page, 0, 0, 0].add(0.01))
    depths = (state.cache.depths[0], replace(layer, kv=kv), state.cache.depths[2])
    check_caches(state)
    with pytest.raises(AssertionError):
        check_caches(replace(state, cache=replace(state.cache, depths=depths)))
