"""The two spellings of `config.json` and how they become the fields of `InklingConfig`.

The original one is a multimodal config (`inkling_mm_model`) with `text_config` and `mtp_config` inside, or a text-only
`inkling_model`. The one that `transformers` writes has a text config of type `inkling_text`, nested or alone. They
share most names and disagree on the meaning of one: see `_widths`.
"""

import itertools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from inkling_jax.errors import ConfigError

if TYPE_CHECKING:
    from inkling_jax.config import InklingConfig

Layout = Literal["original", "transformers"]
Section = Mapping[str, Any]

STANDARD_END_TOKENS = (199999, 200006)

# The fields of `InklingConfig` and their names in files.
KEYS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "local_num_heads": ("swa_num_attention_heads",),
    "local_num_kv_heads": ("swa_num_key_value_heads",),
    "local_head_dim": ("swa_head_dim",),
    "window": ("sliding_window_size", "sliding_window"),
    "rel_dim": ("d_rel",),
    "rel_extent": ("rel_extent",),
    "local_layers": ("local_layer_ids", "layer_types"),
    "dense_layers": ("dense_mlp_idx", "mlp_layer_types"),
    "dense_size": ("dense_intermediate_size", "intermediate_size"),
    "expert_size": ("intermediate_size", "moe_intermediate_size"),
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_shared_experts": ("n_shared_experts",),
    "experts_per_token": ("num_experts_per_tok",),
    "route_scale": ("route_scale",),
    "vocab_size": ("vocab_size",),
    "real_vocab_size": ("unpadded_vocab_size",),
    "logits_divisor": ("logits_mup_width_multiplier", "embedding_multiplier"),
    "norm_eps": ("rms_norm_eps",),
    "log_scaling_floor": ("log_scaling_n_floor",),
    "log_scaling_alpha": ("log_scaling_alpha",),
    "conv_width": ("sconv_kernel_size", "conv_kernel_size"),
    "max_context": ("model_max_length", "max_position_embeddings"),
    "eos_token_ids": ("eos_token_id",),
    "mtp_depths": ("num_nextn_predict_layers", "num_mtp_layers"),
    "mtp_local": ("mtp_config.local_layer_ids", "mtp_local_layer_ids"),
    "chain_norm": ("chain_hidden_post_norm",),
}

# Fields that need more than looking up one of their names in the text config.
# fmt: off
_DERIVED = frozenset([
    "local_layers", "dense_layers", "dense_size", "expert_size", "max_context", "eos_token_ids", "mtp_depths",
    "mtp_local", "chain_norm",
])
# fmt: on

# What a missing or null field means. The original spelling writes every size; transformers has a default for each.
_OPTIONAL = {"real_vocab_size": None, "log_scaling_floor": None, "norm_eps": 1e-6, "log_scaling_alpha": 0.1}
_NO_MTP = {"mtp_depths": 0, "chain_norm": False}
# fmt: off
_DEFAULTS: dict[Layout, dict[str, Any]] = {
    "original": {**_OPTIONAL, **_NO_MTP, "max_context": 1048576},
    "transformers": {
        **_OPTIONAL, **_NO_MTP, "mtp_local": (), "max_context": 131072, "hidden_size": 6144, "num_layers": 66,
        "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "local_num_heads": 64, "local_num_kv_heads": 16,
        "local_head_dim": 128, "window": 512, "rel_dim": 16, "rel_extent": 1024, "dense_size": 24576,
        "expert_size": 3072, "num_experts": 256, "num_shared_experts": 2, "experts_per_token": 6, "route_scale": 8.0,
        "vocab_size": 201024, "logits_divisor": 24.0, "conv_width": 4,
    },
}

# Switches of which this package knows one position only.
_FIXED = {
    "use_embed_norm": True, "use_sconv": True, "use_gate_bias": True, "use_global_scale": True,
    "shared_expert_sink": True, "mtp_hidden_states_first": True, "hidden_act": "silu", "tie_word_embeddings": False,
}

# Bookkeeping that changes nothing in the text model.
_HARMLESS = frozenset([
    "_name_or_path", "architectures", "attention_dropout", "audio_bos_token_id", "audio_config", "audio_token_id",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "id2label", "image_bos_token_id", "image_token_id",
    "initializer_range", "is_encoder_decoder", "label2id", "model_type", "mtp_config", "number_of_conv_states",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict",
    "rms_norm_eps_moe_gate", "torch_dtype", "transformers_version", "use_cache", "vision_config",
])
# fmt: on


