"""Sampling: the processed distribution against float64, and drafts that leave the target's distribution as it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from inkling_jax.decode.engine import Engine
from inkling_jax.decode.sampling import Logits, Use, accept, draw, keep, keys, probabilities, probability_of, sample
from inkling_jax.decode.state import Settings
from tests import reference
from tests.decode.tiny import request

SEEDS = 20_000
SURE = 1e-4  # a right sampler fails one fixed set of seeds this rarely; wrong ones miss it by far


def settings(batch: int, temperature=1.0, top_k=10**6, top_p=1.0, seed=0) -> Settings:
    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value), batch).astype(dtype))

    return Settings(
        temperature=column(temperature, np.float32),
        top_k=column(top_k, np.int32),
        top_p=column(top_p, np.float32),
        seed=column(seed, np.uint32),
        stop_ids=jnp.full((batch, 1), -1),
    )


# --------------------------------------------------------------------------------------------------------- distribution


def distribution(logits: jax.Array, options: Settings, implementation: str = "xla") -> jax.Array:
    """The probabilities that tokens are drawn with."""
    made = Logits.of(logits)
    return probabilities(made, keep(made, options, implementation), options)


def exact_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """One row, token by token in order of likelihood."""
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    shifted = np.asarray(logits, np.float64) - logits.max()
    weights = np.exp(shifted / temperature)
    order = np.argsort(-shifted, kind="stable")[:top_k]
    total, kept, mass = weights[order].sum(), [], 0.0
    for token in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    found = np.zeros(len(logits))
    found[kept] = weights[kept] / weights[kept].sum()
    return found


VOCABULARY = 50
CASES = [
    *((temperature, VOCABULARY, 1.0) for temperature in (0.0, 1e-45, 1.2e-38, 1e-30, 1e-3, 0.7, 1.0, 5.0, 1e30)),
    *((0.8, top_k, 1.0) for top_k in (1, 2, 17, VOCABULARY - 1, VOCABULARY)),
    *((1.2, VOCABULARY, top_p) for top_p in (1e-45, 1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0)),
    *((1.5, top_k, top_p) for top_k, top_p in ((1, 0.5), (5, 0.5), (5, 0.99), (40, 0.3), (3, 1e-9))),
    (0.0, 3, 0.2),
]


@pytest.mark.parametrize(("implementation", "scale"), [("xla", 1.0), ("xla", 30.0), ("interpret", 3.0)])
def test_distribution_agrees_with_float64(implementation, scale):
    logits = (scale * np.random.default_rng(0).standard_normal((len(CASES), VOCABULARY))).astype(np.float32)
    run = jax.jit(distribution, static_argnames="implementation")
    found = run(jnp.asarray(logits), settings(len(CASES), *np.array(CASES).T), implementation)
    for row, own, case in zip(found, logits, CASES, strict=True):
        exact = exact_distribution(own, *case)
        assert (row[exact > 1e-30] > 0).all(), case
        assert (row[exact == 0] == 0).all(), case
        np.testing.assert_allclose(row, exact, atol=1e-6, err_msg=str(case))


TEMPERATURES = [0.65, 0.85, 1.1, 1.3, *np.random.default_rng(3).uniform(0.2, 4, 28)]
"""Of the first four, a division by them rounds otherwise where it is compiled as a product."""


@pytest.mark.parametrize("top_k", [2, 5])
def test_what_is_drawn_from_is_what_is_accepted_by(top_k):
    """The least token kept has the same probability alone as in its row, to the bit whether it is kept."""
    rows = 40 * len(TEMPERATURES)
    values = jnp.asarray(np.random.default_rng(4).standard_normal((rows, 20)), jnp.float32)
    options = settings(rows, np.repeat(TEMPERATURES, 40), top_k)

    @jax.jit
    def both(values, options, token):
        logits = Logits.of(values)
        kept = keep(logits, options)
        return probabilities(logits, kept, options), probability_of(token, logits, kept, options)

    for place in range(top_k + 1):
        token = jnp.argsort(-values, axis=1)[:, place].astype(jnp.int32)
        row, alone = both(values, options, token)
        np.testing.assert_allclose(alone, np.asarray(row)[np.arange(rows), token], rtol=1e-5)
        assert ((np.asarray(alone) > 0) == (place < top_k)).all()


@pytest.mark.parametrize("temperature", [0.65, 0.85, 1.1, 1.3])
def test_drafts_of_the_least_token_kept_stand(temperature):
    logits = np.array([2, 2 - 0.44 * temperature, 0.3, -1, -2.5], np.float32)
    exact = exact_distribution(logits, temperature, 2, 1.0)
    values = jnp.broadcast_to(jnp.asarray(logits), (SEEDS, 5))
    options = settings(SEEDS, temperature, 2, seed=np.arange(SEEDS))

    @jax.jit
    def speculate(values, options):
        position = jnp.full(SEEDS, 11, jnp.int32)
        draft, kept = sample(Logits.of(values), options, keys(options, position, Use.DRAFT))
        target = Logits.of(jnp.stack([values, values], axis=1))
        offered = jnp.ones(SEEDS, jnp.int32)
        return draft, *accept(draft[:, None], [(Logits.of(values), kept)], target, offered, position, options)

    draft, count, _ = map(np.asarray, speculate(values, options))
    assert (count == 1).all()
    assert chance(draft, exact) > SURE


def test_no_restriction_keeps_every_token():
    """top_p = 1 keeps the whole tail, although its cumulative sum rounds to 1 long before the end."""
    logits = jnp.asarray(np.linspace(0, -80, 400, dtype=np.float32))[None]
    for top_k in (10**6, 399):
        found = distribution(logits, settings(1, top_k=top_k))
        assert int((found > 0).sum()) == min(top_k, 400)


def test_likeliest_token_survives_any_restriction():
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((1, 9)), jnp.float32)
    found = distribution(logits, settings(1, 1.0, 1, 1e-30))
    np.testing.assert_array_equal(found, jax.nn.one_hot(logits.argmax(axis=1), 9))


def test_impossible_tokens_are_never_drawn():
    batch = 2000
    weights = jnp.asarray(np.tile([0.0, 0.5, 0.0, 0.25, 0.0], (batch, 1)), jnp.float32)  # need not sum to 1
    found = draw(weights, keys(settings(batch, seed=np.arange(batch)), jnp.zeros(batch, jnp.int32), Use.TARGET))
    counts = np.bincount(np.asarray(found), minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert chance(np.asarray(found), np.array([0, 2, 0, 1, 0]) / 3) > SURE


def test_random_numbers_differ_by_seed_position_and_use():
    made = [
        jax.random.key_data(keys(settings(3, seed=[1, 2, 3]), jnp.asarray([p, p, p]), use))
        for p in (0, 1)
        for use in Use
    ]
    found = np.concatenate(made)
    assert len(np.unique(found, axis=0)) == len(found) == 18


# ----------------------------------------------------------------------------------------------------------- acceptance


def chance(tokens: np.ndarray, exact: np.ndarray) -> float:
    """How likely tokens that follow `exact` stray this far from it (chi-square). Rare ones are counted together."""
    counts, expected = np.bincount(tokens, minlength=len(exact)), exact / exact.sum() * len(tokens)
    assert counts[exact == 0].sum() == 0, "an impossible token"
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = expected > 0
    return stats.chisquare(counts[seen], expected[seen]).pvalue if seen.sum() > 1 else 1.0


P = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
SECOND_P = np.random.default_rng(2).dirichlet(np.ones(5), 5)  # [first token, second token]
THIRD_P = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
PROPOSALS = {
    "equal": P,
    "close": np.array([0.35, 0.3, 0.2, 0.1, 0.05]),
    "reversed": P[::-1],
    "sure": np.array([0, 0, 0, 0, 1.0]),
    "overlapping": np.array([0, 0.5, 0, 0.5, 0]),
    "flat": np.full(5, 0.2),
}


def log(p) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.maximum(np.log(p), -1e4), jnp.float32)


def batch_of(p: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(log(p), (SEEDS, len(p)))


@jax.jit
def speculate(p, second_p, third_p, q, second_q, options: Settings):
    """Two drafts from q and second_q[first draft], and what `accept` makes of them; and the drafts themselves."""
    position = jnp.full(SEEDS, 11, jnp.int32)
    proposals = [Logits.of(q)]
    first, kept = sample(proposals[0], options, keys(options, position, Use.DRAFT))
    proposals.append(Logits.of(second_q[first]))
    second, kept_second = sample(proposals[1], options, keys(options, position + 1, Use.DRAFT))
    drafts = jnp.stack([first, second], axis=1)
    target = jnp.stack([p, second_p[first], third_p], axis=1)
    offered = jnp.full(SEEDS, 2, jnp.int32)
    drawn_from = list(zip(proposals, [kept, kept_second], strict=True))
    return drafts, *accept(drafts, drawn_from, Logits.of(target), offered, position, options)


def run(p, q, second_q, temperature=1.0):
    options = settings(SEEDS, temperature, seed=np.arange(SEEDS))
    found = speculate(batch_of(p), log(SECOND_P), batch_of(THIRD_P), batch_of(q), log(second_q), options)
    drafts, count, bonus = map(np.asarray, found)
    committed = np.concatenate([drafts, np.zeros((SEEDS, 1), int)], axis=1)
    committed[np.arange(SEEDS), count] = bonus
    return drafts, count, committed


@pytest.mark.parametrize("name", PROPOSALS)
def test_accepted_tokens_follow_the_target_whatever_the_drafts_follow(name):
    q = PROPOSALS[name]
    _, count, committed = run(P, q, np.roll(SECOND_P, 1, axis=0))
    assert chance(committed[:, 0], P) > SURE
    np.testing.assert_allclose((count > 0).mean(), np.minimum(P, q).sum(), atol=0.02)  # the best any rule can do
    check_second(count, committed)
    full = count == 2
    assert chance(committed[full, 2], THIRD_P) > SURE


def check_second(count: np.ndarray, committed: np.ndarray):
    """Wherever the first draft stood, the second token follows the target given the first."""
    for first in range(5):
        mine = (count > 0) & (committed[:, 0] == first)
        if mine.sum() > 100:
            assert chance(committed[mine, 1], SECOND_P[first]) > SURE, first


def test_disjoint_drafts_are_always_turned_down():
    p, q = np.array([0.5, 0.3, 0.2, 0, 0]), np.array([0, 0, 0, 0.9, 0.1])
    _, count, committed = run(p, q, SECOND_P)
    assert (count == 0).all()
    assert chance(committed[:, 0], p) > SURE


def test_equal_drafts_are_always_accepted():
    _, count, committed = run(P, P, SECOND_P)
    assert (count == 2).all()
    check_second(count, committed)


def test_greedy_rows_in_a_sampled_batch_take_the_likeliest():
    """Every other row is greedy. Its drafts are q's favourite: the target's too at first, never at second."""
    temperature = np.arange(SEEDS) % 2
    second_q = np.roll(SECOND_P, 1, axis=1)
    _, count, committed = run(P, PROPOSALS["close"], second_q, temperature)
    greedy = temperature == 0
    assert (count[greedy] == 1).all()
    assert (committed[greedy, :2] == [P.argmax(), SECOND_P[P.argmax()].argmax()]).all()
    assert chance(committed[~greedy, 0], P) > SURE
    check_second(count[~greedy], committed[~greedy])


@pytest.mark.parametrize("offered", [0, 1, 2])
def test_drafts_that_were_not_offered_do_not_count(offered):
    """The place behind the last offered draft is the target's alone, although a draft and its q are there."""
    drafts = jnp.zeros((SEEDS, 2), jnp.int32)
    options = settings(SEEDS, seed=np.arange(SEEDS))
    target, q = jnp.stack([batch_of(np.eye(5)[0]), batch_of(P), batch_of(P)], axis=1), batch_of(np.eye(5)[0])
    offers, position = jnp.full(SEEDS, offered), jnp.full(SEEDS, 3)
    proposal = Logits.of(q), keep(Logits.of(q), options)
    count, bonus = accept(drafts, [proposal] * 2, Logits.of(target), offers, position, options)
    assert int(count.max()) == offered
    if offered == 0:
        assert (np.asarray(bonus) == 0).all()
    else:
        last = np.asarray(count) == offered
        assert chance(np.asarray(bonus)[last], P) > SURE


