"""The one table of tensor names: where each parameter lies in a file of either layout, and in what form.

A form says how an array of ours corresponds to the tensors of a file. It never computes: it gives views of the array
whose elements stand in file order, so that reading and writing can go piece by piece.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from inkling_jax.spelling import Layout

from .windows import Cut, Window

Shape = tuple[int, ...]
FileLayout = Literal["original", "transformers", "orbax"]  # how a directory holds a model: safetensors, or Orbax


@dataclass(frozen=True, slots=True)
class Form:
    """How one array lies in one or two tensors of a file.

    `shapes(shape)` gives the shapes of the tensors. `views(array)` gives for each of them a view whose elements are in
    the tensor's order, and whose first axis splits the tensor's first axis evenly. `windows(window)` gives for a part
    of the array, in which gate and up are never apart, the parts that those views are.
    """

    shapes: Callable[[Shape], list[Shape]]
    views: Callable[[np.ndarray], list[np.ndarray]]
    windows: Callable[[Window], list[Window]]


def _merged(shape: Shape) -> Shape:
    """[.., 2, F, H] to [.., 2F, H]."""
    return (*shape[:-3], 2 * shape[-2], shape[-1])


ONE = Cut(0, 1, 1)
PLAIN = Form(lambda shape: [shape], lambda array: [array], lambda window: [window])
CONV = Form(
    lambda shape: [(shape[0], 1, shape[1])],
    lambda array: [array[:, None]],
    lambda window: [(window[0], ONE, window[1])],
)
TRANSPOSED = Form(
    lambda shape: [shape[::-1]],
    lambda array: [array.T],
    lambda window: [window[::-1]],
)
INTERLEAVED = Form(  # gate 0, up 0, gate 1
    lambda shape: [_merged(shape)],
    lambda array: [np.swapaxes(array, -3, -2)],
    lambda window: [(*window[:-3], window[-2], window[-3], window[-1])],
)
HALVES = Form(lambda shape: [_merged(shape)], PLAIN.views, PLAIN.windows)  # gate rows, then up rows
PAIR = Form(
    lambda shape: [(*shape[:-3], *shape[-2:])] * 2,
    lambda array: [array[..., 0, :, :], array[..., 1, :, :]],
    lambda window: [(*window[:-3], *window[-2:])] * 2,
)


@dataclass(frozen=True, slots=True)
class _Row:
    path: str
    original: str
    transformers: tuple[str, ...]
    original_form: Form = PLAIN
    transformers_form: Form = PLAIN


def _row(path: str, original: str, *transformers: str, forms: tuple[Form, Form] = (PLAIN, PLAIN)) -> _Row:
    return _Row(path, original, transformers, *forms)


# {text} stands for the prefix of the text model, {i} for the number of a layer or depth.
_MODEL = [
    _row("embed.weight", "model.llm.embed.weight", "{text}.embed_tokens.weight"),
    _row("embed.norm.weight", "model.llm.embed_norm.weight", "{text}.embed_tokens.embed_norm.weight"),
    _row("norm.weight", "model.llm.norm.weight", "{text}.norm.weight"),
    _row("unembed.weight", "model.llm.unembed.weight", "lm_head.weight"),
    _row("mtp_chain_norm.weight", "model.mtp.chain_norm.weight", "model.mtp.shared_post_norm.weight"),
]
_DEPTH = [
    _row("hidden_norm.weight", "hidden_norm.weight", "hnorm.weight"),
    _row("embed_norm.weight", "embed_norm.weight", "enorm.weight"),
    _row("proj.weight", "input_proj.weight", "eh_proj.weight"),
]
_LAYER = [
    _row("attn_norm.weight", "attn_norm.weight", "input_layernorm.weight"),
    _row("mlp_norm.weight", "mlp_norm.weight", "post_attention_layernorm.weight"),
    _row("attn.wq.weight", "attn.wq_du.weight", "self_attn.q_proj.weight"),
    _row("attn.wk.weight", "attn.wk_dv.weight", "self_attn.k_proj.weight"),
    _row("attn.wv.weight", "attn.wv_dv.weight", "self_attn.v_proj.weight"),
    _row("attn.wr.weight", "attn.wr_du.weight", "self_attn.r_proj.weight"),
    _row("attn.wo.weight", "attn.wo_ud.weight", "self_attn.o_proj.weight"),
    _row("attn.q_norm.weight", "attn.q_norm.weight", "self_attn.q_norm.weight"),
    _row("attn.k_norm.weight", "attn.k_norm.weight", "self_attn.k_norm.weight"),
    _row("attn.k_conv.weight", "attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight", forms=(CONV, CONV)),
    _row("attn.v_conv.weight", "attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight", forms=(CONV, CONV)),
    _row(
        "attn.rel_proj",
        "attn.rel_logits_proj.proj",
        "self_attn.rel_logits_proj.proj",
        forms=(TRANSPOSED, TRANSPOSED),
    ),
    _row("attn_conv.weight", "attn_sconv.weight", "attn_sconv.conv1d.weight", forms=(CONV, CONV)),
    _row("mlp_conv.weight", "mlp_sconv.weight", "mlp_sconv.conv1d.weight", forms=(CONV, CONV)),
    _row("mlp.w13", "mlp.w13_dn.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", forms=(INTERLEAVED, PAIR)),
    _row("mlp.w2", "mlp.w2_md.weight", "mlp.down_proj.weight"),
    _row("mlp.scale", "mlp.global_scale", "mlp.global_scale"),
    _row("mlp.router.weight", "mlp.gate.weight", "mlp.gate.weight"),
    _row("mlp.router.bias", "mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
    _row("mlp.router.scale", "mlp.gate.global_scale", "mlp.gate.global_scale"),
    _row("mlp.experts.w13", "mlp.experts.w13_weight", "mlp.experts.gate_up_proj", forms=(INTERLEAVED, HALVES)),
    _row("mlp.experts.w2", "mlp.experts.w2_weight", "mlp.experts.down_proj"),
    _row(
        "mlp.shared.w13",
        "mlp.shared_experts.shared_w13_weight",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        forms=(INTERLEAVED, PAIR),
    ),
    _row("mlp.shared.w2", "mlp.shared_experts.shared_w2_weight", "mlp.shared_experts.down_proj"),
]


def _prefixed(rows: list[_Row], path: str, original: str, transformers: str) -> list[_Row]:
    return [
        _Row(
            path + row.path,
            original + row.original,
            tuple(transformers + name for name in row.transformers),
            row.original_form,
            row.transformers_form,
        )
        for row in rows
    ]


_TABLE = {
    row.path: row
    for row in _MODEL
    + _prefixed(_LAYER, "layers.{i}.", "model.llm.layers.{i}.", "{text}.layers.{i}.")
    + _prefixed(_DEPTH, "mtp.{i}.", "model.mtp.layers.{i}.", "model.mtp.layers.{i}.")
    + _prefixed(_LAYER, "mtp.{i}.layer.", "model.mtp.layers.{i}.transformer_block.", "model.mtp.layers.{i}.mtp_block.")
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A layout, and for transformers' whether the text model stands alone or inside a multimodal one."""

    layout: Layout
    text_only: bool = False


