"""`inkling-jax bench`: how options reach the library, what is printed, what is left in files."""

import json
from dataclasses import replace

import pytest

from inkling_jax.benchmark import run
from inkling_jax.cli import bench
from tests.decode.tiny import CONFIG

from .test_generate import assert_one_error


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A config.json of a tiny model; a copy rate that needs no measuring, and no cache on disk."""
    monkeypatch.setattr(run, "copy_rate", lambda *_: 1e9)
    monkeypatch.setattr(run, "enable_cache", lambda: None)
    config = replace(CONFIG, num_layers=1, local_layers=(), dense_layers=(), mtp_depths=1, mtp_local=(0,))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict("original")))
    return tmp_path / "config.json"


def test_a_row_is_measured_printed_and_written(command, model, tmp_path):
    asked = ("--sequences", 1, "--context", 20, "--drafts", 0, "--only", "decode", "--routing", "uniform")
    files = ("--json", tmp_path / "figures.json", "--profile", tmp_path / "traces")
    done = command("bench", model, *asked, "--rounds", 2, "--windows", 1, *files)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[1].startswith("needs ") and lines[1].endswith(" of cache") and "random weights" in lines[3]
    assert lines[0].startswith(f"{model} on cpu, jax ") and lines[0].endswith("implementation xla")
    assert lines[4].split()[:4] == ["sequences", "context", "drafts", "ms"]
    assert lines[5].split()[:3] == ["1", "20", "0"] and "vLLM" not in done.out
    assert "measuring decode 1 x 20, 0 drafts ..." in done.err
    report = json.loads((tmp_path / "figures.json").read_text())
    [row] = report["rows"]
    assert row["part"] == "decode" and len(row["ms_windows"]) == 1 and report["running"] is None
    assert f"{row['ms']:.2f}" in lines[5].split() and f"{row['limit_ms']:.2f}" in lines[5].split()
    assert not row["routing"]["measured"] and f"{row['routing']['hit']:.1f}" in lines[5].split()
    assert list((tmp_path / "traces" / "decode-1x20-0drafts").rglob("*.xplane.pb"))


@pytest.fixture
def asked(monkeypatch):
    """What the library is asked for, without running it."""
    calls = []

    def fake(model, **options):
        calls.append((model, options))
        return {"rows": []}

    monkeypatch.setattr(bench, "bench", fake)
    return calls


def test_options_reach_the_library(command, asked):
    options = ("--sequences", "1,8", "--context", "1024", "--drafts", "0,2", "--only", "ttft,decode", "--seed", 3)
    assert command("bench", "small-slice", *options, "--implementation", "xla").code == 0
    model, given = asked[0]
    assert model == "small-slice" and given["parts"] == ["decode", "ttft"] and given["seed"] == 3
    assert (given["sequences"], given["context"], given["drafts"]) == ([1, 8], [1024], [0, 2])
    assert (given["rounds"], given["windows"], given["routing"], given["implementation"]) == (32, 5, True, "xla")


def test_how_tokens_are_chosen_reaches_the_library_and_the_header(command, asked):
    assert command("bench", "--temperature", 0.7, "--top-k", 50, "--top-p", 0.95).code == 0
    chosen = {name: asked[0][1][name] for name in ("temperature", "top_k", "top_p")}
    assert chosen == {"temperature": 0.7, "top_k": 50, "top_p": 0.95}
    assert bench.header(REPORT | chosen)[2].endswith("of 32 rounds; sampled: temperature 0.7, top-k 50, top-p 0.95")
    assert bench.header(REPORT)[2].endswith("of 32 rounds")


def test_rows_stand_in_place_of_combinations(command, asked):
    options = ("--rows", "1x1024,64x8192+3", "--mesh", "tensor=2,expert=4", "--quantization", "nvfp4")
    assert command("bench", "--config", "inkling-small", *options, "--prefill-tokens", "8192,65536").code == 0
    model, given = asked[0]
    assert model == "inkling-small" and given["rows"] == [(1, 1024, 0), (64, 8192, 3)]
    assert (given["sequences"], given["context"], given["drafts"]) == (None, None, None)
    assert given["mesh"] == {"tensor": 2, "expert": 4} and given["quantization"] == "nvfp4"
    assert given["prefill_tokens"] == [8192, 65536]


def test_the_header_says_what_each_device_needs():
    many = REPORT | {"devices": 2, "mesh": {"data": 1, "expert": 1, "tensor": 2}, "quantization": "nvfp4"}
    first, needs, _ = bench.header(many)
    assert first.startswith("slice-8 on 2 x NVIDIA H200 (tensor=2), jax 0.0,")
    assert needs == "needs 53.70 GB of weights and up to 2.00 GB of cache on each device"
    assert bench.drawn(many).endswith("53.70 GB in bfloat16, experts in nvfp4, drawn in 2.0 s")


def test_quick_is_two_rows_unless_more_is_asked(command, asked):
    command("bench", "--quick")
    command("bench", "--quick", "--sequences", 4, "--windows", 9)
    (model, quick), (_, more) = asked
    names = ("sequences", "context", "drafts", "parts", "rounds", "windows")
    assert model == "slice-8"
    assert [quick[name] for name in names] == [[1, 64], [1024], [0], ["decode"], 16, 3]
    assert [more[name] for name in names] == [[4], [1024], [0], ["decode"], 16, 9]


REPORT = {
    "model": "slice-8",
    "dtype": "bfloat16",
    "quantization": None,
    "mesh": None,
    "devices": 1,
    "needed": {"weights": 53_700_000_000, "cache": 2_000_000_000},
    "device": "NVIDIA H200",
    "versions": {"jax": "0.0"},
    "date": "2026-01-01",
    "implementation": "triton",
    "parameters": 26_850_000_000,
    "weights_bytes": 53_700_000_000,
    "weights_seconds": 2.0,
    "copy_rate": 4e12,
    "windows": 5,
    "rounds": 32,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
}
ROW = {
    "part": "decode",
    "sequences": 8,
    "context": 1024,
    "drafts": 1,
    "ms": 9.5,
    "limit_ms": 9.0,
    "share": 0.947,
    "tokens_per_second": 842.1,
    "routing": {"hit": 44.3},
    "memory": {"cache_bytes": 1e9},
    "compile_seconds": 12.0,
}


def test_the_known_figures_of_another_engine_stand_beside_their_rows():
    assert bench.titles(REPORT).split()[-2:] == ["vLLM", "0.26"]
    words = bench.line(REPORT, ROW).split()
    assert words == ["8", "1024", "1", "9.50", "9.00", "94.7%", "842.1", "44.3", "1.00", "GB", "12.0", "11.21"]
    assert bench.line(REPORT, ROW | {"drafts": 0}).split()[-1] == "7.87"
    prefill = dict(part="prefill", tokens=8192, drafts=0, ms=150.0, tokens_per_second=54613.0, tflops=400.0)
    prefill |= dict(limit_ms=50.0, share=1 / 3, compile_seconds=9.0)
    assert "54,613 tokens/s (vLLM 0.26: 47,700), 400 TFLOP/s; limit 50.0 ms (33.3%)" in bench.line(REPORT, prefill)


OTHERS = (
    *({"device": "cpu"}, {"model": "small-slice"}, {"dtype": "float32"}),
    *({"quantization": "nvfp4"}, {"devices": 2}, {"temperature": 0.7}),
)


@pytest.mark.parametrize("other", OTHERS)
def test_and_beside_no_others(other):
    report = REPORT | other
    assert "vLLM" not in bench.titles(report)
    assert bench.line(report, ROW).split()[-1] == "12.0"
    assert bench.line(REPORT, ROW | {"context": 999}).split()[-1] == "12.0"
    assert bench.line(REPORT, ROW | {"drafts": 2}).split()[-1] == "12.0"


def test_a_failed_row_is_said_and_the_exit_code_too(command, model, tmp_path, monkeypatch):
    def broken(*_):
        raise MemoryError("the cache needs more")

    monkeypatch.setattr(run.measure, "decode", broken)
    done = command("bench", model, "--only", "decode", "--drafts", 1, "--json", tmp_path / "f.json")
    assert done.code == 1 and "1 drafts failed: MemoryError: the cache needs more" in done.out
    assert json.loads((tmp_path / "f.json").read_text())["rows"][0]["error"] == "MemoryError: the cache needs more"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sequences", "1,x"], "argument --sequences: 'x' is not a whole number from 1 up"),
        (["--context", "0"], "argument --context: '0' is not a whole number from 1 up"),
        (["--drafts", "-1"], "argument --drafts"),
        (["--drafts", "2"], "drafts: expected whole numbers of 0 to 1, found 2"),
        (["--only", "decode,sing"], "argument --only: 'sing' is none of decode, prefill, ttft"),
        (["--rows", "1x20+x"], "argument --rows: '1x20+x' is not a list of rows like 1x1024,64x1024+1"),
        (["--rows", "1x20", "--drafts", "1"], "rows: they stand in place of sequences, context and drafts"),
        (["--config", "nano"], "argument --config: MODEL is given too"),
        (["--quantization", "int4"], "argument --quantization: invalid choice: 'int4'"),
        (["--mesh", "tensor"], "argument --mesh: mesh: 'tensor'; expected each axis once"),
        (["--rounds", "0"], "argument --rounds"),
        (["--context", "9999"], "context: 9999 tokens and up to 64 new ones exceed the model's context of 512"),
        (["--dtype", "float16"], "argument --dtype"),
        (["--json", "/nowhere/figures.json"], "argument --json: /nowhere is no directory"),
        (["--profile", "/dev/null/traces"], "argument --profile: /dev/null/traces cannot be made: Not a directory"),
        (["--implementation", "triton"], "implementation='triton' needs an NVIDIA or AMD GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line_that_names_it(command, model, arguments, words):
    assert_one_error(command("bench", model, *arguments), words)


def test_a_model_that_does_not_exist(command):
    assert_one_error(command("bench", "slice-9"), "'slice-9' is neither a config.json, nor a directory with one, nor")
