"""The one description of a model, read from either spelling of `config.json`.

Two spellings are in use. The original one is a multimodal config (`inkling_mm_model`) with `text_config` and `mtp_config`
inside, or a text-only `inkling_model`. The one `transformers` writes has a text config of type `inkling_text`, nested or
alone. They share most names and disagree on one: see `_widths`.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, get_args

Layout = Literal["original", "transformers"]

STANDARD_END_TOKENS = (199999, 200006)
PRESETS = ("inkling", "inkling-small", "slice-8")


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file, tensor or field and what was expected."""


class ConfigError(CheckpointError):
    """A field of a model config has a value this package cannot build."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one kind of attention. `extent` is the reach of the relative bias; `window` None means global."""

    heads: int
    kv_heads: int
    head_dim: int
    extent: int
    window: int | None


def _key(*names: str, least: int | None = None) -> Any:
    """A field with its names in config files (the original spelling first) and the least value of an integer."""
    return field(metadata={"keys": names, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingConfig:
    """Everything that decides the shapes and the arithmetic of an Inkling text model and its MTP depths.

    `num_heads`, `num_kv_heads`, `head_dim` and `rel_extent` are those of global layers; local layers have their own, and
    their relative bias reaches as far as their window. `local_layers`, `dense_layers` and `mtp_local` are ids in any
    pattern, kept sorted. `end tokens` always include the standard two where the vocabulary has them.

    Raises `ConfigError` when a field is missing, of the wrong type, out of range or at odds with another.
    """

    hidden_size: int = _key("hidden_size", least=1)
    num_layers: int = _key("num_hidden_layers", least=1)
    num_heads: int = _key("num_attention_heads", least=1)
    num_kv_heads: int = _key("num_key_value_heads", least=1)
    head_dim: int = _key("head_dim", least=1)
    local_num_heads: int = _key("swa_num_attention_heads", least=1)
    local_num_kv_heads: int = _key("swa_num_key_value_heads", least=1)
    local_head_dim: int = _key("swa_head_dim", least=1)
    window: int = _key("sliding_window_size", "sliding_window", least=1)
    rel_dim: int = _key("d_rel", least=1)
    rel_extent: int = _key("rel_extent", least=1)
    local_layers: tuple[int, ...] = _key("local_layer_ids")
    dense_layers: tuple[int, ...] = _key("mlp_layer_types")
    dense_size: int = _key("dense_intermediate_size", "intermediate_size", least=1)
    expert_size: int = _key("intermediate_size", "moe_intermediate_size", least=1)
    num_experts: int = _key("n_routed_experts", "num_local_experts", least=1)
    num_shared_experts: int = _key("n_shared_experts", least=1)
    experts_per_token: int = _key("num_experts_per_tok", least=1)
    route_scale: float = _key("route_scale")
    vocab_size: int = _key("vocab_size", least=1)
    real_vocab_size: int = _key("unpadded_vocab_size", least=1)
    logits_divisor: float = _key("logits_mup_width_multiplier", "embedding_multiplier")
    norm_eps: float = _key("rms_norm_eps")
    log_scaling_floor: int | None = _key("log_scaling_n_floor", least=1)
    log_scaling_alpha: float = _key("log_scaling_alpha")
    conv_width: int = _key("sconv_kernel_size", "conv_kernel_size", least=1)
    max_context: int = _key("model_max_length", "max_position_embeddings", least=1)
    eos_token_ids: tuple[int, ...] = _key("eos_token_id")
    mtp_depths: int = _key("num_nextn_predict_layers", "num_mtp_layers", least=0)
    mtp_local: tuple[int, ...] = _key("mtp_local_layer_ids")
    chain_norm: bool = _key("chain_hidden_post_norm")

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ids(self, "local_layers", self.num_layers)
        _check_ids(self, "dense_layers", self.num_layers)
        _check_ids(self, "mtp_local", self.mtp_depths)
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
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> Self:
        """Read a parsed config of either spelling; `source` names it in errors.

        Raises `ConfigError` naming the source, the field, its value and what was expected. Keys of the text config that
        nothing here reads are reported in one warning.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, found {type(raw).__name__}")
        try:
            return cls(**_read(raw, source))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_path(cls, path: str | Path) -> Self:
        """Read a `config.json`, or the one in a directory. Raises `CheckpointError` when there is none or it is not JSON."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        return cls.from_dict(read_json(path), str(path))

    @classmethod
    def from_name(cls, name: str) -> Self:
        """One of the published sizes: `inkling`, `inkling-small`, or `slice-8`, a few wide layers for measurements."""
        if name not in PRESETS:
            raise ConfigError(f"no config is called {name!r}; expected one of {', '.join(PRESETS)}")
        text = (resources.files("inkling_jax") / "configs" / f"{name}.json").read_text()
        return cls.from_dict(json.loads(text), f"{name}.json")

    def to_dict(self, layout: Layout) -> dict[str, Any]:
        """The config as `config.json` of a layout: nested for the original one, text-only for transformers."""
        if layout not in get_args(Layout):
            raise ConfigError(f"layout = {layout!r}: expected one of {', '.join(get_args(Layout))}")
        return _write_original(self) if layout == "original" else _write_transformers(self)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `CheckpointError` when the file is missing, is not JSON or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint needs {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# Validation ---------------------------------------------------------------------------------------------------------


def _bad(name: str, value: object, expected: str) -> ConfigError:
    keys = next((f.metadata["keys"] for f in fields(InklingConfig) if f.name == name), ())
    spelled = f" ({' or '.join(keys)})" if keys and keys != (name,) else ""
    return ConfigError(f"{name}{spelled} = {value!r}: expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_types(config: InklingConfig) -> None:
    """Integers with their least value, numbers as finite floats, ids as sorted tuples."""
    for spec in fields(config):
        value, least = getattr(config, spec.name), spec.metadata["least"]
        if spec.type is bool:
            if not isinstance(value, bool):
                raise _bad(spec.name, value, "true or false")
        elif spec.type is float:
            if not _is_number(value):
                raise _bad(spec.name, value, "a finite number")
            object.__setattr__(config, spec.name, float(value))
        elif least is not None:
            optional = spec.name == "log_scaling_floor"
            if not (_is_int(value) and value >= least) and not (optional and value is None):
                raise _bad(spec.name, value, f"an integer of at least {least}" + (" or null" if optional else ""))
        else:
            object.__setattr__(config, spec.name, _id_tuple(spec.name, value))


def _id_tuple(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _bad(name, value, "a list of integers")
    ids = tuple(value)
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise _bad(name, list(ids), "integers of at least 0")
    return tuple(sorted(ids))


def _check_ids(config: InklingConfig, name: str, count: int) -> None:
    ids = getattr(config, name)
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


# Reading ------------------------------------------------------------------------------------------------------------

# What a missing field means. The original spelling writes every size; transformers leaves out what equals its defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "original": dict(norm_eps=1e-6, log_scaling_alpha=0.1, max_context=1048576, mtp_depths=0, chain_norm=False),
    "transformers": dict(
        hidden_size=6144, num_layers=66, num_heads=64, num_kv_heads=8, head_dim=128, local_num_heads=64,
        local_num_kv_heads=16, local_head_dim=128, window=512, rel_dim=16, rel_extent=1024, dense_size=24576,
        expert_size=3072, num_experts=256, num_shared_experts=2, experts_per_token=6, route_scale=8.0,
        vocab_size=201024, logits_divisor=24.0, norm_eps=1e-6, log_scaling_alpha=0.1, conv_width=4, max_context=131072,
        mtp_depths=0, mtp_local=(), chain_norm=False,
    ),
}  # fmt: skip

# Switches of which this package knows one position only.
_FIXED = dict(
    use_embed_norm=True, use_sconv=True, use_gate_bias=True, use_global_scale=True, shared_expert_sink=True,
    mtp_hidden_states_first=True, hidden_act="silu", tie_word_embeddings=False,
)  # fmt: skip

# Bookkeeping that changes nothing in the model.
_HARMLESS = frozenset(
    "architectures attention_dropout bos_token_id chunk_size_feed_forward dtype id2label initializer_range "
    "is_encoder_decoder label2id model_type number_of_conv_states output_attentions output_hidden_states pad_token_id "
    "problem_type quantization_config return_dict rms_norm_eps_moe_gate torch_dtype transformers_version use_cache "
    "text_config mtp_config audio_config vision_config image_token_id audio_token_id image_bos_token_id "
    "audio_bos_token_id _name_or_path dense_mlp_idx layer_types intermediate_size".split()
)

_SPECIAL = frozenset(
    "local_layers dense_layers dense_size expert_size eos_token_ids mtp_depths mtp_local chain_norm max_context".split()
)


def _read(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keyword arguments of `InklingConfig` out of either spelling."""
    text, spelling = _text_section(raw)
    mtp = _section(raw, "mtp_config")
    defaults = _DEFAULTS[spelling]
    for name, supported in _FIXED.items():
        if text.get(name, supported) not in (supported, None):
            raise ConfigError(f"{name} = {text[name]!r}: this version supports only {supported!r}")
    values = {
        spec.name: _one(spec.name, [text], spec.metadata["keys"], defaults)
        for spec in fields(InklingConfig)
        if spec.name not in _SPECIAL | {"real_vocab_size", "log_scaling_floor"}
    }
    values["log_scaling_floor"] = text.get("log_scaling_n_floor")
    values["real_vocab_size"] = text.get("unpadded_vocab_size") or values["vocab_size"]
    values["max_context"] = _one(
        "max_context", [raw, text], ("model_max_length", "max_position_embeddings"), defaults
    )
    values["dense_size"], values["expert_size"] = _widths(text, spelling)
    values |= _layer_kinds(text, spelling, values["num_layers"])
    values |= _mtp(text, mtp, defaults)
    values["eos_token_ids"] = _end_tokens(raw, text)
    _report_unknown(text, source)
    return values


def _text_section(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Layout]:
    """The text config and its spelling. Refuses every other model by name."""
    nested = raw.get("model_type") == "inkling_mm_model"
    text = _section(raw, "text_config") if nested or "text_config" in raw else raw
    names = [str(d.get("model_type")) for d in (raw, text)] + [str(a) for a in raw.get("architectures") or ()]
    for name in names:
        if re.match(r"inkling[-_ ]?2", name, re.IGNORECASE):
            raise ConfigError(f"{name} is an Inkling 2 model, a different architecture that this package cannot run")
    if nested and not text:
        raise ConfigError("text_config is missing; an inkling_mm_model needs one")
    kind = text.get("model_type")
    if nested and kind is None:
        kind = "inkling_model" if "dense_intermediate_size" in text else "inkling_text"
    spellings: dict[Any, Layout] = {"inkling_model": "original", "inkling_text": "transformers"}
    if kind not in spellings or (text is not raw and not nested):
        found = raw.get("model_type") if not nested else kind
        expected = "inkling_model or inkling_text" + (" in text_config" if nested else ", or inkling_mm_model")
        raise ConfigError(f"model_type = {found!r}: expected {expected}")
    return text, spellings[kind]


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r}: expected an object")
    return value or {}


def _one(name: str, sections: list[Mapping[str, Any]], keys: Iterable[str], defaults: Mapping[str, Any]) -> Any:
    """The value that any of `keys` has in any of `sections`; all that are present must agree."""
    found = [(key, section[key]) for section in sections for key in keys if section.get(key) is not None]
    for key, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(f"{found[0][0]} = {found[0][1]!r} contradicts {key} = {value!r}")
    if found:
        return found[0][1]
    if name not in defaults:
        raise ConfigError(f"{' or '.join(keys)} is missing")
    return defaults[name]


def _widths(text: Mapping[str, Any], spelling: Layout) -> tuple[Any, Any]:
    """Dense and expert width.

    `intermediate_size` is the width of an expert where `dense_intermediate_size` stands beside it, and the width of a
    dense MLP where `moe_intermediate_size` does.
    """
    if text.get("dense_intermediate_size") is None:
        if spelling == "original" and text.get("moe_intermediate_size") is None:
            raise ConfigError("dense_intermediate_size is missing, so the meaning of intermediate_size is unknown")
        defaults = _DEFAULTS["transformers"] if spelling == "transformers" else {}
        dense = _one("dense_size", [text], ["intermediate_size"], defaults)
        return dense, _one("expert_size", [text], ["moe_intermediate_size"], defaults)
    expert = _one("expert_size", [text], ["intermediate_size", "moe_intermediate_size"], {})
    return text["dense_intermediate_size"], expert


def _layer_kinds(text: Mapping[str, Any], spelling: Layout, count: Any) -> dict[str, Any]:
    """Which layers are local and which dense, from ids or from a list of kinds; both may stand there if they agree."""
    if not _is_int(count):
        raise _bad("num_layers", count, "an integer of at least 1")
    local = _agree(
        ("local_layer_ids", _ids(text, "local_layer_ids")),
        ("layer_types", _typed(text, "layer_types", count, ("hybrid_sliding", "hybrid"))),
    )
    if local is None and spelling == "original":
        raise ConfigError("local_layer_ids is missing")
    prefix = text.get("dense_mlp_idx")
    if prefix is not None and not (_is_int(prefix) and 0 <= prefix <= count):
        raise ConfigError(f"dense_mlp_idx = {prefix!r}: expected an integer from 0 to num_hidden_layers = {count}")
    dense = _agree(
        ("dense_mlp_idx", None if prefix is None else tuple(range(prefix))),
        ("mlp_layer_types", _typed(text, "mlp_layer_types", count, ("dense", "sparse"))),
    )
    if dense is None and spelling == "original":
        raise ConfigError("dense_mlp_idx is missing")
    default_local = tuple(i for i in range(count) if i % 6 != 5)  # what transformers documents for no ids at all
    return {"local_layers": default_local if local is None else local, "dense_layers": dense or ()}


def _ids(section: Mapping[str, Any], key: str) -> tuple[Any, ...] | None:
    value = section.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(_is_int(i) for i in value):
        raise ConfigError(f"{key} = {value!r}: expected a list of integers")
    return tuple(sorted(value))


def _typed(text: Mapping[str, Any], key: str, count: int, kinds: tuple[str, str]) -> tuple[int, ...] | None:
    """The ids of the layers of the first kind, out of a list with one kind a layer."""
    value = text.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != count or not all(kind in kinds for kind in value):
        raise ConfigError(f"{key} = {value!r}: expected {count} entries, each of {' or '.join(kinds)}")
    return tuple(i for i, kind in enumerate(value) if kind == kinds[0])


def _agree(first: tuple[str, Any], second: tuple[str, Any]) -> Any:
    if first[1] is not None and second[1] is not None and first[1] != second[1]:
        raise ConfigError(f"{first[0]} names layers {list(first[1])}, {second[0]} names {list(second[1])}")
    return second[1] if first[1] is None else first[1]


def _mtp(text: Mapping[str, Any], mtp: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    depths = _one("mtp_depths", [mtp, text], ("num_nextn_predict_layers", "num_mtp_layers"), defaults)
    local = _agree(
        ("mtp_config.local_layer_ids", _ids(mtp, "local_layer_ids")),
        ("mtp_local_layer_ids", _ids(text, "mtp_local_layer_ids")),
    )
    if local is None and depths and "mtp_local" not in defaults:
        raise ConfigError("mtp_config.local_layer_ids is missing")
    chain = _one("chain_norm", [mtp, text], ("chain_hidden_post_norm",), defaults)
    return {"mtp_depths": depths, "mtp_local": local or (), "chain_norm": chain}


def _end_tokens(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[Any, ...]:
    """The end token or tokens; the top level wins, since a nested text config may carry a library's placeholder."""
    value = raw.get("eos_token_id")
    value = text.get("eos_token_id") if value is None else value
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id = {value!r}: expected a token id or a list of them")
    return tuple(ids)


def _report_unknown(text: Mapping[str, Any], source: str) -> None:
    known = _HARMLESS | _FIXED.keys() | {key for spec in fields(InklingConfig) for key in spec.metadata["keys"]}
    unknown = sorted(set(text) - known)
    if unknown:
        warnings.warn(f"{source}: ignoring unknown keys of the text config: {', '.join(unknown)}", stacklevel=4)


# Writing ------------------------------------------------------------------------------------------------------------


def _plain(config: InklingConfig, spelling: int) -> dict[str, Any]:
    """The fields both spellings hold under a name of their own."""
    skip = _SPECIAL - {"chain_norm"} | {"chain_norm"}
    return {
        spec.metadata["keys"][min(spelling, len(spec.metadata["keys"]) - 1) if spec.name == "conv_width" else 0]: getattr(
            config, spec.name
        )
        for spec in fields(config)
        if spec.name not in skip
    }


def _write_original(config: InklingConfig) -> dict[str, Any]:
    prefix = config.dense_layers == tuple(range(len(config.dense_layers)))
    dense = {"dense_mlp_idx": len(config.dense_layers)} if prefix else {"mlp_layer_types": _mlp_types(config)}
    text = {
        "model_type": "inkling_model",
        **_plain(config, 0),
        "local_layer_ids": list(config.local_layers),
        **dense,
        "dense_intermediate_size": config.dense_size,
        "intermediate_size": config.expert_size,
        **{name: value for name, value in _FIXED.items() if name.startswith("use_") or name == "shared_expert_sink"},
    }
    mtp = {
        "num_nextn_predict_layers": config.mtp_depths,
        "chain_hidden_post_norm": config.chain_norm,
        "local_layer_ids": list(config.mtp_local),
    }
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        **_top(config, "model_max_length"),
        "text_config": text,
        "mtp_config": mtp,
    }


def _write_transformers(config: InklingConfig) -> dict[str, Any]:
    return {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_text",
        "dtype": "bfloat16",
        **_top(config, "max_position_embeddings"),
        **_plain(config, 1),
        "layer_types": ["hybrid_sliding" if config.is_local(i) else "hybrid" for i in range(config.num_layers)],
        "mlp_layer_types": _mlp_types(config),
        "intermediate_size": config.dense_size,
        "moe_intermediate_size": config.expert_size,
        "hidden_act": "silu",
        "shared_expert_sink": True,
        "num_mtp_layers": config.mtp_depths,
        "mtp_local_layer_ids": list(config.mtp_local),
        "chain_hidden_post_norm": config.chain_norm,
        "mtp_hidden_states_first": True,
    }


def _top(config: InklingConfig, context_key: str) -> dict[str, Any]:
    ends = config.eos_token_ids
    return {"eos_token_id": ends[0] if len(ends) == 1 else list(ends), context_key: config.max_context}


def _mlp_types(config: InklingConfig) -> list[str]:
    return ["dense" if config.is_dense(i) else "sparse" for i in range(config.num_layers)]