def test_wrong_rules_are_found_out():
    """What the checks above would say of rules that are nearly right."""
    q = PROPOSALS["close"]
    drafts, count, _ = run(P, q, SECOND_P)
    assert chance(drafts[:, 0], P) < 1e-10  # accept always
    rng = np.random.default_rng(0)
    anew = np.where(count > 0, drafts[:, 0], rng.choice(5, SEEDS, p=P))  # after a rejection draw from p, not from p - q
    assert chance(anew, P) < 1e-10
    assert chance(np.where(rng.random(SEEDS) < P[drafts[:, 0]], drafts[:, 0], anew), P) < 1e-10  # with p, not p / q


# ----------------------------------------------------------------------------------------------------------- end to end

SMALL = replace(
    reference.BASE,
    hidden_size=16,
    num_layers=1,
    local_layers=(),
    dense_layers=(0,),
    mtp_depths=2,
    mtp_local=(0,),
    vocab_size=8,
    real_vocab_size=7,
    eos_token_ids=(),
)
PROMPT = [3, 1, 4, 1, 5]
OPTIONS = dict(temperature=1.3, top_k=6, top_p=0.97)
BATCH, CALLS = 256, 12


@pytest.fixture(scope="module")
def small():
    params = {path: jnp.asarray(p) for path, p in reference.random_params(SMALL, seed=5).items()}
    return Engine(SMALL, params, "float32")


