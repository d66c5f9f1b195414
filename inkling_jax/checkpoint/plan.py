"""What a checkpoint holds, set against what a model needs: found before a byte of any tensor is read."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inkling_jax.config import InklingConfig
from inkling_jax.errors import CheckpointError
from inkling_jax.quantization import Quantization
from pallas_kernels.fp4 import BLOCK_OF

from .files import DTYPES, Tensor
from .metadata import Metadata
from .names import VARIANTS, Form, Shape, Stored, Variant, is_tower, stored
from .packed import Spelling, find_packed, layer_of, leaf_shapes, unused_beside

# Companions of quantised weights, as the exporters name them.
_COMPANION = re.compile(
    r"(\.scale2?|(weight|input)_(global_)?scale(_2|_inv)?|weight_packed|\.input_amax|\.original_shape)$"
)
_READ = "this version reads bf16, f16 and f32, and routed experts in NVFP4 and MXFP4"


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors that hold one parameter, and their form."""

    tensors: tuple[Tensor, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors that hold one weight in 4 bits, and how they are spelled."""

    spelling: Spelling
    leaves: dict[str, Source]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for source in self.leaves.values() for tensor in source.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each parameter is, and what does not fit: lists of tensor names, or of lines that begin with one.

    A weight in 4 bits is one parameter, under the path that it would have unpacked. `unused` are scales of activations
    beside such weights: activations are not quantised here.
    """

    variant: Variant
    sources: dict[str, Source | Packed]
    towers: list[Tensor] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)

    @property
    def packed(self) -> dict[str, Packed]:
        """The weights in 4 bits."""
        return {path: source for path, source in self.sources.items() if isinstance(source, Packed)}

    @property
    def quantization(self) -> Quantization | None:
        """What the checkpoint holds in 4 bits."""
        return quantization_in(self.packed)

    def check(self, directory: Path) -> None:
        """Raise one `CheckpointError` that lists everything that does not fit."""
        groups = {
            f"quantised tensors, or words about them, that cannot be read ({_READ})": self.quantised,
            "missing tensors": self.missing,
            "unexpected tensors": self.unexpected,
            "tensors of the wrong shape": self.misshapen,
        }
        lines = [f"  {len(names)} {label}:\n    " + "\n    ".join(names) for label, names in groups.items() if names]
        if self.missing and all(name.startswith("model.mtp.") for name in self.missing):
            lines.append("  Only MTP tensors are missing: they may have been left behind in a file of their own.")
        if lines:
            head = f"{directory}: not the model that config.json describes ({self.variant.layout} layout)"
            raise CheckpointError("\n".join([head, *lines]))


def quantization_in(packed: Mapping[str, Packed]) -> Quantization | None:
    """The layers and the format of packed weights by path."""
    if not packed:
        return None
    layers = tuple(int(path.split(".")[1]) for path in packed)
    return Quantization(next(iter(packed.values())).spelling.format, layers)


def make_plan(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    config: InklingConfig,
    metadata: Metadata | None,
) -> Plan:
    """Find every parameter among the tensors. A parameter may stand in another layout than its neighbours.

    `shapes` are those of the parameters by dotted path, unpacked; what does not fit is listed in the plan, nothing
    raises. Which weights are packed, the tensors say; in what format, the metadata, which must not contradict them.
    """
    variant = detect_variant(tensors, shapes)
    plan = Plan(variant, {}, [tensor for name, tensor in tensors.items() if is_tower(name)])
    used = {tensor.name for tensor in plan.towers}
    for path, shape in shapes.items():
        places = [stored(path, variant) for variant in (plan.variant, *VARIANTS)]
        found = None
        if layer_of(path) is not None:
            found = find_packed(tensors, places, metadata.format if metadata else None)
        if found:
            used |= _plan_packed(plan, path, shape, *found, tensors, metadata)
        else:
            used |= _plan_plain(plan, path, shape, places, tensors, config)
    for name in sorted(tensors.keys() - used):
        quantised = tensors[name].dtype not in DTYPES or _COMPANION.search(name)
        (plan.quantised if quantised else plan.unexpected).append(name)
    _note_halves(plan)
    _note_metadata(plan, metadata)
    return plan


