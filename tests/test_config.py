"""Both spellings give the same config, every field is checked, and the published sizes come out to the parameter."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_jax.config import PRESETS, AttentionShape, CheckpointError, ConfigError, InklingConfig
from inkling_jax.nn import abstract_parameters

ORIGINAL: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 7,
    "model_max_length": 4096,
    "text_config": {
        "model_type": "inkling_model",
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 4,
        "sliding_window_size": 16,
        "d_rel": 2,
        "rel_extent": 24,
        "local_layer_ids": [1, 4],
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 48,
        "intermediate_size": 20,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "route_scale": 2.5,
        "use_embed_norm": True,
        "use_sconv": True,
        "sconv_kernel_size": 4,
        "use_gate_bias": True,
        "use_global_scale": True,
        "shared_expert_sink": True,
        "vocab_size": 64,
        "unpadded_vocab_size": 60,
        "logits_mup_width_multiplier": 4.0,
        "rms_norm_eps": 1e-5,
        "log_scaling_n_floor": 100,
        "log_scaling_alpha": 0.2,
    },
    "mtp_config": {"num_nextn_predict_layers": 3, "chain_hidden_post_norm": True, "local_layer_ids": [0, 2]},
}

TRANSFORMERS_TEXT: dict[str, Any] = {
    **{
        key: value
        for key, value in ORIGINAL["text_config"].items()
        if not key.startswith(("use_", "dense_", "local_", "sconv", "intermediate"))
    },
    "model_type": "inkling_text",
    "eos_token_id": 7,
    "max_position_embeddings": 4096,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"],
    "local_layer_ids": None,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "conv_kernel_size": 4,
    "hidden_act": "silu",
    "num_mtp_layers": 3,
    "mtp_local_layer_ids": [0, 2],
    "chain_hidden_post_norm": True,
    "mtp_hidden_states_first": True,
    "architectures": ["InklingForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "number_of_conv_states": 4,
    "pad_token_id": None,
    "rms_norm_eps_moe_gate": 1e-6,
    "transformers_version": "5.24.0",
}


def original(**text: Any) -> dict[str, Any]:
    raw = deepcopy(ORIGINAL)
    raw["text_config"] |= text
    return raw


def without(section: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


CONFIG = InklingConfig.from_dict(ORIGINAL)


def spellings() -> dict[str, dict[str, Any]]:
    """The same model, said in every way."""
    text, mtp = ORIGINAL["text_config"], ORIGINAL["mtp_config"]
    nested = {"model_type": "inkling_mm_model", "text_config": TRANSFORMERS_TEXT}
    flat_mtp = {"num_mtp_layers": 3, "mtp_local_layer_ids": [0, 2], "chain_hidden_post_norm": True}
    aliases = without(text, "sliding_window_size", "n_routed_experts", "logits_mup_width_multiplier")
    return {
        "original": ORIGINAL,
        "original, text only": {**text, "eos_token_id": [7], "model_max_length": 4096, "mtp_config": mtp},
        "original, depths in the text config": without(original(**flat_mtp), "mtp_config"),
        "original, unordered ids": original(local_layer_ids=[4, 1]),
        "original, lists of kinds": {
            **ORIGINAL,
            "text_config": without(text, "local_layer_ids", "dense_mlp_idx")
            | {key: TRANSFORMERS_TEXT[key] for key in ("layer_types", "mlp_layer_types")},
        },
        "original, other names": {
            **ORIGINAL,
            "text_config": aliases
            | {"sliding_window": 16, "num_local_experts": 8, "embedding_multiplier": 4, "conv_kernel_size": 4},
        },
        "original, no type inside": {**ORIGINAL, "text_config": without(text, "model_type")},
        "original, expert width said twice": original(moe_intermediate_size=20),
        "transformers, text only": TRANSFORMERS_TEXT,
        "transformers, nested": nested,
        "transformers, no type inside": {**nested, "text_config": without(TRANSFORMERS_TEXT, "model_type")},
        # what transformers leaves of an original config: context and end token at the top, its own defaults inside
        "transformers, from original": {
            **nested,
            "eos_token_id": 7,
            "model_max_length": 4096,
            "mtp_config": mtp,
            "text_config": TRANSFORMERS_TEXT
            | {"eos_token_id": 2, "max_position_embeddings": 131072, "local_layer_ids": [1, 4]},
        },
        "transformers, original widths": TRANSFORMERS_TEXT
        | {"dense_intermediate_size": 48, "intermediate_size": 20, "moe_intermediate_size": None},
    }


@pytest.mark.parametrize("name", spellings())
def test_every_spelling_is_the_same_model(name: str) -> None:
    assert InklingConfig.from_dict(spellings()[name]) == CONFIG


def test_fields() -> None:
    assert (
        InklingConfig(
            hidden_size=32,
            num_layers=5,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            local_num_heads=6,
            local_num_kv_heads=3,
            local_head_dim=4,
            window=16,
            rel_dim=2,
            rel_extent=24,
            local_layers=(1, 4),
            dense_layers=(0, 1),
            dense_size=48,
            expert_size=20,
            num_experts=8,
            num_shared_experts=2,
            experts_per_token=3,
            route_scale=2.5,
            vocab_size=64,
            real_vocab_size=60,
            logits_divisor=4.0,
            norm_eps=1e-5,
            log_scaling_floor=100,
            log_scaling_alpha=0.2,
            conv_width=4,
            max_context=4096,
            eos_token_ids=(7,),
            mtp_depths=3,
            mtp_local=(0, 2),
            chain_norm=True,
        )
        == CONFIG
    )


def test_layer_kinds() -> None:
    assert [CONFIG.is_local(i) for i in range(5)] == [False, True, False, False, True]
    assert [CONFIG.is_dense(i) for i in range(5)] == [True, True, False, False, False]
    assert [CONFIG.mtp_is_local(d) for d in range(3)] == [True, False, True]
    assert CONFIG.attention(local=True) == AttentionShape(6, 3, 4, extent=16, window=16)
    assert CONFIG.attention(local=False) == AttentionShape(4, 2, 8, extent=24, window=None)


def test_transformers_defaults() -> None:
    config = InklingConfig.from_dict({"model_type": "inkling_text", "num_hidden_layers": 12})
    assert (config.dense_size, config.expert_size, config.window, config.max_context) == (24576, 3072, 512, 131072)
    assert [i for i in range(12) if not config.is_local(i)] == [5, 11]
    assert config.dense_layers == () and config.mtp_depths == 0 and config.log_scaling_floor is None
    assert config.real_vocab_size == config.vocab_size == 201024
    assert InklingConfig.from_dict({"model_type": "inkling_text", "num_mtp_layers": 2}).mtp_local == ()


def test_end_tokens() -> None:
    def ends(value: Any, real: int = 200058) -> tuple[int, ...]:
        raw = original(vocab_size=201024, unpadded_vocab_size=real) | {"eos_token_id": value}
        return InklingConfig.from_dict(raw).eos_token_ids

    assert ends(200006) == ends(None) == ends([200006, 199999]) == (199999, 200006)
    assert ends([5, 3]) == (3, 5, 199999, 200006)
    assert ends(200006, real=200000) == (199999,)
    assert ends(200006, real=60) == ()


BAD_TEXT = [
    ({"num_key_value_heads": 3}, "num_key_value_heads.* = 3.*divisor of num_heads = 4"),
    ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads.* = 4.*divisor of local_num_heads = 6"),
    ({"hidden_size": 0}, "hidden_size = 0.*at least 1"),
    ({"hidden_size": "32"}, "hidden_size = '32'.*integer"),
    ({"hidden_size": 32.0}, "hidden_size = 32.0.*integer"),
    ({"hidden_size": True}, "hidden_size = True.*integer"),
    ({"num_hidden_layers": "5"}, "num_hidden_layers.*'5'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0: expected an integer of at least 1"),
    ({"num_hidden_layers": -1}, "num_hidden_layers = -1: expected an integer of at least 1"),
    ({"sliding_window_size": 0}, "sliding_window_size.* = 0"),
    ({"route_scale": math.nan}, "route_scale = nan.*finite"),
    ({"route_scale": "8"}, "route_scale = '8'.*number"),
    ({"route_scale": 0}, "route_scale = 0.*above 0"),
    ({"logits_mup_width_multiplier": 0.0}, "logits_mup_width_multiplier.*above 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps.*above 0"),
    ({"log_scaling_alpha": -1}, "log_scaling_alpha = -1.*at least 0"),
    ({"log_scaling_n_floor": 0}, "log_scaling_n_floor.* = 0.*or null"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok.* = 9.*at most num_experts = 8"),
    ({"unpadded_vocab_size": 65}, "unpadded_vocab_size.* = 65.*at most vocab_size = 64"),
    ({"unpadded_vocab_size": 0}, "unpadded_vocab_size.* = 0"),
    ({"local_layer_ids": [1, 5]}, r"local_layer_ids.*\[1, 5\].*below 5"),
    ({"local_layer_ids": [1, 1]}, r"local_layer_ids.*every id once"),
    ({"local_layer_ids": [-1]}, r"local_layer_ids.*\[-1\]"),
    ({"local_layer_ids": 3}, "local_layer_ids = 3.*list"),
    ({"local_layer_ids": None}, "local_layer_ids is missing"),
    ({"dense_mlp_idx": 6}, "dense_mlp_idx = 6.*0 to num_hidden_layers = 5"),
    ({"dense_mlp_idx": None}, "dense_mlp_idx is missing"),
    ({"layer_types": ["hybrid"] * 4}, "layer_types.*5 entries"),
    ({"layer_types": ["full"] * 5}, "layer_types.*hybrid_sliding or hybrid"),
    ({"layer_types": ["hybrid"] * 5}, "local_layer_ids names.*contradicts layer_types"),
    ({"mlp_layer_types": ["dense"] * 5}, "dense_mlp_idx names.*contradicts mlp_layer_types"),
    ({"dense_intermediate_size": None}, "dense_intermediate_size is missing"),
    ({"moe_intermediate_size": 21}, "intermediate_size = 20 contradicts moe_intermediate_size = 21"),
    ({"sliding_window": 17}, "sliding_window_size = 16 contradicts sliding_window = 17"),
    ({"conv_kernel_size": 3}, "sconv_kernel_size = 4 contradicts conv_kernel_size = 3"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"num_mtp_layers": 2}, "num_nextn_predict_layers = 3 contradicts num_mtp_layers = 2"),
    ({"mtp_local_layer_ids": [0]}, "mtp_config.local_layer_ids names.*contradicts mtp_local_layer_ids"),
    ({"chain_hidden_post_norm": False}, "chain_hidden_post_norm = True contradicts"),
    ({"use_embed_norm": False}, "use_embed_norm = False.*only True"),
    ({"use_sconv": False}, "use_sconv = False"),
    ({"use_gate_bias": False}, "use_gate_bias = False"),
    ({"use_global_scale": False}, "use_global_scale = False"),
    ({"shared_expert_sink": False}, "shared_expert_sink = False"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*only 'silu'"),
    ({"mtp_hidden_states_first": False}, "mtp_hidden_states_first = False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ({"model_type": "llama"}, r"text_config.model_type = 'llama'.*inkling_model or inkling_text"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TEXT, ids=[str(change) for change, _ in BAD_TEXT])
def test_bad_text_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^some/config.json: .*" + message):
        InklingConfig.from_dict(original(**change), "some/config.json")


BAD_TOP = [
    ({"model_max_length": 0}, "model_max_length.* = 0"),
    ({"eos_token_id": "stop"}, "eos_token_id = 'stop'"),
    ({"eos_token_id": -1}, "eos_token_id = -1"),
    ({"mtp_config": [3]}, r"mtp_config = \[3\].*object"),
    ({"mtp_config": {"num_nextn_predict_layers": -1, "local_layer_ids": []}}, "num_nextn_predict_layers.* = -1"),
    ({"mtp_config": {"num_nextn_predict_layers": 1, "local_layer_ids": [1]}}, r"local_layer_ids.*\[1\].*below 1"),
    ({"mtp_config": {"num_nextn_predict_layers": 1}}, "mtp_config.local_layer_ids is missing"),
    ({"mtp_config": {"num_nextn_predict_layers": 0, "chain_hidden_post_norm": 1}}, "chain_hidden_post_norm.* = 1"),
    ({"text_config": None}, "text_config is missing"),
    ({"text_config": "x"}, "text_config = 'x'.*object"),
    ({"model_type": "llama"}, "model_type = 'llama'"),
    ({"model_type": None}, "model_type = None"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ({"model_type": "inkling2"}, "inkling2 is Inkling 2"),
    ({"model_type": "inkling_2_mm_model"}, "inkling_2_mm_model is Inkling 2"),
    ({"model_type": "inkling-2"}, "inkling-2 is Inkling 2"),
    ({"architectures": ["Inkling2ForConditionalGeneration"]}, "Inkling2ForConditionalGeneration is Inkling 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TOP, ids=[str(change) for change, _ in BAD_TOP])
def test_bad_top_level_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^config.json: .*" + message):
        InklingConfig.from_dict(ORIGINAL | change)


def test_inkling_2_inside() -> None:
    with pytest.raises(ConfigError, match="inkling2_text is Inkling 2"):
        InklingConfig.from_dict(original(model_type="inkling2_text"))


@pytest.mark.parametrize("key", without(ORIGINAL["text_config"], "unpadded_vocab_size", "log_scaling_n_floor"))
def test_original_text_config_is_complete(key: str) -> None:
    """A missing size is an error; what may be missing has one meaning only."""
    raw = {**ORIGINAL, "text_config": without(ORIGINAL["text_config"], key)}
    if key == "model_type" or key.startswith(("use_", "shared_expert_sink", "rms_norm_eps", "log_scaling_alpha")):
        assert InklingConfig.from_dict(raw).hidden_size == 32
    else:
        with pytest.raises(ConfigError, match=f"{key}.* is missing"):
            InklingConfig.from_dict(raw)


def test_unknown_keys_are_reported_in_one_line() -> None:
    with pytest.warns(UserWarning, match=r"config.json: .*ignored: rope_theta, zeta") as caught:
        assert InklingConfig.from_dict(original(zeta=1, rope_theta=2)) == CONFIG
    assert len(caught) == 1


@pytest.mark.parametrize("field", ["num_heads", "window", "route_scale", "local_layers", "chain_norm"])
def test_direct_construction_is_checked(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(CONFIG, **{field: "many"})


@st.composite
def configs(draw: st.DrawFn) -> InklingConfig:
    layers, depths = draw(st.integers(1, 6)), draw(st.integers(0, 3))

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw(st.sets(st.integers(0, count - 1)))) if count else ()

    return replace(
        CONFIG,
        num_layers=layers,
        local_layers=ids(layers),
        dense_layers=ids(layers),
        mtp_depths=depths,
        mtp_local=ids(depths),
        chain_norm=draw(st.booleans()),
        log_scaling_floor=draw(st.none() | st.integers(1, 10**6)),
        vocab_size=300000,
        real_vocab_size=draw(st.sampled_from([60, 199999, 200000, 250000])),
        eos_token_ids=tuple(draw(st.sets(st.integers(0, 59)))),
        dense_size=draw(st.integers(1, 99)),
        expert_size=draw(st.integers(1, 99)),
        conv_width=draw(st.integers(1, 5)),
    )


@given(configs(), st.sampled_from(["original", "transformers"]))
def test_writing_then_reading_gives_the_same(config: InklingConfig, layout: Any) -> None:
    assert InklingConfig.from_dict(json.loads(json.dumps(config.to_dict(layout)))) == config


def test_unknown_layout() -> None:
    with pytest.raises(ValueError, match="layout"):
        CONFIG.to_dict("gguf")  # type: ignore[arg-type]


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        InklingConfig.from_path(tmp_path)
    for text in ("{", "", "\x00", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
            InklingConfig.from_path(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
        InklingConfig.from_path(tmp_path)
    file.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json: expected a JSON object, found list"):
        InklingConfig.from_path(file)
    file.write_text(json.dumps(ORIGINAL))
    assert InklingConfig.from_path(file) == InklingConfig.from_path(tmp_path) == CONFIG


# Published totals with towers; those are no part of the model, so their shapes are counted here.
def tower_parameters(hidden: int) -> int:
    audio = 80 * 16 * hidden + hidden
    linear = 128 * 75 + 320 * 512 + 4800 * 5120 + hidden * 9600
    return audio + linear + 128 + 320 + 4800 + hidden


@pytest.mark.parametrize(("name", "total"), [("inkling", 952_377_623_626), ("inkling-small", 265_956_439_090)])
def test_published_parameter_counts(name: str, total: int) -> None:
    config = InklingConfig.from_name(name)
    sizes = {path: spec.size for path, spec in abstract_parameters(config).items()}
    assert sum(sizes.values()) + tower_parameters(config.hidden_size) == total
    if name == "inkling":
        assert sum(size for path, size in sizes.items() if path.startswith("mtp.")) == 5_260_445_704


def test_published_bytes() -> None:
    """Inkling-Small is published as 531,912,898,740 bytes: bf16, but for the float32 of the router."""
    config = InklingConfig.from_name("inkling-small")
    size = sum(spec.size * spec.dtype.itemsize for spec in abstract_parameters(config).values())
    assert size + 2 * tower_parameters(config.hidden_size) == 531_912_898_740


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = InklingConfig.from_name(name)
    assert config.eos_token_ids == (199999, 200006) and config.max_context == 1048576
    assert [i for i in range(config.num_layers) if not config.is_local(i)] == list(range(5, config.num_layers, 6))


def test_small_slice_has_the_widths_of_inkling_small_on_one_card() -> None:
    """Every field but the counts of layers and depths is the release's, and the weights are 59 GB."""
    whole, few = InklingConfig.from_name("inkling-small"), InklingConfig.from_name("small-slice")
    counts = dict(num_layers=6, local_layers=(0, 1, 2, 3, 4), mtp_depths=4, mtp_local=(0, 2))
    assert few == replace(whole, **counts)
    assert 58e9 < sum(spec.size * spec.dtype.itemsize for spec in abstract_parameters(few).values()) < 60e9


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="'inkling-huge'.*inkling-small"):
        InklingConfig.from_name("inkling-huge")