def exact_pairs() -> np.ndarray:
    """[first token, second token]: their probability after the prompt."""
    params, vocabulary = reference.random_params(SMALL, seed=5), SMALL.real_vocab_size

    def following(tokens):
        return exact_distribution(reference.forward(params, SMALL, tokens)["logits"][-1], *OPTIONS.values())

    return following(PROMPT)[:, None] * np.stack([following([*PROMPT, first]) for first in range(vocabulary)])


def sampled_pairs(engine: Engine, drafts: int):
    """The first two tokens, as one number, for many seeds; the rounds they took."""
    found, rounds = [], 0
    for call in range(CALLS):
        seeds = range(call * BATCH, (call + 1) * BATCH)
        state, options = engine.start([request(PROMPT, 2, seed=seed, **OPTIONS) for seed in seeds], drafts)
        state = engine.prefill(engine.leaves, state, jnp.int32(0), chunk=16, drafts=drafts)
        state = engine.decode(engine.leaves, state, options, jnp.int32(9), drafts=drafts)
        tokens = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + 2]
        found.append(tokens[:, 0] * SMALL.real_vocab_size + tokens[:, 1])
        rounds += int(np.asarray(state.rounds).sum())
    return np.concatenate(found), rounds


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_model_samples_from_its_distribution_with_and_without_drafts(small, drafts):
    pairs, rounds = sampled_pairs(small, drafts)
    if drafts:  # some drafts stood and some fell
        assert len(pairs) * 1.1 < rounds < len(pairs) * 1.9
    else:
        assert rounds == 2 * len(pairs)
    exact = exact_pairs().ravel()
    assert (exact > 0).sum() > 20
    assert chance(pairs, exact) > SURE