def _plan_plain(
    plan: Plan,
    path: str,
    shape: Shape,
    places: list[Stored],
    tensors: Mapping[str, Tensor],
    config: InklingConfig,
) -> set[str]:
    """A parameter under the first set of names that is complete; else note which are missing. Returns those found."""
    place = next((place for place in places if tensors.keys() >= set(place.names)), places[0])
    plan.missing.extend(name for name in place.names if name not in tensors)
    found = tuple(tensors[name] for name in place.names if name in tensors)
    plan.sources[path] = Source(found, place.form)
    if len(found) == len(place.names):
        for tensor, expected in zip(found, place.form.shapes(shape), strict=True):
            _judge(plan, tensor, expected, config if path == "unembed.weight" else None)
    return {tensor.name for tensor in found}


def _plan_packed(
    plan: Plan,
    path: str,
    shape: Shape,
    spelling: Spelling,
    place: Stored,
    tensors: Mapping[str, Tensor],
    metadata: Metadata | None,
) -> set[str]:
    """A weight in 4 bits. Returns the names of all tensors that belong to it."""
    names = spelling.names(place.names[0])
    unused = unused_beside(names["codes"], place.names[0])
    beside = {name for name in tensors if unused.fullmatch(name)}
    plan.unused.extend(sorted(name for name in beside if not name.endswith("original_shape")))
    leaves = {
        leaf: Source((tensors[name],), spelling.form(leaf, place.form))
        for leaf, name in names.items()
        if name in tensors
    }
    plan.sources[path] = Packed(spelling, leaves)
    block = BLOCK_OF[spelling.format]
    if problem := _contradiction(names["codes"], spelling, metadata):
        plan.quantised.append(f"{names['codes']} ({problem})")
        return set(names.values()) | beside
    plan.missing.extend(name for name in names.values() if name not in tensors)
    if shape[-1] % block:
        plan.misshapen.append(f"{names['codes']}: an input of {shape[-1]} is not whole blocks of {block}")
        return set(names.values()) | beside
    expected = leaf_shapes(shape, spelling.format)
    for leaf, source in leaves.items():
        [tensor], [wanted] = source.tensors, source.form.shapes(expected[leaf])
        if tensor.dtype != spelling.dtype(leaf):
            plan.quantised.append(f"{tensor.name} ({tensor.dtype}, expected {spelling.dtype(leaf)})")
        elif tensor.shape != wanted:
            _note_shape(plan, tensor, wanted)
    return set(names.values()) | beside


def _contradiction(codes: str, spelling: Spelling, metadata: Metadata | None) -> str | None:
    """Why a packed tensor cannot be what it looks like, None where it can."""
    if metadata is None:
        return "packed, but neither config.json nor hf_quant_config.json says how"
    if metadata.format is None:
        return f"quantised by {metadata.method}, which {metadata.place} names"
    if metadata.format != spelling.format:
        return f"packed as {spelling.format}, but {metadata.place} says {metadata.format}"
    if metadata.excludes(codes):
        return f"packed, but {metadata.place} leaves it out"
    return None


def _note_halves(plan: Plan) -> None:
    """A layer's experts are packed as a whole or not at all."""
    for path, source in plan.packed.items():
        other = path.removesuffix("w13") + "w2" if path.endswith("w13") else path.removesuffix("w2") + "w13"
        half = plan.sources[other]
        if isinstance(half, Source) and half.tensors:
            plan.quantised.append(f"{source.tensors[0].name} (packed, but {half.tensors[0].name} is not)")


def _note_metadata(plan: Plan, metadata: Metadata | None) -> None:
    """Metadata must be of something."""
    if metadata and not plan.packed:
        what = "no routed experts are packed" if metadata.format else "this version does not read it"
        plan.quantised.append(f"{metadata.place} says that the weights are quantised by {metadata.method}, but {what}")


def detect_variant(names: Mapping[str, object], paths: Mapping[str, object]) -> Variant:
    """The variant that most of the names belong to."""
    votes = Counter(v for v in VARIANTS for path in paths for name in stored(path, v).names if name in names)
    return max(VARIANTS, key=lambda variant: votes[variant])


def _judge(plan: Plan, tensor: Tensor, expected: Shape, head: InklingConfig | None) -> None:
    """Note a tensor that cannot be read. The unembedding may leave out the rows that pad the vocabulary."""
    if tensor.dtype not in DTYPES:
        plan.quantised.append(f"{tensor.name} ({tensor.dtype})")
    elif tensor.shape != expected and not (head and tensor.shape == (head.real_vocab_size, head.hidden_size)):
        _note_shape(plan, tensor, expected)


def _note_shape(plan: Plan, tensor: Tensor, expected: Shape) -> None:
    plan.misshapen.append(f"{tensor.name}: {list(tensor.shape)} in {tensor.file.name}, expected {list(expected)}")
