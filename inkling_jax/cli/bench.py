"""Measure how fast a model decodes on this machine, with random weights, and how near that is to the memory limit."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from inkling_jax.benchmark import PARTS, bench
from inkling_jax.config import PRESETS
from inkling_jax.quantization import FORMATS

from .arguments import mesh, points, probability, some_of, temperature, whole, wholes
from .units import in_bytes

HELP = "how fast a model decodes here, and the memory limit"
EXAMPLES = f"""\
examples:
  inkling-jax bench                          slice-8, all rows: for a card with 80 GB or more
  inkling-jax bench slice-8 --quick          two rows, in a minute or two
  inkling-jax bench slice-8 --sequences 1,64 --context 1024,8192 --drafts 0 --only decode
  inkling-jax bench slice-8 --only prefill,ttft
  inkling-jax bench slice-8 --rows 1x1024,64x1024+1 --only decode --temperature 0.7 --top-p 0.95
  inkling-jax bench small-slice --drafts 0,1,2,4 --sequences 1 --json figures.json
  inkling-jax bench ./config.json --profile ./traces
  inkling-jax bench nano --quick             a small model, on any machine
  inkling-jax bench --config inkling-small --quantization nvfp4 --mesh tensor=2
  inkling-jax bench slice-8 --mesh tensor=2 --rows 1x1024,64x1024,1x1024+1 --only decode

MODEL is {", ".join(PRESETS)}, nano, a config.json or a directory with one.
Weights are drawn at random on the device, none are read. A row is printed when it is measured; --json rewrites FILE
after each, so that an interrupted run keeps its figures. The exit code is 1 when a row failed.

