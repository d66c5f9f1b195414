"""`inkling_jax.bench` on a tiny model: what it runs, what it reports, what it refuses. Its times are for people."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import inkling_jax
from inkling_jax.benchmark import measure, run
from inkling_jax.benchmark.routing import experts_hit
from inkling_jax.benchmark.traffic import decode_bytes, prefill_bytes
from inkling_jax.benchmark.weights import random_parameters
from inkling_jax.cache import CacheShape, make_cache
from inkling_jax.compilation import announce
from inkling_jax.config import ConfigError
from inkling_jax.decode.engine import Engine
from inkling_jax.decode.state import RUNNING
from inkling_jax.nn import abstract_parameters
from inkling_jax.planning import held
from inkling_jax.sharding import make_mesh
from tests import reference

CONFIG = replace(reference.BASE, num_layers=1, local_layers=(), dense_layers=(), mtp_depths=1, mtp_local=(0,))
RATE = 1e9
EFFORT = measure.Effort(rounds=3, windows=2, seed=0, profile=None)


@pytest.fixture(autouse=True)
def known_rate(monkeypatch):
    monkeypatch.setattr(run, "copy_rate", lambda *_: RATE)
    monkeypatch.setattr(run, "enable_cache", lambda: None)


def engine_on(mesh: Mesh | None) -> Engine:
    """A router that knows four of the eight experts: a bias outweighs the scores of the others."""
    bias = jnp.zeros(8, jnp.float32).at[jnp.array([1, 4, 5, 6])].set(9)
    with jax.numpy_dtype_promotion("strict"):  # as in every test: what is compiled here is theirs too
        params = random_parameters(CONFIG, "float32", 0, None, mesh) | {"layers.0.mlp.router.bias": bias}
    return Engine(CONFIG, params, "float32", mesh=mesh)


@pytest.fixture(scope="module")
def engine():
    return engine_on(None)


@pytest.fixture(scope="module")
def decoded(engine):
    """Three sequences with a draft, and how often the rounds of every call were asked for."""
    asked, own = [], engine.decode
    engine.decode = lambda *a, **k: (asked.append(int(a[3])), own(*a, **k))[1]
    with jax.numpy_dtype_promotion("strict"):
        row = measure.decode(engine, RATE, EFFORT, measure.Hits(True, {}), sequences=3, context=40, drafts=1)
    engine.decode = own
    return row, asked


def test_a_window_is_one_call_of_many_rounds(decoded):
    row, asked = decoded
    assert asked == [2, 3, 3]  # the first call compiles, two windows
    assert len(row["ms_windows"]) == 2 and row["ms"] == pytest.approx(np.median(row["ms_windows"]))
    assert 1 <= row["tokens_per_round"] <= 2
    assert row["tokens_per_second"] == pytest.approx(3 * row["tokens_per_round"] / row["ms"] * 1e3)
    assert row["compile_seconds"] > 0


def test_no_window_compiles(engine, decoded):
    state, settings = measure.occupied(engine, EFFORT, sequences=3, context=40, drafts=1)
    reset = measure._resetting(engine, state)
    state = measure.run_rounds(engine, state, settings, 2, 1)
    with announce("the windows") as watch:
        for _ in range(2):
            state = measure.run_rounds(engine, reset(state), settings, 3, 1)
    assert watch.seconds == 0
    assert (np.asarray(state.rounds)[:3] == 8).all()


def test_the_share_is_of_the_bytes_at_the_copy_rate(decoded):
    row, _ = decoded
    length = 40 + (3 * row["tokens_per_round"] - 1) / 2
    expected = decode_bytes(CONFIG, "float32", 3, length, 1, row["routing"]["hit_by_layer"])
    assert row["bytes"] == pytest.approx(expected)
    assert row["limit_ms"] == pytest.approx(1e3 * sum(expected.values()) / RATE)
    assert row["share"] == pytest.approx(row["limit_ms"] / row["ms"])


def test_the_cache_is_counted_as_it_is_allocated(decoded):
    """Four sequences, one of them padding, of 40 + 4 * 2 + 2 rows: a page each, in tables of the least width."""
    shape = CacheShape(batch=4, pages=16, width=16, drafts=1)
    cache = jax.eval_shape(lambda: make_cache(CONFIG, shape, jnp.float32))
    assert decoded[0]["memory"]["cache_bytes"] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def test_what_does_not_fit_is_refused_before_anything_is_drawn(monkeypatch):
    monkeypatch.setattr(run, "random_parameters", lambda *_: pytest.fail("drawn"))
    engine = Engine(CONFIG, abstract_parameters(CONFIG, "float32"), "float32")
    cache = measure.cache_bytes(engine, replace(EFFORT, rounds=32), 8, 400, 0)
    free = sum(held(CONFIG, dtype="float32").values()) + cache - 1  # short of the smaller of the two rows
    monkeypatch.setattr("inkling_jax.memory.free_bytes", lambda device: free)
    with pytest.raises(MemoryError, match="GiB and the cache 0.0. GiB on each device"):
        inkling_jax.bench(CONFIG, rows=[(32, 400, 0), (8, 400, 0)], parts=["decode"], dtype="float32")


def test_experts_that_are_hit_are_counted(decoded):
    """Six rows choose three of four experts each, the rows of the padding sequence none."""
    found = decoded[0]["routing"]
    assert found["measured"] and found["rows"] == 6 and found["experts"] == 8
    assert found["hit_by_layer"] == [found["hit"]]  # a depth has no experts
    assert 3 < found["hit"] <= 4 and found["hit_if_uniform"] == pytest.approx(8 * (1 - (5 / 8) ** 6))


@pytest.mark.slow
def test_on_a_mesh_the_busiest_device_counts():
    """Two sequences on each of two groups, half of the experts on each of two devices: three of the four are there."""
    steps = engine_on(make_mesh({"data": 2, "expert": 2}))
    row = measure.decode(steps, RATE, EFFORT, measure.Hits(True, {}), sequences=3, context=40, drafts=1)
    found = row["routing"]
    assert (found["rows"], found["experts"]) == (4, 4) and 2 < found["hit"] <= 3
    assert found["hit_if_uniform"] == pytest.approx(4 * (1 - (5 / 8) ** 4))
    length = 40 + (3 * row["tokens_per_round"] - 1) / 2
    mesh = {"data": 2, "expert": 2}
    assert row["bytes"] == pytest.approx(decode_bytes(CONFIG, "float32", 3, length, 1, found["hit_by_layer"], mesh))


def test_distinct_experts_of_the_valid_rows():
    ids = jnp.array([[0, 1], [1, 2], [5, 6]], jnp.int32)
    assert int(experts_hit(ids, jnp.array([True, True, True]), 8)) == 5
    assert int(experts_hit(ids, jnp.array([True, True, False]), 8)) == 3
    assert int(experts_hit(ids, jnp.zeros(3, bool), 8)) == 0
    assert int(experts_hit(ids - 4, jnp.ones(3, bool), 2)) == 1  # those of a device that holds the experts 4 and 5


def test_sequences_stand_in_the_middle_of_random_rows(engine):
    state, settings = measure.occupied(engine, EFFORT, sequences=3, context=70, drafts=1)
    assert state.length.tolist() == [70, 70, 70, 1] and state.limit.tolist()[:3] == [78] * 3
    assert (np.asarray(state.status)[:3] == RUNNING).all() and (np.asarray(settings.stop_ids) == -1).all()
    tokens = np.asarray(state.tokens)[:3, :70]
    assert len(np.unique(tokens)) > 40 and tokens.max() < CONFIG.real_vocab_size
    leaves = jax.tree.leaves((state.cache.layers, state.cache.depths, state.hidden))
    assert all(float(jnp.std(leaf)) == pytest.approx(1, abs=0.15) for leaf in leaves)
    assert (np.asarray(state.cache.global_pages)[:3, :2] >= 0).all()  # 80 rows lie in two pages


def test_tokens_are_sampled_where_that_is_asked_for(engine):
    sampled = replace(EFFORT, temperature=0.7, top_k=5, top_p=0.9)
    _, settings = measure.occupied(engine, sampled, sequences=2, context=40, drafts=1)
    assert np.allclose(settings.temperature[:2], 0.7) and np.allclose(settings.top_p[:2], 0.9)
    assert (np.asarray(settings.top_k)[:2] == 5).all()
    row = measure.decode(engine, RATE, sampled, measure.Hits(False, {}), sequences=2, context=40, drafts=1)
    assert row["ms"] > 0 and 1 <= row["tokens_per_round"] <= 2
    _, settings = measure.occupied(engine, EFFORT, sequences=2, context=40, drafts=1)
    assert (np.asarray(settings.temperature) == 0).all()


def test_a_prompt_and_its_first_token(engine):
    row = measure.prefill(engine, RATE, EFFORT, tokens=40, drafts=0)
    assert row["chunks"] == [32, 32] and row["tokens_per_second"] == pytest.approx(40 / row["ms"] * 1e3)
    assert row["bytes"] == pytest.approx(prefill_bytes(CONFIG, "float32", 40, [32, 32], 0))
    first = measure.first_token(engine, RATE, EFFORT, tokens=41, drafts=0)
    both = {k: v + decode_bytes(CONFIG, "float32", 1, 41, 0, [3])[k] for k, v in row["bytes"].items()}
    assert first["bytes"] == pytest.approx(both)
    assert len(first["ms_windows"]) == 2 and first["ms"] > 0


def test_logits_that_are_not_finite_are_no_figure(engine, decoded, monkeypatch):
    monkeypatch.setattr(engine, "leaves", [jnp.full_like(x, jnp.nan) if x.ndim == 1 else x for x in engine.leaves])
    with pytest.raises(FloatingPointError, match="not finite"):
        measure.decode(engine, RATE, EFFORT, measure.Hits(False, {}), sequences=3, context=40, drafts=1)


def test_a_routing_that_cannot_be_measured_costs_no_figure(engine, decoded, monkeypatch):
    monkeypatch.setattr(measure, "routing", lambda *_: 1 / 0)
    row = measure.decode(engine, RATE, EFFORT, measure.Hits(True, {}), sequences=3, context=40, drafts=1)
    assert row["compile_seconds"] == 0 and row["ms"] > 0
    assert not row["routing"]["measured"] and row["routing"]["hit"] == row["routing"]["hit_if_uniform"]
    assert "ZeroDivisionError" in row["warning"]


# ------------------------------------------------------------------------------------------------------ the whole of it


@pytest.fixture
def told(monkeypatch):
    """Measurements that only say what they were asked for; with 2 drafts they fail."""

    def decode(engine, rate, effort, hits, sequences, context, drafts):
        if sequences == 13:
            raise MemoryError("too many")
        return {"asked": (sequences, context, drafts), "effort": effort, "hits": hits}

    monkeypatch.setattr(measure, "decode", decode)
    monkeypatch.setattr(measure, "prefill", lambda e, r, f, tokens, drafts: {"asked": (tokens, drafts)})
    monkeypatch.setattr(measure, "first_token", lambda e, r, f, tokens, drafts: {"asked": (tokens, drafts)})


def test_the_table_is_as_long_as_the_context(told):
    wide = replace(CONFIG, max_context=10_000)
    rows = inkling_jax.bench(wide, dtype="float32")["rows"]
    points = [(1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 8192), (64, 8192)]
    assert [row["asked"] for row in rows[:-2]] == [(b, n, k) for b, n in points for k in (0, 1)]
    assert [(row["part"], row["asked"]) for row in rows[-2:]] == [("prefill", (8192, 0)), ("ttft", (1024, 0))]


def test_a_short_context_shortens_the_defaults(told):
    rows = inkling_jax.bench(CONFIG, drafts=[0], dtype="float32")["rows"]  # 512 tokens
    assert [row["asked"] for row in rows] == [(1, 480, 0), (510, 0), (480, 0)]


def test_rows_parts_and_effort_are_as_asked(told):
    options = dict(sequences=[2, 3], context=[7], drafts=[1], parts=["decode"], rounds=4, windows=1, routing=False)
    report = inkling_jax.bench(CONFIG, **options, profile="traces", dtype="float32")
    assert [row["asked"] for row in report["rows"]] == [(2, 7, 1), (3, 7, 1)]
    effort, hits = report["rows"][0]["effort"], report["rows"][0]["hits"]
    assert (effort.rounds, effort.windows, str(effort.profile), hits.wanted) == (4, 1, "traces", False)
    alone = inkling_jax.bench(CONFIG, context=[7, 9], drafts=[0], parts=["decode"], dtype="float32")["rows"]
    assert [row["asked"] for row in alone] == [(1, 7, 0), (1, 9, 0)]


def test_rows_are_given_one_by_one_and_prefills_several_times(told):
    options: dict[str, Any] = dict(prefill_tokens=[40, 80], prompt_tokens=9, dtype="float32")
    rows = inkling_jax.bench(CONFIG, rows=[(2, 7, 1), (3, 9, 0)], **options)["rows"]
    assert [row["asked"] for row in rows] == [(2, 7, 1), (3, 9, 0), (40, 0), (80, 0), (9, 0)]


def test_a_failed_row_leaves_the_others(told):
    options = dict(sequences=[13, 2], context=[7], drafts=[0], parts=["decode"], dtype="float32")
    rows = inkling_jax.bench(CONFIG, **options)["rows"]
    assert rows[0] == {"part": "decode", "sequences": 13, "context": 7, "drafts": 0, "error": "MemoryError: too many"}
    assert rows[1]["asked"] == (2, 7, 0)


def test_the_report_says_what_was_measured_where(told):
    seen = []

    def progress(report):
        seen.append((report["running"], len(report["rows"])))
        assert report["needed"] == {"weights": weights, "cache": measure.cache_bytes(tiny, effort, 1, 480, 0)}

    abstract = abstract_parameters(CONFIG, "float32")
    weights = sum(np.prod(x.shape) * x.dtype.itemsize for x in abstract.values())
    tiny, effort = Engine(CONFIG, abstract, "float32"), replace(EFFORT, rounds=32)
    report = inkling_jax.bench(CONFIG, drafts=[0], parts=["ttft"], dtype="float32", seed=5, progress=progress)
    json.dumps(report)
    running = {"part": "ttft", "tokens": 480, "drafts": 0}
    assert seen == [({"part": "weights"}, 0), (None, 0), (running, 0), (None, 1)]
    assert report["device"] == jax.devices()[0].device_kind and report["platform"] == "cpu"
    assert report["versions"]["jax"] == jax.__version__ and report["implementation"] == "xla"
    assert (report["dtype"], report["seed"], report["copy_rate"]) == ("float32", 5, RATE)
    assert report["weights_bytes"] == weights
    assert (report["mesh"], report["devices"], report["quantization"]) == (None, 1, None)
    assert (report["temperature"], report["top_k"], report["top_p"]) == (0.0, None, None)
    assert len(report["date"]) == 10 and report["config"]["text_config"]["hidden_size"] == CONFIG.hidden_size


def test_configs_are_found_by_name_and_by_path(tmp_path):
    assert run.find_config("slice-8") == ("slice-8", inkling_jax.InklingConfig.from_name("slice-8"))
    assert run.find_config("nano")[1].hidden_size == 192
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict("original")))
    assert run.find_config(tmp_path)[1] == run.find_config(tmp_path / "config.json")[1] == CONFIG
    with pytest.raises(ConfigError, match="'slice-9' is neither a config.json.*small-slice, nano"):
        run.find_config("slice-9")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(sequences=[0]), "sequences: expected whole numbers of at least 1, found 0"),
        (dict(context=[]), "at least one number"),
        (dict(context=[500]), "context: 500 tokens and up to 64 new ones exceed the model's context of 512"),
        (dict(rows=[]), "rows: expected at least one"),
        (dict(rows=[(1, 500, 0)]), "rows: context: 500 tokens and up to 32 new ones exceed"),
        (dict(rows=[(1, 7, 2)]), "drafts: expected whole numbers of 0 to 1, found 2"),
        (dict(rows=[(1, 7, 0)], drafts=[0]), "rows: they stand in place of sequences, context and drafts"),
        (dict(mesh={"tensor": 99}), "mesh: tensor=99 takes 99 devices and this machine has"),
        (dict(mesh={"expert": 3}), "num_experts = 8 does not divide by 3"),
        (dict(quantization="int4"), "format: expected nvfp4 or mxfp4, found 'int4'"),
        (
            dict(quantization="nvfp4"),
            "quantization: nothing to hold in 4 bits: the first layer with routed experts stays as it is",
        ),
        (dict(drafts=[2]), "drafts: expected whole numbers of 0 to 1, found 2"),
        (dict(drafts=[]), "drafts: expected at least one"),
        (dict(parts=["decode", "sing"]), "parts: expected some of decode, prefill, ttft"),
        (dict(parts=(1,)), "parts: expected some of decode, prefill, ttft, found 1"),
        (dict(parts=["prefill"], prefill_tokens=[]), "prefill_tokens: expected at least one number"),
        (dict(prefill_tokens=16.0), "prefill_tokens: expected whole numbers of at least 1, found 16.0"),
        (dict(rows=[(1, 64)]), "rows: expected \\(sequences, context, drafts\\) of each"),
        (dict(rows=[(1, 64, 9)]), "rows: drafts: expected whole numbers of 0 to 1, found 9"),
        (dict(drafts=2), "drafts: expected whole numbers of 0 to 1, found 2"),
        (dict(seed=-1), "seed: expected whole numbers of at least 0, found -1"),
        (dict(rounds=0), "rounds: expected whole numbers of at least 1"),
        (dict(rounds=300), "rounds: 300 of up to 2 tokens exceed the context of 512"),
        (dict(windows=True), "windows: expected whole numbers"),
        (dict(temperature=-1), "temperature: expected 0 \\(greedy\\) or more, found -1"),
        (dict(temperature=1, top_p=0), "top_p: expected more than 0 and at most 1, found 0"),
        (dict(top_k=0), "top_k: expected 1 to"),
        (dict(prefill_tokens=511), "prefill_tokens: 511 tokens and up to 2 new ones"),
        (dict(prompt_tokens=0), "prompt_tokens: expected whole numbers of at least 1"),
        (dict(dtype="float16"), "dtype: expected bfloat16 or float32, found 'float16'"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named_before_anything_is_drawn(options, words, monkeypatch):
    monkeypatch.setattr(run, "random_parameters", lambda *_: pytest.fail("drawn"))
    with pytest.raises(ValueError, match=words):
        inkling_jax.bench(CONFIG, **options)
