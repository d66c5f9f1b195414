"""Show what is in a checkpoint without reading its weights, and what running it takes, of one device or of many."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from itertools import groupby
from pathlib import Path

from inkling_jax.cache import cache_bytes
from inkling_jax.checkpoint import Inspection, inspect
from inkling_jax.config import PRESETS, InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.planning import GPUS, DevicePlan, plan
from inkling_jax.quantization import FORMATS, Quantization

from .arguments import mesh, whole
from .units import in_bytes

HELP = "what is in a checkpoint, and the memory it needs"
EXAMPLES = f"""\
examples:
  inkling-jax inspect nano
  inkling-jax inspect ./Inkling-Small --batch 8 --context 32768
  inkling-jax inspect ./config.json          no weights needed
  inkling-jax inspect inkling                a published size: {", ".join(PRESETS)}
  inkling-jax inspect nano --json
  inkling-jax inspect inkling --mesh tensor=2,expert=8 --quantization nvfp4 --batch 8

With --mesh: what each device holds and reads, and which GPUs that fits; the devices need not be here.
The exit code is 1 when tensors are missing, unexpected, of another shape, or quantised in a way that cannot be read.
"""

_MISFITS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "misshapen": "of another shape",
    "quantised": "quantised in a way that this version does not read",
}
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, config.json, hub id, nano or published size")
    parser.add_argument("--batch", metavar="N", type=whole(1), default=1, help="sequences at once (default 1)")
    parser.add_argument("--context", metavar="N", type=whole(1), help="tokens of each (default: up to 8192)")
    parser.add_argument("--draft-tokens", metavar="N", type=whole(0), help="drafts a round (default: the depths)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and cache")
    parser.add_argument("--mesh", metavar="SIZES", type=mesh, help="plan for so many devices: tensor=2,expert=4")
    parser.add_argument(
        "--quantization", choices=(*FORMATS, "none"), help="plan for experts in 4 bits, or none (default: as they are)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    found = _inspect(arguments.model)
    config = found.config
    context = _at_most("--context", arguments.context, config.max_context, default=8192)
    drafts = _at_most("--draft-tokens", arguments.draft_tokens, config.mtp_depths, default=config.mtp_depths)
    packed = found.quantization if found.fits else None  # such as it is, it may not even have whole blocks
    quantization = _wanted(config, packed, arguments.quantization)
    memory = _memory(config, quantization, arguments.batch, context, drafts, arguments.dtype)
    plans = []
    if arguments.mesh is not None:
        settings = (config, arguments.mesh, quantization, arguments.batch, context)
        plans = [plan(*settings, n, arguments.dtype) for n in sorted({0, drafts})]
    if arguments.json:
        asked = {"batch": arguments.batch, "context": context, "draft_tokens": drafts, "dtype": arguments.dtype}
        extra = {"plans": [one.to_dict() for one in plans]} if plans else {}
        print(json.dumps(found.to_dict() | {"memory": asked | {"bytes": memory}} | extra, allow_nan=False))
    else:
        print("\n\n".join(_report(found)))
        experts = f", experts in {quantization.format}" if quantization else ""
        sequences = "1 sequence" if arguments.batch == 1 else f"{arguments.batch} sequences"
        title = f"memory for {sequences} of {context:,} tokens, {drafts} drafts, {arguments.dtype}{experts}"
        print(f"\n{title}\n{_table([(name, in_bytes(size)) for name, size in memory.items()])}")
        if plans:
            print("\n" + "\n\n".join(_planned(plans)))
    return int(not found.fits)


def _inspect(model: str) -> Inspection:
    if model in PRESETS and not Path(model).exists():
        with resources.as_file(resources.files("inkling_jax") / "configs" / f"{model}.json") as file:
            return replace(inspect(file), path=model)
    return inspect(model)


def _wanted(config: InklingConfig, found: Quantization | None, asked: str | None) -> Quantization | None:
    """The quantisation to plan for: what is there, none, or what `quantize` would make."""
    if asked is None or (found is not None and asked == found.format):
        return found
    if asked == "none":
        return None
    return Quantization.of_model(config, "nvfp4" if asked == "nvfp4" else "mxfp4")


def _planned(plans: list[DevicePlan]) -> list[str]:
    """The paragraphs about a device of a mesh, a column for each number of drafts."""
    first = plans[0]
    sizes = ", ".join(f"{axis}={size}" for axis, size in first.mesh.items() if size > 1) or "1 device"
    sequences = "1 sequence" if first.sequences == 1 else f"{first.sequences} sequences"
    head = ("", *(f"{one.draft_tokens} drafts" for one in plans))

    def rows(of: dict[str, Callable[[DevicePlan], float]]) -> str:
        return _table([head, *((name, *(in_bytes(size(one)) for one in plans)) for name, size in of.items())])

    memory = {"weights": lambda p: p.weights, "cache": lambda p: p.cache["total"], "total": lambda p: p.memory}
    read: dict[str, Callable[[DevicePlan], float]] = {
        "attention, dense": lambda p: p.traffic.dense,
        f"experts ({', '.join(f'{one.hit:.3g}' for one in plans)} a layer)": lambda p: p.traffic.experts,
        "LM head": lambda p: p.traffic.head,
        "MTP depths": lambda p: p.traffic.depths,
        "keys and values": lambda p: p.traffic.kv,
        "total": lambda p: p.traffic.total,
        "total for each sequence": lambda p: p.traffic.total / p.sequences,
        "from other devices": lambda p: p.received,
    }
    gpus = [("", "memory", *(f"{one.draft_tokens} drafts: fits, least ms a round" for one in plans))]
    for name, gpu in GPUS.items():
        verdicts = (f"{'yes' if one.fits(gpu) else 'no'}, {1e3 * one.seconds(gpu):.3g}" for one in plans)
        gpus.append((name, in_bytes(gpu.memory), *verdicts))
    return [
        f"each of {math.prod(first.mesh.values())} devices ({sizes}) holds\n{rows(memory)}",
        f"and reads in a round, with {sequences} of {first.context:,} tokens\n{rows(read)}",
        f"GPUs (a tenth of the memory is left free)\n{_table(gpus)}",
    ]


def _at_most(option: str, value: int | None, most: int, default: int) -> int:
    if value is not None and value > most:
        raise ValueError(f"argument {option}: {value} is more than this model's {most}")
    return min(default, most) if value is None else value


def _memory(
    config: InklingConfig, quantization: Quantization | None, batch: int, context: int, drafts: int, dtype: str
) -> dict[str, int]:
    """Bytes by part. Activations and the compiler's scratch space come on top."""
    abstract = abstract_parameters(config, dtype, quantization)
    weights = sum(spec.size * spec.dtype.itemsize for spec in abstract.values())
    cache = cache_bytes(config, batch, context, drafts, dtype)
    return {"weights": weights, **cache, "total": weights + cache["total"]}