VARIANTS = (Variant("original"), Variant("transformers"), Variant("transformers", text_only=True))


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors that hold one parameter, in order, and their form."""

    names: tuple[str, ...]
    form: Form


def stored(path: str, variant: Variant) -> Stored:
    """Where the parameter at a dotted path lies in a variant. Raises `KeyError` for a path the model cannot have."""
    number = re.search(r"\.(\d+)\.", path)
    row = _TABLE[path if number is None else path.replace(number[0], ".{i}.", 1)]
    if variant.layout == "original":
        names, form = (row.original,), row.original_form
    else:
        names, form = row.transformers, row.transformers_form
    fill = {"i": number and number[1], "text": "model" if variant.text_only else "model.language_model"}
    return Stored(tuple(name.format(**fill) for name in names), form)


# The vision and audio towers are no part of the text model; only conversion looks at their names.
_TOWERS = (
    ("model.audio.encoder.weight", "model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight"),
    ("model.audio.final_norm.weight", "model.audio_tower.norm.weight"),
    ("model.visual.layers.linear_{i}.weight", "model.vision_tower.encoder_layers.{i}.projection.weight"),
    ("model.visual.layers.norm_{i}.weight", "model.vision_tower.encoder_layers.{i}.layer_norm.weight"),
    ("model.visual.final_norm.weight", "model.vision_tower.final_norm.weight"),
)
_TOWER_PREFIXES = ("model.audio.", "model.audio_tower.", "model.visual.", "model.vision_tower.")


def is_tower(name: str) -> bool:
    """Whether a tensor belongs to the vision or the audio tower, in either layout."""
    return name.startswith(_TOWER_PREFIXES)


def tower_name(name: str, layout: Layout) -> str | None:
    """The name that a tower's tensor has in a layout, or None for a tensor no tower is known to have."""
    for pair in _TOWERS:
        for template in pair:
            match = re.fullmatch(re.escape(template).replace(r"\{i\}", r"(\d+)"), name)
            if match:
                return pair[0 if layout == "original" else 1].format(i=match[1] if match.groups() else None)
    return None