def read(raw: Section, source: str) -> dict[str, Any]:
    """The fields of `InklingConfig` out of either spelling. Raises `ConfigError`; warns of unknown keys."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a JSON object, found {type(raw).__name__}")
    text, spelling = _text_section(raw)
    mtp, defaults = _section(raw, "mtp_config"), _DEFAULTS[spelling]
    _check_switches(raw, text)
    values = {name: _one(name, text, defaults) for name in KEYS if name not in _DERIVED}
    if values["real_vocab_size"] is None:
        values["real_vocab_size"] = values["vocab_size"]
    values["dense_size"], values["expert_size"] = _widths(text, spelling)
    # transformers leaves the true context at the top level and a default of its own in the text config.
    values["max_context"] = _one("max_context", raw, {"max_context": _one("max_context", text, defaults)})
    values["eos_token_ids"] = _end_tokens(raw, text)
    values |= _layer_kinds(text, spelling, values["num_layers"]) | _mtp(text, mtp, defaults)
    _report_unknown(text, source)
    return values


def _section(raw: Section, name: str) -> Section:
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {value!r}: expected an object")
    return value or {}


def _text_section(raw: Section) -> tuple[Section, Layout]:
    """The text config and its spelling. Refuses every other model by name."""
    nested = raw.get("model_type") == "inkling_mm_model"
    text = _section(raw, "text_config") if "text_config" in raw else raw
    architectures = raw.get("architectures") or ()
    for name in [str(raw.get("model_type")), str(text.get("model_type")), *map(str, architectures)]:
        if re.match(r"inkling[-_ ]?2", name, re.IGNORECASE):
            raise ConfigError(f"{name} is Inkling 2, a different architecture that this package does not run")
    if nested and (text is raw or not text):
        raise ConfigError("text_config is missing: an inkling_mm_model needs one")
    kind = text.get("model_type")
    if nested and kind is None:
        kind = "inkling_model" if "dense_intermediate_size" in text else "inkling_text"
    if kind == "inkling_model" and (nested or text is raw):
        return text, "original"
    if kind == "inkling_text" and (nested or text is raw):
        return text, "transformers"
    where, found = ("text_config.", kind) if nested else ("", raw.get("model_type"))
    expected = "inkling_model or inkling_text" + ("" if nested else ", or inkling_mm_model with a text_config")
    raise ConfigError(f"{where}model_type = {found!r}: expected {expected}")


def _check_switches(raw: Section, text: Section) -> None:
    for section, (name, supported) in itertools.product((raw, text), _FIXED.items()):
        if section.get(name) not in (supported, None):
            raise ConfigError(f"{name} = {section[name]!r}: this version supports only {supported!r}")


def _one(name: str, section: Section, defaults: Section, keys: Iterable[str] = ()) -> Any:
    """The value that a field has under any of its names; all that are present must agree."""
    keys = tuple(keys) or KEYS[name]
    found = [(key, section[key]) for key in keys if section.get(key) is not None]
    for key, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(f"{found[0][0]} = {found[0][1]!r} contradicts {key} = {value!r}")
    if found:
        return found[0][1]
    if name not in defaults:
        raise ConfigError(f"{' or '.join(keys)} is missing")
    return defaults[name]


def _widths(text: Section, spelling: Layout) -> tuple[Any, Any]:
    """Dense and expert width.

    `intermediate_size` is the width of an expert where `dense_intermediate_size` stands beside it, and the width of a
    dense MLP where `moe_intermediate_size` does.
    """
    if text.get("dense_intermediate_size") is not None:
        return text["dense_intermediate_size"], _one("expert_size", text, {})
    if spelling == "original" and text.get("moe_intermediate_size") is None:
        raise ConfigError("dense_intermediate_size is missing, without which intermediate_size may mean either width")
    defaults = _DEFAULTS[spelling]
    dense = _one("dense_size", text, defaults, keys=["intermediate_size"])
    return dense, _one("expert_size", text, defaults, keys=["moe_intermediate_size"])


def _layer_kinds(text: Section, spelling: Layout, count: Any) -> dict[str, Any]:
    """Which layers are local and which dense, from ids or from a list of kinds; both may stand there if they agree."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"num_hidden_layers = {count!r}: expected an integer of at least 1")
    local = _agreed("local_layer_ids", _ids(text, "local_layer_ids"), "layer_types", _typed(text, "layer_types", count))
    dense = _agreed("dense_mlp_idx", _prefix(text, count), "mlp_layer_types", _typed(text, "mlp_layer_types", count))
    if spelling == "original" and (local is None or dense is None):
        raise ConfigError(f"{'local_layer_ids' if local is None else 'dense_mlp_idx'} is missing")
    if local is None:
        local = [i for i in range(count) if i % 6 != 5]  # what transformers does without ids
    return {"local_layers": local, "dense_layers": dense or ()}


def _ids(section: Section, key: str) -> list[int] | None:
    value = section.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(type(i) is int for i in value):
        raise ConfigError(f"{key} = {value!r}: expected a list of integers")
    return sorted(value)


def _prefix(text: Section, count: int) -> list[int] | None:
    value = text.get("dense_mlp_idx")
    if value is not None and not (type(value) is int and 0 <= value <= count):
        raise ConfigError(f"dense_mlp_idx = {value!r}: expected an integer from 0 to num_hidden_layers = {count}")
    return None if value is None else list(range(value))


