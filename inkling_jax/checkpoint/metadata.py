"""What a checkpoint says about its quantisation: the format, and the modules that it leaves out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inkling_jax.config import read_json
from inkling_jax.errors import CheckpointError
from inkling_jax.quantization import Format
from pallas_kernels.fp4 import BLOCK_OF

_PLACES = (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization"))
_EXCLUSIONS = ("ignore", "exclude", "exclude_modules", "modules_to_not_convert")
# What a method means that says nothing more about its weights.
_USUAL: dict[str, Format] = {"modelopt": "nvfp4", "compressed-tensors": "nvfp4", "quark": "mxfp4"}


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where the metadata stand, the method in their words, its format if this version reads it, and what is left out.

    `excluded` are names of modules or tensors, with "*" for anything, or "re:" and a regular expression.
    """

    place: str
    method: str
    format: Format | None
    excluded: tuple[str, ...]

    def excludes(self, name: str) -> bool:
        """Whether a tensor, or a module that it belongs to, is left out."""
        parts = name.split(".")
        names = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return any(_matches(entry, name) for entry in self.excluded for name in names)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.fullmatch(entry.removeprefix("re:"), name) is not None
    if "*" not in entry:
        return entry == name
    pattern = r"(?:(?<!\d)|(?!\d)).*".join(map(re.escape, entry.split("*")))  # "layers.2*" is not layer 20
    return re.fullmatch(pattern, name) is not None


def read_metadata(directory: Path) -> Metadata | None:
    """The metadata in `config.json`, else in `hf_quant_config.json`; None where neither has any.

    Raises `CheckpointError` for an exclusion list that is none, or a regular expression in it that is none.
    """
    for file, key in _PLACES:
        raw = read_json(directory / file) if (directory / file).exists() else {}
        text = raw.get("text_config")
        found = raw.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
        if found:
            details = found if isinstance(found, Mapping) else {}
            place = f"{directory / file}: {key}"
            return Metadata(place, _method(details), _format(details), _excluded(details, place))
    return None


def _method(details: Mapping[str, Any]) -> str:
    words = (details.get(key) for key in ("quant_method", "quant_algo", "format"))
    return " ".join(str(word) for word in words if word) or "an unnamed method"


def _format(details: Mapping[str, Any]) -> Format | None:
    weights = _weights(details)
    words = " ".join(str(details.get(key) or "").lower() for key in ("quant_algo", "format", "quant_method"))
    group = weights.get("group_size") or details.get("group_size")
    four_bits = weights.get("dtype") == "fp4" or (weights.get("num_bits") == 4 and weights.get("type") == "float")
    found: Format | None = None
    if "nvfp4" in words or "mxfp4" in words:
        found = "nvfp4" if "nvfp4" in words else "mxfp4"
    elif four_bits:
        found = next((format for format in ("nvfp4", "mxfp4") if BLOCK_OF[format] == group), None)
    elif not weights and not details.get("quant_algo") and not details.get("format"):
        found = _USUAL.get(str(details.get("quant_method")))
    return None if found and group and group != BLOCK_OF[found] else found


def _weights(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of the weights: by Quark in `global_quant_config`, by others in the first of `config_groups`."""
    groups = details.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    for section, key in ((details.get("global_quant_config"), "weight"), (first, "weights")):
        found = section.get(key) if isinstance(section, Mapping) else None
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if isinstance(found, Mapping):
            return found
    return {}


def _excluded(details: Mapping[str, Any], place: str) -> tuple[str, ...]:
    entries: list[str] = []
    for key in _EXCLUSIONS:
        found = details.get(key) or []
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise CheckpointError(f"{place}: {key} = {found!r}: expected a list of names")
        entries += found
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(f"{place}: {entry!r} is not a regular expression: {error}") from None
    return tuple(entries)


def write_metadata(format: Format, excluded: list[str]) -> dict[str, Any]:
    """The `quantization_config` of weights in a format, as ModelOpt (NVFP4) and Quark (MXFP4) write it."""
    block = BLOCK_OF[format]
    if format == "nvfp4":
        weights = {"num_bits": 4, "type": "float", "group_size": block, "dynamic": False}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": block,
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": excluded,
        }
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": block, "scale_format": "e8m0", "is_dynamic": False}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "exclude": excluded,
        "export": {"pack_method": "order", "weight_format": "real_quantized"},
    }