def _report(found: Inspection) -> list[str]:
    """The paragraphs about the checkpoint itself."""
    layout = f"{found.layout} layout" if found.layout else "a config without weights; sizes are those of bfloat16"
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(found.dtypes.items()))
    rows = [(name, f"{part.parameters:,}", in_bytes(part.bytes)) for name, part in found.parts.items()]
    rows.append(("total", f"{found.total.parameters:,}", in_bytes(found.total.bytes)))
    paragraphs = [
        f"{found.path}: {layout}\ntensors: {dtypes}",
        _table([("part", "parameters", "size"), *rows]),
        "layers\n" + _kinds(_with_formats(found)),
    ]
    if found.quantization:
        experts = found.parts["experts"]
        paragraphs.append(
            f"experts in {found.quantization.format}: {in_bytes(found.saved)} saved; "
            f"all in bf16, they would be {in_bytes(experts.bytes + found.saved)}"
        )
    if found.unused:
        paragraphs.append(f"{len(found.unused)} scales of activations are ignored: only weights are in 4 bits")
    if found.depths:
        paragraphs.append("MTP depths\n" + _kinds(found.depths))
    for field, words in _MISFITS.items():
        if names := getattr(found, field):
            more = [f"... and {len(names) - _SHOWN} more (--json lists all)"] if len(names) > _SHOWN else []
            paragraphs.append(f"{len(names)} tensors {words}\n  " + "\n  ".join(names[:_SHOWN] + more))
    return paragraphs


def _with_formats(found: Inspection) -> list[tuple[str, ...]]:
    """The kinds of the layers, with the format of those whose experts are in 4 bits."""
    formats = [found.quantization and found.quantization.of_layer(i) for i in range(len(found.layers))]
    return [(*kind, format) if format else kind for kind, format in zip(found.layers, formats, strict=True)]


def _kinds(layers: Sequence[tuple[str, ...]]) -> str:
    """A line for each kind of layer with the ids it has, as ranges."""
    ranges: dict[str, list[str]] = {}
    width = 2 + max(len(", ".join(kind)) for kind in layers)
    for kind, run in groupby(enumerate(layers), key=lambda pair: pair[1]):
        ids = [i for i, _ in run]
        ranges.setdefault(", ".join(kind), []).append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]))
    return "\n".join(f"  {kind:<{width}}{', '.join(ids)}" for kind, ids in ranges.items())


def _table(rows: list[tuple[str, ...]]) -> str:
    """Columns aligned: the first to the left, the others, which hold numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(["", *map(_cell, range(len(row)), row, widths)]) for row in rows)


def _cell(column: int, text: str, width: int) -> str:
    return text.rjust(width) if column else text.ljust(width)
