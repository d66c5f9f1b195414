"""Time the ops on one GPU: `python -m pallas_kernels.bench [op] [--json FILE]`.

An op is timed where it is used: inside a jitted loop, whose body XLA captures as one graph. The body calls it on
several variants of its inputs, so that none is still in L2 when its turn comes again; where all of them together would
fit, the body also sweeps a buffer larger than L2, and the time of a loop that only sweeps is taken off. Beside it stand
the "xla" implementation and the floor: the bytes that must move, at the rate of a plain copy measured in the same run.
"""

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._case import Case
from pallas_kernels._dispatch import Implementation, target, why_not_triton

OPS = (
    "embed_norm",
    "embed_dual_norm_cat",
    "rel_paged_attention",
    "rel_attention",
    "short_conv",
    "qkvr_prep",
    "router",
    "linear",
    "moe",
    "cutoff",
)
SWEEP_BYTES = 128 * 2**20  # twice the L2 of an H200
MOST_COPIES = 8  # all unrolled into one program: more take longer to compile and change no figure
RUN_SECONDS = 0.02
REPEATS = 7


def cases(op: str) -> tuple[Case, ...]:
    """The op's shapes; none where it has no `shapes.py`."""
    name = f"pallas_kernels.{op}.shapes"
    return importlib.import_module(name).CASES if importlib.util.find_spec(name) is not None else ()


def seconds(run: Callable[[Any], Any], carry: Any) -> float:
    """Median time of `carry = run(carry)` after a first, compiling call."""
    carry = jax.block_until_ready(run(carry))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        carry = jax.block_until_ready(run(carry))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def sweep(buffer: jax.Array, steps: int) -> jax.Array:
    return lax.fori_loop(0, steps, lambda _, x: x + 1, buffer)


def copy_rate(size: int = 2**30) -> float:
    """Bytes a second, read and written, of passing once over `size` bytes."""
    steps, buffer = 20, jnp.zeros(size // 4, jnp.float32)
    return steps * 2 * buffer.nbytes / seconds(lambda x: sweep(x, steps), buffer)


def first_elements(tree: Any) -> jax.Array:
    """A number that depends on every output, so that none is dropped and nothing inside is simplified."""
    leaves = jax.tree.leaves(lax.optimization_barrier(tree))
    return sum((leaf.ravel()[0].astype(jnp.float32) for leaf in leaves), start=jnp.zeros((), jnp.float32))


def body(
    case: Case, implementation: Implementation | str | None, inputs: list, sweeping: bool
) -> Callable[[int, Any], Any]:
    """One pass over all variants; with implementation None only what surrounds the op."""

    def run(_, carry):
        states, buffer, token = carry
        if sweeping:
            buffer = buffer + 1
        new_states, outputs, before = [], [], token
        for state, variant in zip(states, inputs, strict=True):
            if implementation is None:
                new_states.append(state)
                continue
            variant, before = lax.optimization_barrier((variant, before))  # or XLA would lift it out of the loop
            state, before = case.run(implementation, state, variant)
            new_states.append(state)
            outputs.append(before)
        return new_states, buffer, token + first_elements(outputs)

    return run


def measure(case: Case, implementation: Implementation | str, rate: float) -> float:
    """Seconds of one call."""
    copies = min(MOST_COPIES, max(2, math.ceil(2 * SWEEP_BYTES / case.bytes_moved)))
    sweeping = copies * case.bytes_moved < 2 * SWEEP_BYTES
    guess = case.bytes_moved / rate + 4e-6 + (2 * SWEEP_BYTES / rate if sweeping else 0) / copies
    steps = max(4, round(RUN_SECONDS / guess / copies))
    states, inputs = zip(*case.make(jax.random.key(0), copies), strict=True)

    def loop(which: Implementation | str | None) -> float:
        buffer = jnp.zeros(SWEEP_BYTES // 4 if sweeping else 1, jnp.float32)
        own = jax.tree.map(jnp.copy, list(states))

        @functools.partial(jax.jit, donate_argnums=0)
        def run(carry, inputs):
            return lax.fori_loop(0, steps, body(case, which, inputs, sweeping), carry)

        return seconds(lambda carry: run(carry, list(inputs)), (own, buffer, jnp.float32(0)))

    return (loop(implementation) - (loop(None) if sweeping else 0)) / steps / copies


def rows(ops: tuple[str, ...], rate: float) -> Iterator[dict[str, Any]]:
    """One measured row a shape; a shape that fails says why."""
    for op in ops:
        for case in cases(op):
            floor = case.bytes_moved / rate
            row = {"op": op, "shape": case.shape, "floor_us": floor * 1e6}
            for implementation in ("triton", "xla", *([case.rival] if case.rival else [])):
                try:
                    taken = measure(case, implementation, rate)
                except Exception as error:  # one shape's failure must not lose the others' figures
                    row[f"{implementation}_error"] = f"{type(error).__name__}: {error}"
                    continue
                row[f"{implementation}_us"] = taken * 1e6
                if implementation == "triton":
                    row["share"] = floor / taken
                    row["tflops"] = case.flops / taken / 1e12
            yield row


def show(row: dict[str, Any]) -> str:
    def number(key: str) -> str:
        return f"{row[key]:9.2f}" if key in row else "   failed"

    rate = f"{row['tflops']:7.0f} TFLOP/s" if row.get("tflops") else ""
    share = f"{row['share']:7.1%}" if "share" in row else "       "
    figures = f"{number('triton_us')} {number('xla_us')} {number('floor_us')} {share} {rate}"
    named = ("triton_us", "xla_us", "floor_us")
    rivals = [f"; {k.removesuffix('_us')} {row[k]:.1f} us" for k in row if k.endswith("_us") and k not in named]
    errors = [f"\n    {k}: {v.splitlines()[0]}" for k, v in row.items() if k.endswith("_error")]
    return f"{row['op']:<20} {row['shape']:<42} {figures}{''.join(rivals + errors)}"


def check_json(parser: argparse.ArgumentParser, file: Path | None) -> None:
    """End with an error where a file cannot be written, before anything is timed."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        parser.error(f"argument --json: {file} is a directory, or in none that exists")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("op", nargs="?", choices=OPS, help="time this op alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(argv)
    check_json(parser, options.json)
    reason = why_not_triton(target())
    if reason is not None:
        print(f"the benchmark {reason}", file=sys.stderr)
        return 2
    rate = copy_rate()
    device = jax.devices()[0].device_kind
    about = {"device": device, "jax": jax.__version__, "date": datetime.date.today().isoformat(), "copy_rate": rate}
    print(f"{device}, jax {jax.__version__}, {about['date']}, copy rate {rate / 1e12:.2f} TB/s")
    print(f"{'op':<20} {'shape':<42} {'us':>9} {'xla us':>9} {'floor us':>9} {'share':>7}")
    results = []
    for row in rows((options.op,) if options.op else OPS, rate):
        print(show(row), flush=True)
        results.append(row)
        if options.json:
            options.json.write_text(json.dumps({**about, "rows": results}, indent=1))
    return int(any("triton_error" in row for row in results))


if __name__ == "__main__":
    sys.exit(main())
