"""Golden files: what `transformers` computes for small Inkling models with drawn weights.

    python3.11 -m venv golden-env
    golden-env/bin/pip install torch==2.13.*  # a CPU build is enough
    golden-env/bin/pip install "transformers>=5.23" safetensors numpy
    golden-env/bin/python tests/golden/make_golden.py

Each folder beside this script is a checkpoint in the transformers layout (`config.json`, `model.safetensors`, float32),
with `expected.npz` next to it: `tokens` [T], `logits` [T, real V] and `depth_d` [T - d - 1, real V], all computed in
float64. `versions.json` says with what. Neither jax nor this project is imported here, so that nothing can be shared.

Two things are arranged rather than taken as transformers does them.

- It casts to float32 in norms, convolutions, router and softmax. In a float64 run these casts are the only rounding,
  and `Float64` lifts them.
- It has the modules of the MTP depths, and those are called here, but not its drafting loop: that one feeds the raw
  embedding, counts positions from d + 1 and gives a local depth no window (5.24), where this project feeds the normed
  embedding, counts from the target's position and keeps the window, the wiring that was measured to be right for the
  released weights. The golden files therefore vouch for a depth's arithmetic and for where the norm that depths share
  stands, and not for what a depth is fed.
"""

import json
import platform
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import InklingForCausalLM, InklingTextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent

BASE = {
    "vocab_size": 64,
    "unpadded_vocab_size": 59,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 12,
    "log_scaling_n_floor": 20,
    "log_scaling_alpha": 0.3,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 3.0,
    "max_position_embeddings": 512,
    "num_mtp_layers": 2,
    "mtp_local_layer_ids": [0],
    "bos_token_id": None,
    "eos_token_id": 2,
}

CONFIGS = {
    "no_rule": BASE,
    "global_first": BASE
    | {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding"],
        "mlp_layer_types": ["sparse"] * 3,
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "head_dim": 16,
        "swa_num_key_value_heads": 4,
        "log_scaling_n_floor": None,
    },
    "one_shared": BASE
    | {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["sparse", "dense"],
        "num_hidden_layers": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_mtp_layers": 3,
        "mtp_local_layer_ids": [0, 2],
        "chain_hidden_post_norm": True,
    },
}
LENGTH = 40  # past the window (8), the extent (12) and the floor of the log scaling (20)


class Float64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def lift(value):
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*map(lift, args), **{key: lift(value) for key, value in (kwargs or {}).items()})


def draw(name: str, shape: torch.Size, config: InklingTextConfig, rng: np.random.Generator) -> torch.Tensor:
    """A tensor in which the feature it belongs to shows: no norm or scale is 1, no bias or tap is 0."""
    noise = rng.standard_normal(shape)
    if name.endswith(("norm.weight", "layernorm.weight", "global_scale")):
        value = 1 + 0.2 * noise
    elif name.endswith("conv1d.weight"):
        value = 0.3 * noise
    elif name.endswith("e_score_correction_bias"):
        value = 0.2 * noise
    elif name.endswith("rel_logits_proj.proj"):
        value = noise / np.sqrt(config.d_rel)
    elif name.endswith("embed_tokens.weight"):
        value = noise
    elif name.endswith("lm_head.weight"):
        value = noise * config.logits_mup_width_multiplier / np.sqrt(config.hidden_size)
    else:
        value = noise / np.sqrt(shape[-1])
    return torch.from_numpy(value.astype(np.float32))


def fill(model: torch.nn.Module, prefix: str, config: InklingTextConfig, rng: np.random.Generator) -> dict:
    """Draws the weights of `model` in the order of their names; returns them as float32, named as in a checkpoint."""
    drawn = {name: draw(name, t.shape, config, rng) for name, t in sorted(model.state_dict().items())}
    model.load_state_dict(drawn)
    model.double().eval()
    return {prefix + name: tensor for name, tensor in drawn.items()}


def depth_logits(model: InklingForCausalLM, mtp: MtpModel, tokens: torch.Tensor, hidden: torch.Tensor) -> list:
    """The teacher-forced chain: row i of depth d reads the normed embedding of token i + d + 1."""
    found = []
    for d, layer in enumerate(mtp.layers):
        embeds = model.model.embed_tokens(tokens[:, d + 1 :])
        positions = torch.arange(embeds.shape[1])[None]
        local = mtp.config.layer_types[d] == "hybrid_sliding"
        make_mask = create_sliding_window_causal_mask if local else create_causal_mask
        mask = make_mask(mtp.config, embeds, attention_mask=None, cache=None, position_ids=positions)
        hidden = layer(embeds, hidden[:, : embeds.shape[1]], None, mask, position_ids=positions, cache=None)
        if mtp.use_shared_post_norm:
            hidden = mtp.shared_post_norm(hidden)
        found.append(mtp._project_to_logits(hidden))
    return found


def make(name: str, raw: dict, seed: int) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    config = InklingTextConfig(**raw, dtype="float32", attn_implementation="eager", experts_implementation="eager")
    model = InklingForCausalLM(config)
    weights = fill(model, "", config, rng)
    mtp = MtpModel(model, config.num_mtp_layers)
    mtp.embed_tokens, mtp.shared_head = None, None  # the model's own: not part of the depths' weights
    weights |= fill(mtp, "model.mtp.", config, rng)
    mtp.shared_head = model.lm_head

    tokens = torch.from_numpy(rng.integers(0, config.unpadded_vocab_size, (1, LENGTH)))
    with torch.no_grad(), Float64():
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        logits = model(tokens, use_cache=False).logits
        depths = depth_logits(model, mtp, tokens, hidden)
    assert all(array.dtype == torch.float64 for array in (logits, *depths))

    config.architectures = ["InklingForCausalLM"]
    config.save_pretrained(folder)
    save_file({key: t.contiguous() for key, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    expected = {f"depth_{d}": array[0].numpy() for d, array in enumerate(depths)}
    np.savez(folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits[0].numpy(), **expected)


def main() -> None:
    for seed, (name, raw) in enumerate(CONFIGS.items()):
        make(name, raw, seed)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["transformers"] = transformers.__version__
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
