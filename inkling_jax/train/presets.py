"""The sizes of the models trained here, and how they are trained."""

from dataclasses import dataclass

from ..config import InklingConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained; every run with equal recipe, sizes and corpus sees the same batches."""

    steps: int
    batch: int
    length: int  # backbone rows of one training window
    peak_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    depth_weight: float = 0.3  # of each depth's loss, beside 1 for the backbone's
    distilled: float = 0.5  # share of a depth's loss whose target is the backbone's own distribution
    balance_rate: float = 1e-3  # how far a step moves the selection bias of an expert
    report_every: int = 50  # steps in one dispatch
    seed: int = 0


@dataclass(frozen=True)
class Preset:
    """A vocabulary, padded to a round size, and a recipe; `sizes` are fields of InklingConfig."""

    vocab_size: int
    real_vocab_size: int
    recipe: Recipe
    sizes: dict

    def config(self, real_vocab_size: int) -> InklingConfig:
        """The model for a tokenizer of that many ids, whose end token is the last. Raises ConfigError."""
        return InklingConfig(
            **self.sizes,
            vocab_size=self.vocab_size,
            real_vocab_size=real_vocab_size,
            eos_token_ids=(real_vocab_size - 1,),
        )


_COMMON = dict(
    num_shared_experts=2, experts_per_token=2, route_scale=2.0, logits_divisor=2.0, norm_eps=1e-6,
    log_scaling_alpha=0.1, conv_width=4, mtp_depths=4, mtp_local=(0, 2, 3), chain_norm=False,
)  # fmt: skip

# Every feature of the release models at about 5.5 million parameters, 11 MB in bfloat16.
NANO = Preset(
    vocab_size=2048,
    real_vocab_size=2040,
    recipe=Recipe(steps=5600, batch=32, length=1024),
    sizes=_COMMON | dict(
        hidden_size=192, num_layers=5, local_layers=(0, 1, 3), dense_layers=(0,), dense_size=384,
        num_heads=6, num_kv_heads=2, head_dim=32, local_num_heads=6, local_num_kv_heads=3, local_head_dim=32,
        window=128, rel_dim=8, rel_extent=256, num_experts=8, expert_size=96,
        log_scaling_floor=512, max_context=4096,
    ),
)  # fmt: skip

# The same shape of model in a few seconds on a CPU: shows that training works, and nothing else.
TOY = Preset(
    vocab_size=512,
    real_vocab_size=500,
    recipe=Recipe(steps=30, batch=8, length=64, peak_rate=1e-2, warmup=5, report_every=10),
    sizes=_COMMON | dict(
        hidden_size=32, num_layers=3, local_layers=(0, 2), dense_layers=(0,), dense_size=64,
        num_heads=2, num_kv_heads=1, head_dim=16, local_num_heads=2, local_num_kv_heads=2, local_head_dim=16,
        window=16, rel_dim=4, rel_extent=32, num_experts=4, expert_size=16,
        log_scaling_floor=32, max_context=512,
    ),
)  # fmt: skip

PRESETS = {"nano": NANO, "toy": TOY}
