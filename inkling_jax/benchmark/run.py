"""The benchmark as a whole: which rows, in which order, and the report they make."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

from pallas_kernels import Implementation
from pallas_kernels.bench import copy_rate

from ..checkpoint import resolve
from ..compilation import enable_cache
from ..config import PRESETS, ConfigError, InklingConfig
from ..decode.engine import Engine, choose_implementation
from ..decode.request import make_requests
from ..memory import check_memory
from ..nn import abstract_parameters
from ..planning import held
from ..quantization import Format, Quantization
from ..sharding import MeshLike, check_mesh, make_mesh
from . import measure
from .weights import random_parameters

PARTS = ("decode", "prefill", "ttft")
TABLE = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 8192), (64, 8192), (1, 65536))
"""Sequences and context of the decode rows, unless others are asked for."""
DRAFTS = (0, 1)

Report = dict[str, Any]
Point = tuple[int, int, int]  # sequences, context, drafts
Work = tuple[dict[str, Any], Callable[[], measure.Row]]  # what names a row, and what measures it


def bench(
    model: str | os.PathLike[str] | InklingConfig = "slice-8",
    *,
    sequences: int | Sequence[int] | None = None,
    context: int | Sequence[int] | None = None,
    drafts: int | Sequence[int] | None = None,
    rows: Sequence[Point] | None = None,
    parts: Sequence[str] = PARTS,
    prefill_tokens: int | Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    rounds: int = 32,
    windows: int = 5,
    routing: bool = True,
    dtype: str = "bfloat16",
    quantization: Format | None = None,
    mesh: MeshLike = None,
    implementation: Implementation | None = None,
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    profile: str | os.PathLike[str] | None = None,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Measures a model of random weights on the first device or on a mesh; the report is plain data, ready for JSON.

    model: the name of a config ("slice-8", "small-slice", "inkling", ...), "nano", a config.json or its directory.
    sequences, context: decode every combination of these (one alone: the other is 1, or 1024); without both, `TABLE`
        as far as the model's context reaches. drafts: MTP drafts a round, by default 0 and 1.
    rows: in place of these three, (sequences, context, drafts) of each row to decode, in this order.
    parts: of "decode", "prefill" (`prefill_tokens`, one number or several, by default 8192) and "ttft" (the time to the
        first token after `prompt_tokens`, by default 1024); the last two with the first of `drafts`, with `rows` none.
    quantization: "nvfp4" or "mxfp4" for routed experts in 4 bits, in the layers that `quantize` would choose.
    mesh: how many devices to spread over, as {"tensor": 2}, or a `Mesh`, as for `load`.
    rounds, windows: a figure is the median of `windows` timings, each of one call that runs `rounds` rounds.
    temperature, top_k, top_p: how tokens are chosen, as in `generate`; by default the likeliest one.
    routing: measure which experts are hit; False takes the expectation under uniform routing and compiles less.
    profile: a directory for traces of a few rounds of each row. progress: called with the report before the weights are
        drawn and when they are there, when a row begins (it is named by "running") and when it is done.

    "needed" in the report is said before anything is drawn: bytes on each device of the weights and of the cache of the
    row that has the largest. A row that fails holds "error" in place of figures. Raises ValueError naming the argument,
    MemoryError where the weights and the smallest cache do not fit, NotImplementedError where the implementation cannot
    run.
    """
    name, config = find_config(model)
    choose_implementation(config, implementation)
    _check(config, dtype=dtype, parts=parts, rounds=rounds, windows=windows, seed=seed)
    sampling: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    make_requests([[0]], config, None, max_new_tokens=1, seed=0, stop=None, **sampling)  # raises where one is wrong
    effort = measure.Effort(rounds, windows, seed, None if profile is None else Path(profile), **sampling)
    if rows is not None and (sequences, context, drafts) != (None, None, None):
        raise ValueError("rows: they stand in place of sequences, context and drafts; give one or the others")
    sequences, context, drafts = (None if given is None else _several(given) for given in (sequences, context, drafts))
    if rows is not None and any(not isinstance(row, Sequence) or len(row) != 3 for row in rows):
        raise ValueError("rows: expected (sequences, context, drafts) of each")
    drafts = _drafts(config, [row[2] for row in rows], "rows: drafts") if rows else _drafts(config, drafts)
    new = max(map(effort.new_tokens, drafts))
    if new >= config.max_context:
        raise ValueError(
            f"rounds: {rounds} of up to {max(drafts) + 1} tokens exceed the context of {config.max_context}"
        )
    points = _points(config, sequences, context, drafts, new) if rows is None else _rows(config, rows, effort)
    first = 0 if rows is not None else drafts[0]
    prompts = {
        "prefill": [_length(config, "prefill_tokens", n, 8192, 2) for n in _several(prefill_tokens)],
        "ttft": [_length(config, "prompt_tokens", prompt_tokens, 1024, new)],
    }
    work = [("decode", point) for point in points if "decode" in parts]
    work += [(part, (length, first)) for part in PARTS[1:] if part in parts for length in prompts[part]]
    if not work:
        raise ValueError("prefill_tokens: expected at least one number")
    devices = None if mesh is None else make_mesh(mesh)
    packed = None if quantization is None else Quantization.of_model(config, quantization)
    if devices is not None:
        check_mesh(config, devices, packed)

    tell = progress or (lambda _: None)
    cached = enable_cache() is not None
    engine = Engine(config, abstract_parameters(config, dtype, packed), dtype, implementation, devices)
    caches = [_cache(engine, effort, part, sizes) for part, sizes in work]
    check_memory(config, dtype, packed, devices, min(caches))
    report = _about(name, config, dtype) | {
        "quantization": quantization,
        "mesh": None if devices is None else dict(devices.shape),
        "devices": 1 if devices is None else devices.size,
        "implementation": engine.implementation,
        "needed": {"weights": sum(held(config, *measure.spread(engine), dtype).values()), "cache": max(caches)},
        "copy_rate": copy_rate() if jax.default_backend() != "cpu" else copy_rate(2**25),
        "compilation_cache": cached,
        "rounds": rounds,
        "windows": windows,
        "seed": seed,
        **sampling,
        "running": {"part": "weights"},
        "rows": [],
    }
    tell(report)
    begin = time.perf_counter()
    params = jax.block_until_ready(random_parameters(config, dtype, seed, packed, devices))
    engine = Engine(config, params, dtype, implementation, devices)
    report |= {
        "parameters": sum(x.size for x in abstract_parameters(config).values()),
        "weights_bytes": sum(x.nbytes for x in params.values()),
        "weights_seconds": time.perf_counter() - begin,
        "memory": measure.device_memory(engine),
        "running": None,
    }
    tell(report)
    for row, run in _work(engine, report["copy_rate"], effort, measure.Hits(routing, {}), work):
        report["running"] = row
        tell(report)
        try:
            row = row | run()
        except Exception as error:  # one row's failure must not lose the others' figures
            row = row | {"error": f"{type(error).__name__}: {error}"}
        report["running"] = None
        report["rows"].append(row)
        tell(report)
    return report