def _typed(text: Section, key: str, count: int) -> list[int] | None:
    """The ids of the layers of the first kind (local, dense), out of a list with one kind a layer."""
    kinds = ("hybrid_sliding", "hybrid") if key == "layer_types" else ("dense", "sparse")
    value = text.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != count or not all(kind in kinds for kind in value):
        raise ConfigError(f"{key} = {value!r}: expected {count} entries, each {' or '.join(kinds)}")
    return [i for i, kind in enumerate(value) if kind == kinds[0]]


def _agreed(first_key: str, first: list[int] | None, second_key: str, second: list[int] | None) -> list[int] | None:
    if first is not None and second is not None and first != second:
        raise ConfigError(f"{first_key} names {first}, which contradicts {second_key} with {second}")
    return second if first is None else first


def _mtp(text: Section, mtp: Section, defaults: Section) -> dict[str, Any]:
    """The fields of the depths, from `mtp_config` and from the text config; where both speak they must agree."""
    both = {f"mtp_config.{key}": value for key, value in mtp.items()} | dict(text)
    keys = ("mtp_config.num_nextn_predict_layers", "num_nextn_predict_layers", "num_mtp_layers")
    depths = _one("mtp_depths", both, defaults, keys)
    chain = _one("chain_norm", both, defaults, ("mtp_config.chain_hidden_post_norm", "chain_hidden_post_norm"))
    nested, flat = KEYS["mtp_local"]
    local = _agreed(nested, _ids(both, nested), flat, _ids(both, flat))
    if local is None and depths and "mtp_local" not in defaults:
        raise ConfigError("mtp_config.local_layer_ids is missing")
    return {"mtp_depths": depths, "mtp_local": local or (), "chain_norm": chain}


def _end_tokens(raw: Section, text: Section) -> tuple[Any, ...]:
    """The end token or tokens. The top level wins: a nested text config may carry a library's placeholder."""
    value = raw.get("eos_token_id")
    value = text.get("eos_token_id") if value is None else value
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id = {value!r}: expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _report_unknown(text: Section, source: str) -> None:
    unknown = set(text) - _HARMLESS - _FIXED.keys() - set(itertools.chain.from_iterable(KEYS.values()))
    if unknown:
        message = f"{source}: the text config has keys that are ignored: {', '.join(sorted(unknown))}"
        warnings.warn(message, stacklevel=4)


def write(config: "InklingConfig", layout: Layout) -> dict[str, Any]:
    """`config.json` of a layout: nested for the original one, text-only for transformers."""
    if layout not in get_args(Layout):
        raise ConfigError(f"layout = {layout!r}: expected {' or '.join(get_args(Layout))}")
    plain = {KEYS[name][0]: getattr(config, name) for name in KEYS if name not in _DERIVED}
    return _original(config, plain) if layout == "original" else _transformers(config, plain)


def _original(config: "InklingConfig", plain: dict[str, Any]) -> dict[str, Any]:
    first = len(config.dense_layers)
    prefix = config.dense_layers == tuple(range(first))
    text = {
        "model_type": "inkling_model",
        **plain,
        "local_layer_ids": list(config.local_layers),
        **({"dense_mlp_idx": first} if prefix else {"mlp_layer_types": _mlp_layer_types(config)}),
        "dense_intermediate_size": config.dense_size,
        "intermediate_size": config.expert_size,
        **{name: value for name, value in _FIXED.items() if name.startswith(("use_", "shared_"))},
    }
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        "eos_token_id": _end_token(config),
        "model_max_length": config.max_context,
        "text_config": text,
        "mtp_config": {
            "num_nextn_predict_layers": config.mtp_depths,
            "chain_hidden_post_norm": config.chain_norm,
            "local_layer_ids": list(config.mtp_local),
        },
    }


def _transformers(config: "InklingConfig", plain: dict[str, Any]) -> dict[str, Any]:
    plain["conv_kernel_size"] = plain.pop("sconv_kernel_size")
    return {
        "architectures": ["InklingForCausalLM"],
        "model_type": "inkling_text",
        "dtype": "bfloat16",
        "eos_token_id": _end_token(config),
        "max_position_embeddings": config.max_context,
        **plain,
        "layer_types": ["hybrid_sliding" if config.is_local(i) else "hybrid" for i in range(config.num_layers)],
        "mlp_layer_types": _mlp_layer_types(config),
        "intermediate_size": config.dense_size,
        "moe_intermediate_size": config.expert_size,
        "hidden_act": "silu",
        "shared_expert_sink": True,
        "num_mtp_layers": config.mtp_depths,
        "mtp_local_layer_ids": list(config.mtp_local),
        "chain_hidden_post_norm": config.chain_norm,
        "mtp_hidden_states_first": True,
    }


def _mlp_layer_types(config: "InklingConfig") -> list[str]:
    return ["dense" if config.is_dense(i) else "sparse" for i in range(config.num_layers)]


def _end_token(config: "InklingConfig") -> int | list[int] | None:
    """What to write for the end tokens: the standard ones need no mention, and transformers accepts one id only."""
    own = [i for i in config.eos_token_ids if i not in STANDARD_END_TOKENS] or list(config.eos_token_ids[-1:])
    return own if len(own) > 1 else next(iter(own), None)
