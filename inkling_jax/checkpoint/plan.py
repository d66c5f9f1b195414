"""What a checkpoint holds, set against what a model needs: found before a byte of any tensor is read."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inkling_jax.config import InklingConfig, read_json
from inkling_jax.errors import CheckpointError

from .files import DTYPES, Tensor
from .names import VARIANTS, Form, Shape, Variant, is_tower, stored

# Companions of quantised weights, as the exporters name them.
_COMPANION = re.compile(
    r"(\.scale2?|(weight|input)_(global_)?scale(_2|_inv)?|weight_packed|\.input_amax|\.original_shape)$"
)


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors that hold one parameter, and their form."""

    tensors: tuple[Tensor, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each parameter is, and what does not fit: lists of tensor names, or of lines that begin with one."""

    variant: Variant
    sources: dict[str, Source]
    towers: list[Tensor] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)

    def check(self, directory: Path) -> None:
        """Raise one `CheckpointError` that lists everything that does not fit."""
        groups = {
            "quantised tensors (this version reads bf16, f16 and f32)": self.quantised,
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


def make_plan(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], config: InklingConfig) -> Plan:
    """Find every parameter among the tensors. A parameter may stand in another layout than its neighbours.

    `shapes` are those of the parameters by dotted path; what does not fit is listed in the plan, nothing raises.
    """
    variant = detect_variant(tensors, shapes)
    plan = Plan(variant, {}, [tensor for name, tensor in tensors.items() if is_tower(name)])
    used = {tensor.name for tensor in plan.towers}
    for path, shape in shapes.items():
        source = plan.sources[path] = _locate(plan, path, tensors)
        used |= {tensor.name for tensor in source.tensors}
        if len(source.tensors) == len(source.form.shapes(shape)):
            for tensor, expected in zip(source.tensors, source.form.shapes(shape), strict=True):
                _judge(plan, tensor, expected, config if path == "unembed.weight" else None)
    for name in sorted(tensors.keys() - used):
        quantised = tensors[name].dtype not in DTYPES or _COMPANION.search(name)
        (plan.quantised if quantised else plan.unexpected).append(name)
    _drop_packed(plan)
    return plan


def _locate(plan: Plan, path: str, tensors: Mapping[str, Tensor]) -> Source:
    """The tensors of a parameter under the first set of names that is complete; else note which are missing."""
    places = [stored(path, variant) for variant in (plan.variant, *VARIANTS)]
    place = next((place for place in places if tensors.keys() >= set(place.names)), places[0])
    plan.missing.extend(name for name in place.names if name not in tensors)
    return Source(tuple(tensors[name] for name in place.names if name in tensors), place.form)


def detect_variant(names: Mapping[str, object], paths: Mapping[str, object]) -> Variant:
    """The variant that most of the names belong to."""
    votes = Counter(v for v in VARIANTS for path in paths for name in stored(path, v).names if name in names)
    return max(VARIANTS, key=lambda variant: votes[variant])


def _judge(plan: Plan, tensor: Tensor, expected: Shape, head: InklingConfig | None) -> None:
    """Note a tensor that cannot be read. The unembedding may leave out the rows that pad the vocabulary."""
    if tensor.dtype not in DTYPES:
        plan.quantised.append(f"{tensor.name} ({tensor.dtype})")
    elif tensor.shape != expected and not (head and tensor.shape == (head.real_vocab_size, head.hidden_size)):
        plan.misshapen.append(f"{tensor.name}: {list(tensor.shape)} in {tensor.file.name}, expected {list(expected)}")


def _drop_packed(plan: Plan) -> None:
    """A weight whose packed form is there is quantised, not missing."""
    packed = {re.sub(r"[._](weight_)?packed$", "", name) for name in plan.quantised}
    plan.missing[:] = [name for name in plan.missing if not {name, name.removesuffix("_weight")} & packed]


def refuse_quantised(directory: Path) -> None:
    """Raise `CheckpointError` for a checkpoint whose metadata says that it is quantised, naming the file and method."""
    for file, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        raw = read_json(directory / file) if (directory / file).exists() else {}
        found = raw.get(key) or (raw.get("text_config") or {}).get(key)
        if found:
            details = found if isinstance(found, dict) else {}
            method = details.get("quant_method") or details.get("quant_algo") or "an unnamed method"
            what = f"{key} says that the weights are quantised by {method}"
            raise CheckpointError(f"{directory / file}: {what}; this version reads bf16, f16 and f32")
