"""The one description of a model, read from either spelling of `config.json`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from inkling_jax import spelling
from inkling_jax.errors import CheckpointError, ConfigError
from inkling_jax.spelling import KEYS, STANDARD_END_TOKENS, Layout

__all__ = ["PRESETS", "AttentionShape", "CheckpointError", "ConfigError", "InklingConfig", "Layout", "read_json"]

PRESETS = ("inkling", "inkling-small", "slice-8", "small-slice")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one kind of attention. `extent` is the reach of the relative bias; `window` None means global."""

    heads: int
    kv_heads: int
    head_dim: int
    extent: int
    window: int | None


def _integer(least: int) -> Any:
    return field(metadata={"least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingConfig:
    """Everything that decides the shapes and the arithmetic of an Inkling text model and its MTP depths.

    `num_heads`, `num_kv_heads`, `head_dim` and `rel_extent` are those of global layers; local layers have their own,
    and their relative bias reaches as far as their window. `local_layers`, `dense_layers` and `mtp_local` are ids in
    any pattern, kept sorted. `eos_token_ids` always holds the standard two as well, and only ids that exist.

    Raises `ConfigError` when a field is of the wrong type, out of range or at odds with another.
    """

    hidden_size: int = _integer(1)
    num_layers: int = _integer(1)
    num_heads: int = _integer(1)
    num_kv_heads: int = _integer(1)
    head_dim: int = _integer(1)
    local_num_heads: int = _integer(1)
    local_num_kv_heads: int = _integer(1)
    local_head_dim: int = _integer(1)
    window: int = _integer(1)
    rel_dim: int = _integer(1)
    rel_extent: int = _integer(1)
    local_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    dense_size: int = _integer(1)
    expert_size: int = _integer(1)
    num_experts: int = _integer(1)
    num_shared_experts: int = _integer(1)
    experts_per_token: int = _integer(1)
    route_scale: float
    vocab_size: int = _integer(1)
    real_vocab_size: int = _integer(1)
    logits_divisor: float
    norm_eps: float
    log_scaling_floor: int | None = _integer(1)
    log_scaling_alpha: float
    conv_width: int = _integer(1)
    max_context: int = _integer(1)
    eos_token_ids: tuple[int, ...]
    mtp_depths: int = _integer(0)
    mtp_local: tuple[int, ...]
    chain_norm: bool

    def __post_init__(self) -> None:
        for spec in fields(self):
            object.__setattr__(self, spec.name, _checked(spec, getattr(self, spec.name)))
        for name, count in (
            ("local_layers", self.num_layers),
            ("dense_layers", self.num_layers),
            ("mtp_local", self.mtp_depths),
        ):
            _check_ids(name, getattr(self, name), count)
        _check_relations(self)
        ends = {*self.eos_token_ids, *STANDARD_END_TOKENS}
        object.__setattr__(self, "eos_token_ids", tuple(sorted(i for i in ends if i < self.real_vocab_size)))

    def attention(self, local: bool) -> AttentionShape:
        """The attention sizes of local or of global layers."""
        if local:
            shape = (self.local_num_heads, self.local_num_kv_heads, self.local_head_dim)
            return AttentionShape(*shape, extent=self.window, window=self.window)
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, extent=self.rel_extent, window=None)

    def is_local(self, i: int) -> bool:
        """Whether backbone layer `i` attends only to its window."""
        return i in self.local_layers

    def is_dense(self, i: int) -> bool:
        """Whether backbone layer `i` has a dense MLP instead of experts."""
        return i in self.dense_layers

    def mtp_is_local(self, d: int) -> bool:
        """Whether MTP depth `d` attends only to its window."""
        return d in self.mtp_local

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> "InklingConfig":
        """Read a parsed config of either spelling; `source` names it in errors.

        Raises `ConfigError` naming the source, the field, its value and what was expected. Keys of the text config that
        nothing here reads are reported in one warning.
        """
        try:
            return cls(**spelling.read(raw, source))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_path(cls, path: str | Path) -> "InklingConfig":
        """Read a `config.json`, or the one in a directory.

        Raises `CheckpointError` when there is none or it is not JSON, else as `from_dict`.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_name(cls, name: str) -> "InklingConfig":
        """One of the published sizes, `inkling` or `inkling-small`, or a few layers of their widths for measurements.

        `slice-8` is of Inkling's: 8 layers of 64 experts and one MTP depth. `small-slice` is of Inkling-Small's: 6
        layers with all 256 experts and 4 depths, 59 GB in bfloat16. Both fit one card.
        """
        if name not in PRESETS:
            raise ConfigError(f"no config is called {name!r}; expected one of {', '.join(PRESETS)}")
        text = (resources.files("inkling_jax") / "configs" / f"{name}.json").read_text(encoding="utf-8")
        return cls.from_dict(json.loads(text), f"{name}.json")

    def to_dict(self, layout: Layout) -> dict[str, Any]:
        """The config as `config.json` of a layout: nested for the original one, text-only for transformers."""
        return spelling.write(self, layout)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CheckpointError` when the file is missing, is not JSON or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint needs {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _bad(name: str, value: object, expected: str) -> ConfigError:
    keys = KEYS[name]
    spelled = "" if keys == (name,) else f" ({' or '.join(keys)})"
    return ConfigError(f"{name}{spelled} = {value!r}: expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(spec: Any, value: Any) -> Any:
    """A field's value in its final type: integers with their least value, finite floats, ids as sorted tuples."""
    if spec.type is bool:
        if not isinstance(value, bool):
            raise _bad(spec.name, value, "true or false")
        return value
    if spec.type is float:
        if not (_is_int(value) or (isinstance(value, float) and math.isfinite(value))):
            raise _bad(spec.name, value, "a finite number")
        return float(value)
    if "least" not in spec.metadata:
        return _id_tuple(spec.name, value)
    least, optional = spec.metadata["least"], spec.name == "log_scaling_floor"
    if not (_is_int(value) and value >= least) and not (optional and value is None):
        raise _bad(spec.name, value, f"an integer of at least {least}" + (" or null" if optional else ""))
    return value


def _id_tuple(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _bad(name, value, "a list of integers")
    ids = tuple(value)
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise _bad(name, list(ids), "integers of at least 0")
    return tuple(sorted(ids))


def _check_ids(name: str, ids: tuple[int, ...], count: int) -> None:
    if len(set(ids)) != len(ids):
        raise _bad(name, list(ids), "every id once")
    if ids and ids[-1] >= count:
        raise _bad(name, list(ids), f"ids below {count}")


def _check_relations(config: InklingConfig) -> None:
    for prefix in ("", "local_"):
        heads, kv_heads = getattr(config, f"{prefix}num_heads"), getattr(config, f"{prefix}num_kv_heads")
        if heads % kv_heads:
            raise _bad(f"{prefix}num_kv_heads", kv_heads, f"a divisor of {prefix}num_heads = {heads}")
    if config.experts_per_token > config.num_experts:
        raise _bad("experts_per_token", config.experts_per_token, f"at most num_experts = {config.num_experts}")
    if config.real_vocab_size > config.vocab_size:
        raise _bad("real_vocab_size", config.real_vocab_size, f"at most vocab_size = {config.vocab_size}")
    for name in ("norm_eps", "logits_divisor", "route_scale"):
        if getattr(config, name) <= 0:
            raise _bad(name, getattr(config, name), "a number above 0")
    if config.log_scaling_alpha < 0:
        raise _bad("log_scaling_alpha", config.log_scaling_alpha, "a number of at least 0")