def find_config(model: str | os.PathLike[str] | InklingConfig) -> tuple[str, InklingConfig]:
    """A name for the report, and the config. Raises ConfigError where there is none of that name."""
    if isinstance(model, InklingConfig):
        return "config", model
    path = Path(model).expanduser()
    if path.exists():
        return str(model), InklingConfig.from_path(path)
    if str(model) in PRESETS:
        return str(model), InklingConfig.from_name(str(model))
    if str(model) == "nano":
        return "nano", InklingConfig.from_path(resolve("nano"))
    names = ", ".join([*PRESETS, "nano"])
    raise ConfigError(f"model: {str(model)!r} is neither a config.json, nor a directory with one, nor one of {names}")


def _work(
    engine: Engine, rate: float, effort: measure.Effort, hits: measure.Hits, work: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[Work]:
    """What names each row, and what measures it."""
    for part, sizes in work:
        if part == "decode":
            row = dict(zip(("sequences", "context", "drafts"), sizes, strict=True))
            yield {"part": part, **row}, partial(measure.decode, engine, rate, effort, hits, *sizes)
        else:
            run = measure.prefill if part == "prefill" else measure.first_token
            row = dict(zip(("tokens", "drafts"), sizes, strict=True))
            yield {"part": part, **row}, partial(run, engine, rate, effort, *sizes)


def _cache(engine: Engine, effort: measure.Effort, part: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a row's cache on a device."""
    sequences, context, drafts = sizes if part == "decode" else (1, *sizes)
    return measure.cache_bytes(engine, effort, sequences, context, drafts)


def _check(config: InklingConfig, *, dtype: str, parts: Sequence[str], rounds: int, windows: int, seed: int) -> None:
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype: expected bfloat16 or float32, found {dtype!r}")
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts: expected some of {', '.join(PARTS)}, found {', '.join(map(str, parts)) or 'none'}")
    for name, value, least in (("rounds", rounds, 1), ("windows", windows, 1), ("seed", seed, 0)):
        _whole(name, value, least)


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected whole numbers of {bounds}, found {value!r}")
    return int(value)


def _drafts(config: InklingConfig, drafts: Sequence[int] | None, name: str = "drafts") -> list[int]:
    if drafts is None:
        return [k for k in DRAFTS if k <= config.mtp_depths]
    if not drafts:
        raise ValueError("drafts: expected at least one number")
    return [_whole(name, k, 0, config.mtp_depths) for k in drafts]


def _points(
    config: InklingConfig,
    sequences: Sequence[int] | None,
    context: Sequence[int] | None,
    drafts: Sequence[int],
    new: int,
) -> list[Point]:
    """(sequences, context, drafts) of the decode rows, which all have room for `new` more tokens."""
    if sequences is None and context is None:
        fitting = [(batch, length) for batch, length in TABLE if length + new <= config.max_context]
        points = fitting or [(1, config.max_context - new)]
    elif (sequences is not None and not sequences) or (context is not None and not context):
        raise ValueError("sequences, context: expected at least one number of each")
    else:
        points = [(b, n) for b in sequences or (1,) for n in context or (1024,)]
    for batch, length in points:
        _whole("sequences", batch, 1)
        _fits(config, "context", _whole("context", length, 1), new)
    return [(batch, length, k) for batch, length in points for k in drafts]


def _rows(config: InklingConfig, rows: Sequence[Point], effort: measure.Effort) -> list[Point]:
    for batch, length, drafts in rows:
        _whole("rows: sequences", batch, 1)
        _fits(config, "rows: context", _whole("rows: context", length, 1), effort.new_tokens(drafts))
    if not rows:
        raise ValueError("rows: expected at least one (sequences, context, drafts)")
    return list(rows)


def _several(numbers: Any) -> list[Any]:
    return list(numbers) if isinstance(numbers, Sequence | np.ndarray) else [numbers]


def _length(config: InklingConfig, name: str, tokens: int | None, default: int, new: int) -> int:
    """Tokens as asked for, or as many of the default as the model's context has room for."""
    if tokens is None:
        return max(1, min(default, config.max_context - new))
    _fits(config, name, _whole(name, tokens, 1), new)
    return tokens


def _fits(config: InklingConfig, name: str, length: int, new: int) -> None:
    if length + new > config.max_context:
        raise ValueError(
            f"{name}: {length} tokens and up to {new} new ones exceed the model's context of {config.max_context}"
        )


def _about(name: str, config: InklingConfig, dtype: str) -> Report:
    device = jax.devices()[0]
    from .. import __version__  # not before the package is whole

    versions = {"python": platform.python_version(), "inkling_jax": __version__}
    versions |= {package.__name__: package.__version__ for package in (jax, jaxlib, flax)}
    return {
        "model": name,
        "config": config.to_dict("original"),
        "dtype": dtype,
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
