"""What is in a checkpoint, from its headers; or what would be, from a config alone."""

import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inkling_jax.config import InklingConfig
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Quantization
from inkling_jax.tokenizer import Tokenizer
from pallas_kernels.fp4 import VALUES_A_WORD

from .files import INDEX, STORED, Tensor, list_tensors
from .hub import resolve
from .metadata import read_metadata
from .names import FileLayout
from .orbax import Saved, is_orbax, open_orbax
from .packed import layer_of
from .plan import Packed, Plan, Source, make_plan

# The parts of the model, in the order of reading; the first pattern that matches a path decides.
_PARTS = (
    ("mtp", r"mtp"),
    ("embedding", r"embed\.weight"),
    ("unembedding", r"unembed\."),
    ("norms and convolutions", r".*(norm|conv)\.weight$"),
    ("attention", r".*\.attn\."),
    ("router", r".*\.router\."),
    ("experts", r".*\.experts\."),
    ("shared experts", r".*\.shared\."),
    ("dense mlp", r".*\.mlp\."),
)
TOWERS = "towers (not loaded)"


@dataclass(frozen=True, slots=True)
class PartSize:
    """Parameters of a part, and their bytes as stored."""

    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: "PartSize") -> "PartSize":
        return PartSize(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint at a glance.

    `layout` is None without weights, when sizes are those of bf16 weights. `layers` and `depths` hold for each layer
    its kind of attention ("local" or "global") and of MLP ("dense" or "experts"). `quantization` says which layers have
    experts in 4 bits, `saved` by how many bytes they are smaller than in bf16. The lists hold tensor names; `unused`
    are scales of activations beside such experts, which are ignored.
    """

    path: str
    config: InklingConfig
    layout: FileLayout | None
    parts: dict[str, PartSize]
    dtypes: dict[str, int]
    layers: list[tuple[str, str]]
    depths: list[tuple[str, str]]
    quantization: Quantization | None = None
    saved: int = 0
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)

    @property
    def total(self) -> PartSize:
        """Parameters and bytes of all parts together, towers included where there are any."""
        return sum(self.parts.values(), PartSize())

    @property
    def fits(self) -> bool:
        """Whether every tensor is there, is expected, and can be read."""
        return not (self.missing or self.unexpected or self.misshapen or self.quantised)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"total": asdict(self.total), "fits": self.fits}


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Look at a checkpoint (as `resolve` takes it), or at a `config.json`, with or without weights beside it.

    Reads no tensor data. What does not fit is listed, not raised. Raises `CheckpointError` where config or files cannot
    be read at all.
    """
    file = Path(path)
    alone = file.is_file()
    directory = file.parent if alone else resolve(path)
    config = InklingConfig.from_path(file if alone else directory)
    if not alone:
        Tokenizer.from_directory(directory)  # raises where it is no tokenizer
    abstract = abstract_parameters(config)
    if not alone and is_orbax(directory):
        return _inspect_saved(str(path), open_orbax(directory), config)
    if alone or not ((directory / INDEX).exists() or any(directory.glob("*.safetensors"))):
        sizes = {path: PartSize(spec.size, spec.size * spec.dtype.itemsize) for path, spec in abstract.items()}
        dtypes = Counter(_code(spec.dtype) for spec in abstract.values())
        return Inspection(str(path), config, None, _parts(sizes), dict(dtypes), *_layers(config))
    tensors = list_tensors(directory)
    shapes = {path: spec.shape for path, spec in abstract.items()}
    plan = make_plan(tensors, shapes, config, read_metadata(directory))
    sizes = {path: _size(source, shapes[path]) for path, source in plan.sources.items()}
    parts = _parts(sizes)
    if plan.towers:
        parts[TOWERS] = _stored_size(tuple(plan.towers))
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    saved = sum(2 * sizes[path].parameters - sizes[path].bytes for path in plan.packed)
    about = (str(path), config, plan.variant.layout, parts, dict(dtypes), *_layers(config))
    return Inspection(*about, plan.quantization, saved, plan.unused, *_misfits(plan))


def _inspect_saved(path: str, saved: Saved, config: InklingConfig) -> Inspection:
    saved.compare({path: spec.shape for path, spec in abstract_parameters(config).items()})
    sizes: dict[str, PartSize] = {}
    for name, spec in saved.arrays.items():
        weight, _, leaf = name.rpartition(".")
        packed = layer_of(weight) is not None
        parameters = VALUES_A_WORD * spec.size if packed and leaf == "codes" else 0 if packed else spec.size
        at = weight if packed else name
        sizes[at] = sizes.get(at, PartSize()) + PartSize(parameters, spec.size * spec.dtype.itemsize)
    parts = _parts(sizes)
    if saved.towers:
        parts[TOWERS] = sum((PartSize(x.size, x.size * x.dtype.itemsize) for x in saved.towers.values()), PartSize())
    dtypes = Counter(_code(spec.dtype) for spec in [*saved.arrays.values(), *saved.towers.values()])
    saved_bytes = sum(2 * size.parameters - size.bytes for at, size in sizes.items() if f"{at}.codes" in saved.arrays)
    about = (path, config, "orbax", parts, dict(dtypes), *_layers(config))
    misfits = (saved.missing, saved.unexpected, saved.misshapen, [])
    return Inspection(*about, saved.quantization, saved_bytes, [], *misfits)


def _misfits(plan: Plan) -> tuple[list[str], ...]:
    return plan.missing, plan.unexpected, plan.misshapen, plan.quantised


def _size(source: Source | Packed, shape: tuple[int, ...]) -> PartSize:
    stored = _stored_size(source.tensors)
    return PartSize(math.prod(shape), stored.bytes) if isinstance(source, Packed) else stored


def _code(dtype: np.dtype) -> str:
    return next((code for code, known in (STORED | {"U32": np.dtype(np.uint32)}).items() if known == dtype), dtype.name)


def _stored_size(tensors: tuple[Tensor, ...]) -> PartSize:
    return PartSize(sum(t.size for t in tensors), sum(t.size * t.itemsize for t in tensors))


def _parts(sizes: dict[str, PartSize]) -> dict[str, PartSize]:
    parts = {name: PartSize() for name, _ in _PARTS}
    for path, size in sizes.items():
        part = next(name for name, pattern in _PARTS if re.match(pattern, path))
        parts[part] += size
    return {name: size for name, size in parts.items() if size.parameters}


def _layers(config: InklingConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    def kind(local: bool, dense: bool) -> tuple[str, str]:
        return "local" if local else "global", "dense" if dense else "experts"

    layers = [kind(config.is_local(i), config.is_dense(i)) for i in range(config.num_layers)]
    return layers, [kind(config.mtp_is_local(d), True) for d in range(config.mtp_depths)]
