"""Look for faster tiles on this card: `python -m pallas_kernels.tune linear --shape "LM head" [--json FILE]`.

Each op's `tiles.py` says what a program holds at a time, by the shape of the call and by card. The search begins with
that choice and tries half and twice of one field at a time, one pipeline stage more and less, and goes on from whatever
takes 1 % less, until nothing does. Up to 128 rows, tiles that turn a bit of the result are refused: a row is decoded
alone and among others, by tiles that must add in one order.

A choice that is beaten by more than a few percent is worth an entry in `tiles.py`; run `pytest -m gpu tests/kernels`
after it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench
from pallas_kernels._case import Case
from pallas_kernels._dispatch import target, why_not_triton
from pallas_kernels.linear.tiles import ROWS
from pallas_kernels.linear.tiles import Tiles as LinearTiles
from pallas_kernels.linear.triton import linear_triton, swiglu_triton
from pallas_kernels.linear.triton import make_plan as linear_plan
from pallas_kernels.moe.tiles import Tiles as MoeTiles
from pallas_kernels.moe.triton import make_plan as moe_plan
from pallas_kernels.moe.triton import moe_triton

Tiles = LinearTiles | MoeTiles
OPS = ("linear", "moe")
FASTER = 0.99  # of the time before: less is noise
LIMITS = {"outputs": (8, 256), "depth": (32, 512), "num_warps": (1, 8), "num_stages": (1, 8), "group": (1, 16)}


@dataclass(frozen=True, slots=True)
class Search:
    """One launch of an op at one shape: `run(inputs, tiles)` calls the op with these tiles in it."""

    name: str
    chosen: Tiles
    parts: int
    run: Callable[[Any, Tiles], jax.Array]


class Refused(Exception):
    """Why tiles will not do."""


def searches(op: str, inputs: Any, out_dtype: jnp.dtype) -> list[Search]:
    """What can be searched in a call of the op with such inputs, which may be shapes alone."""
    return moe_searches(inputs) if op == "moe" else [linear_search(inputs, out_dtype)]


def moe_searches(inputs: Any) -> list[Search]:
    def up(inputs: Any, tiles: Any) -> jax.Array:
        x, ids, weights, w13, w2 = inputs
        return moe_triton(x, ids, weights, w13, w2, None, None, None, 0, "triton", (tiles, None))

    def down(inputs: Any, tiles: Any) -> jax.Array:
        x, ids, weights, w13, w2 = inputs
        return moe_triton(x, ids, weights, w13, w2, None, None, None, 0, "triton", (None, tiles))

    x, ids, _, w13, w2 = inputs
    plans = [moe_plan(is_up, x, ids, w, w2, 0, 0, "triton", None) for is_up, w in ((True, w13), (False, w2))]
    return [Search("gate and up", plans[0].tiles, 2, up), Search("down", plans[1].tiles, 1, down)]


def linear_search(inputs: Any, out_dtype: jnp.dtype) -> Search:
    """Of weights side by side, or of the gate and up of SwiGLU, which are one array."""
    x, weights = inputs
    side_by_side = isinstance(weights, list)
    sizes = [w.shape[0] for w in weights] if side_by_side else [weights.shape[1]]

    def run(inputs: Any, tiles: Any) -> jax.Array:
        x, weights = inputs
        if side_by_side:
            return linear_triton(x, weights, None, sum(sizes), out_dtype, "triton", tiles)
        return swiglu_triton(x, weights, "triton", tiles)

    plan = linear_plan(x, sizes, 1 if side_by_side else 2, False, None)
    return Search("", plan.tiles, plan.parts, run)


def neighbours(tiles: Tiles) -> Iterator[tuple[str, Tiles]]:
    """The tiles that differ in one field, and how: half and twice, of stages one less and one more."""
    for field, (least, most) in LIMITS.items():
        value = getattr(tiles, field, None)
        if value is None:
            continue
        near = (value - 1, value + 1) if field == "num_stages" else (value // 2, value * 2)
        for other in near:
            if least <= other <= most:
                yield f"{field} {value} -> {other}", replace(tiles, **{field: other})


def descend(start: Tiles, seconds: Callable[[Tiles], float], say: Callable[[str], None]) -> tuple[Tiles, float, float]:
    """Goes to a faster neighbour as long as there is one: the last tiles, their time, and that of the first.

    `seconds` raises Refused for tiles that will not do.
    """
    best, before = start, seconds(start)
    least, seen, moved = before, {start}, True
    while moved:
        moved = False
        for change, tiles in neighbours(best):
            if tiles in seen:
                continue
            seen.add(tiles)
            try:
                taken = seconds(tiles)
            except Refused as reason:
                say(f"  {change:<24} {reason}")
                continue
            better = taken < FASTER * least
            say(f"  {change:<24} {taken * 1e6:9.2f} us{' *' * better}")
            if better:
                best, least, moved = tiles, taken, True
                break
    return best, least, before


def tune(op: str, case: Case, rate: float, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each launch: the tiles chosen by rule and the best ones found, with their times."""
    [(state, inputs)] = case.make(jax.random.key(0), 1)
    out = jax.eval_shape(lambda: case.run("xla", state, inputs)[1])
    for search in searches(op, inputs, out.dtype):
        exact = jax.jit(search.run, static_argnums=1)(inputs, search.chosen)

        def seconds(tiles: Tiles, search=search, exact=exact) -> float:
            if tiles.buffers(search.parts, 2) > target().shared_memory:
                raise Refused("more than the card's shared memory")
            run = lambda _, state, inputs: (state, search.run(inputs, tiles))  # noqa: E731
            try:
                found = jax.jit(search.run, static_argnums=1)(inputs, tiles)
                taken = bench.measure(replace(case, run=run), "triton", rate)
            except Exception as error:  # one candidate that does not compile must not end the search
                said, _, _ = str(error).partition("\n")
                raise Refused(f"{type(error).__name__}: {said[:100]}") from error
            if out.shape[0] <= ROWS and not bool(jnp.array_equal(found, exact)):
                raise Refused("turns bits of the result")
            return taken

        name = ", ".join(part for part in (case.shape, search.name) if part)
        say(f"{op} {name}: {search.chosen}")
        best, least, before = descend(search.chosen, seconds, say)
        changed = {k: v for k, v in asdict(best).items() if v != getattr(search.chosen, k)}
        say(f"  {before * 1e6:.2f} us as chosen, {least * 1e6:.2f} us with {changed or 'the same'}")
        yield {
            "op": op,
            "shape": name,
            "chosen": asdict(search.chosen),
            "best": asdict(best),
            "chosen_us": before * 1e6,
            "best_us": least * 1e6,
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("op", choices=OPS)
    parser.add_argument(
        "--shape", metavar="TEXT", default="", help="the benchmark's shapes that have TEXT in their name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    options = parser.parse_args(argv)
    bench.check_json(parser, options.json)
    cases = [case for case in bench.cases(options.op) if options.shape in case.shape]
    if not cases:
        names = "\n".join(f"  {case.shape}" for case in bench.cases(options.op))
        parser.error(f"no shape of {options.op} has {options.shape!r} in its name; there are\n{names}")
    reason = why_not_triton(target())
    if reason is not None:
        print(f"the search {reason}", file=sys.stderr)
        return 2
    rate, device = bench.copy_rate(), jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, copy rate {rate / 1e12:.2f} TB/s")
    rows = []
    for case in cases:
        rows.extend(tune(options.op, case, rate, lambda line: print(line, flush=True)))
        if options.json:
            options.json.write_text(json.dumps({"device": device, "jax": jax.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