columns: ms a round (the median of the windows); the limit is the bytes that a round must read, counted from the model,
at the rate of a plain copy measured in the same run, and the share is how much of that rate is reached. "hit" is how
many routed experts the rows of a round reach in a layer. A round with drafts commits one token, since nothing that
random weights draft is accepted: it shows what a round costs. What sampling reads is not counted in the limit.
"""

# vLLM 0.26 on one H200, bfloat16, slice-8, measured on 2026-11-30: ms by (sequences, context), without drafts and
# with one that is not accepted (docs/performance.md).
PEER = "vLLM 0.26"
PEER_MS = {
    (1, 1024): (3.83, 5.49),
    (8, 1024): (7.87, 11.21),
    (32, 1024): (12.72, 14.74),
    (64, 1024): (14.60, 16.66),
    (1, 8192): (4.23, 5.78),
    (64, 8192): (15.77, 17.81),
    (1, 32768): (4.87, 6.77),
    (1, 65536): (6.21, 8.11),
}
PEER_PREFILL = (8192, 47_700)  # tokens, and tokens a second

_POINTS = ("sequences", "context", "drafts")
_SAMPLING = ("temperature", "top_k", "top_p")
_QUICK = {"sequences": [1, 64], "context": [1024], "drafts": [0], "only": ["decode"], "rounds": 16, "windows": 3}
_DEFAULTS = {"rounds": 32, "windows": 5, "only": list(PARTS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="which config (default: slice-8)")
    parser.add_argument("--config", metavar="MODEL", help="the same as MODEL")
    parser.add_argument("--sequences", metavar="N,N", type=wholes(1), help="decode so many at once: 1,8,64")
    parser.add_argument("--context", metavar="N,N", type=wholes(1), help="of so many tokens each: 1024,8192")
    parser.add_argument("--drafts", metavar="N,N", type=wholes(0), help="MTP drafts a round (default: 0,1)")
    parser.add_argument(
        "--rows", metavar="BxN+K", type=points, help="just these rows: K drafts, or none, for B sequences of N tokens"
    )
    parser.add_argument("--only", metavar="PART,PART", type=some_of(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--prefill-tokens", metavar="N,N", type=wholes(1), help="prefill so many (default 8192)")
    parser.add_argument("--prompt-tokens", metavar="N", type=whole(1), help="prompt of ttft (default 1024)")
    parser.add_argument("--rounds", metavar="N", type=whole(1), help="rounds in a timed window (default 32)")
    parser.add_argument("--windows", metavar="N", type=whole(1), help="windows, of which the median (default 5)")
    parser.add_argument("--quick", action="store_true", help="1 and 64 sequences of 1024, no drafts, 3 windows of 16")
    parser.add_argument(
        "--routing",
        choices=("measured", "uniform"),
        default="measured",
        help="experts hit: counted in a few extra rounds, or those expected of even routing, which compiles less",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    parser.add_argument("--quantization", choices=FORMATS, help="routed experts in 4 bits (default: none)")
    parser.add_argument("--mesh", metavar="SIZES", type=mesh, help="over so many devices: tensor=2,expert=4")
    parser.add_argument(
        "--implementation",
        choices=("xla", "triton", "interpret"),
        help="plain JAX, the GPU kernels, or their interpreter (default: the kernels where there is a GPU)",
    )
    parser.add_argument("--seed", metavar="N", type=whole(0), default=0, help="of weights and tokens (default 0)")
    parser.add_argument("--temperature", metavar="X", type=temperature, default=0.0, help="sample (default 0: greedy)")
    parser.add_argument("--top-k", metavar="N", type=whole(1), help="among the N likeliest tokens")
    parser.add_argument("--top-p", metavar="X", type=probability, help="among the likeliest that sum to X")
    parser.add_argument("--profile", metavar="DIR", type=Path, help="leave a trace of a few rounds of each row there")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there, after each row")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise ValueError(f"argument --json: {arguments.json.parent} is no directory")
    if arguments.json is not None and arguments.json.is_dir():
        raise ValueError(f"argument --json: {arguments.json} is a directory; expected a file")
    if arguments.profile is not None:
        try:
            arguments.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"argument --profile: {arguments.profile} cannot be made: {error.strerror}") from None
    if None not in (arguments.model, arguments.config):
        raise ValueError(f"argument --config: MODEL is given too, as {arguments.model}")
    given = (*_POINTS, "rows") if arguments.rows is not None else ()
    for name, value in (_QUICK if arguments.quick else _DEFAULTS).items():
        if getattr(arguments, name) is None and name not in given:
            setattr(arguments, name, value)
    names = (*_POINTS, "rows", "prefill_tokens", "prompt_tokens", "rounds", "windows", "dtype", "quantization", "mesh")
    report = bench(
        arguments.model or arguments.config or "slice-8",
        **{name: getattr(arguments, name) for name in (*names, *_SAMPLING, "implementation", "seed", "profile")},
        parts=arguments.only,
        routing=arguments.routing == "measured",
        progress=_Printer(arguments.json),
    )
    return int(any("error" in row for row in report["rows"]))


class _Printer:
    """Shows a report as it grows: the header, what is running on standard error, each row when it is there."""

    def __init__(self, file: Path | None):
        self._file, self._shown, self._told, self._part = file, 0, set[str](), ""

    def __call__(self, report: dict[str, Any]) -> None:
        self._once("\n".join(header(report)))
        if "weights_seconds" in report:
            self._once(drawn(report))
        if report["running"] is not None:
            print(f"measuring {_name(report['running'])} ...", file=sys.stderr, flush=True)
        for row in report["rows"][self._shown :]:
            if row["part"] == "decode" and self._part != "decode":
                print(titles(report), flush=True)
            self._part = row["part"]
            print(line(report, row), flush=True)
        self._shown = len(report["rows"])
        if self._file is not None:
            self._file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def _once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(text, flush=True)


def header(report: dict[str, Any]) -> list[str]:
    """What is measured on what, and what it needs: known before anything is drawn."""
    count, mesh, needed = report["devices"], report["mesh"] or {}, report["needed"]
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    kind = report["device"] if count == 1 else f"{count} x {report['device']} ({sizes})"
    where = f"{kind}, jax {report['versions']['jax']}, {report['date']}"
    return [
        f"{report['model']} on {where}, implementation {report['implementation']}",
        f"needs {in_bytes(needed['weights'])} of weights and up to {in_bytes(needed['cache'])} of cache"
        f"{' on each device' if count > 1 else ''}",
        f"copy rate {report['copy_rate'] / 1e12:.3f} TB/s; medians of {report['windows']} windows of "
        f"{report['rounds']} rounds{_chosen(report)}",
    ]


def _chosen(report: dict[str, Any]) -> str:
    """How tokens are, where they are sampled."""
    given = [f"{name.replace('_', '-')} {report[name]:g}" for name in _SAMPLING if report[name] is not None]
    return f"; sampled: {', '.join(given)}" if report["temperature"] else ""


def drawn(report: dict[str, Any]) -> str:
    """The weights, once they are there."""
    dtype = f"{report['dtype']}, experts in {report['quantization']}" if report["quantization"] else report["dtype"]
    weights = f"{in_bytes(report['weights_bytes'])} in {dtype}, drawn in {report['weights_seconds']:.1f} s"
    return f"{report['parameters']:,} random weights, {weights}"


def titles(report: dict[str, Any]) -> str:
    peer = f"{PEER:>11}" if _has_peer(report) else ""
    return (
        f"{'sequences':>9}{'context':>9}{'drafts':>8}{'ms':>10}{'limit ms':>10}{'share':>8}{'tokens/s':>10}"
        f"{'hit':>7}{'cache':>10}{'compile s':>11}{peer}"
    )


def line(report: dict[str, Any], row: dict[str, Any]) -> str:
    """A measured row; for a part that is not decoding a sentence of its own."""
    if "error" in row:
        return f"{_name(row)} failed: {row['error']}"
    peer = _peer(report, row)
    if row["part"] == "decode":
        hit = row["routing"]["hit"]
        figures = (
            f"{row['sequences']:>9}{row['context']:>9}{row['drafts']:>8}{row['ms']:>10.2f}{row['limit_ms']:>10.2f}"
            f"{row['share']:>8.1%}{row['tokens_per_second']:>10.1f}{'-' if hit is None else f'{hit:.1f}':>7}"
            f"{in_bytes(row['memory']['cache_bytes']):>10}{row['compile_seconds']:>11.1f}"
        )
        note = f"\n  {row['warning']}" if "warning" in row else ""
        return figures + (f"{peer:>11.2f}" if peer is not None else "") + note
    speed = f"{row['ms']:.1f} ms"
    if row["part"] == "prefill":
        beside = f" ({PEER}: {peer:,.0f})" if peer is not None else ""
        speed += f", {row['tokens_per_second']:,.0f} tokens/s{beside}, {row['tflops']:.3g} TFLOP/s"
    limit = f"limit {row['limit_ms']:.1f} ms ({row['share']:.1%})"
    return f"{_name(row)}: {speed}; {limit}; compiled in {row['compile_seconds']:.1f} s"


def _name(row: dict[str, Any]) -> str:
    if row["part"] == "weights":
        return "how long drawing the weights takes"
    if row["part"] == "decode":
        return f"decode {row['sequences']} x {row['context']}, {row['drafts']} drafts"
    what = "prefill of" if row["part"] == "prefill" else "first token after"
    return f"{what} {row['tokens']} tokens, {row['drafts']} drafts"


def _has_peer(report: dict[str, Any]) -> bool:
    """Whether the known figures of another engine are of this model on this kind of device."""
    same = report["model"] == "slice-8" and report["dtype"] == "bfloat16" and not report["quantization"]
    return same and report["devices"] == 1 and "H200" in report["device"] and not report["temperature"]


def _peer(report: dict[str, Any], row: dict[str, Any]) -> float | None:
    if not _has_peer(report) or row["drafts"] > 1:
        return None
    if row["part"] == "decode":
        known = PEER_MS.get((row["sequences"], row["context"]))
        return None if known is None else known[row["drafts"]]
    return PEER_PREFILL[1] if row["part"] == "prefill" and row["tokens"] == PEER_PREFILL[0] else None
