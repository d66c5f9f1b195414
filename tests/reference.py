"""Inkling in float64 NumPy: the oracle of this test suite.

It is written from the description of the model, with plain loops, and shares no code with `inkling_jax` (only the
config class and the names of the parameters). Nothing is rounded between steps, so it says what each result would be
in exact arithmetic, near enough.

`forward` is the backbone, `depths` the teacher-forced chain of MTP depths. Both return, next to the logits, what a
cache would hold for each row: keys and values as attention reads them, and the inputs of the four short convolutions.
`random_params` draws weights in which every feature matters, `CONFIGS` holds the shapes that are worth testing.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from inkling_jax.config import AttentionShape, InklingConfig

Params = Mapping[str, Any]  # dotted path -> array of any float type
Trace = dict[str, np.ndarray]  # "k", "v": [rows, K, D]; "k_conv", "v_conv", "attn_conv", "mlp_conv": [rows, channels]


# ---------------------------------------------------------------------------------------------------------------- parts


def under(params: Params, prefix: str) -> dict[str, np.ndarray]:
    """The parameters below `prefix`, the prefix cut off, in float64."""
    cut = len(prefix) + 1
    return {path[cut:]: np.asarray(p, np.float64) for path, p in params.items() if path.startswith(prefix + ".")}


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def short_conv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [T, C], weight [C, W]: y_t = x_t + sum_j w_j x_{t-W+1+j}, rows before the first count as zero."""
    rows, width = len(x), weight.shape[1]
    y = x.copy()
    for t in range(rows):
        for tap in range(width):
            source = t - (width - 1) + tap
            if source >= 0:
                y[t] += weight[:, tap] * x[source]
    return y


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def swiglu(x: np.ndarray, w13: np.ndarray, w2: np.ndarray) -> np.ndarray:
    """x [H], w13 [2, F, H] (gate, up), w2 [H, F]."""
    return w2 @ (silu(w13[0] @ x) * (w13[1] @ x))


def tau(position: int, config: InklingConfig) -> float:
    """The log scaling of a global layer's query at a 0-based position."""
    if config.log_scaling_floor is None:
        return 1.0
    return 1.0 + config.log_scaling_alpha * math.log(max((position + 1) / config.log_scaling_floor, 1.0))


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, r: np.ndarray, rel_proj: np.ndarray, shape: AttentionShape, taus: list
) -> np.ndarray:
    """q [T, N, D], k and v [T, K, D], r [T, N, R], rel_proj [R, X] -> [T, N, D]."""
    out = np.zeros_like(q)
    group = shape.heads // shape.kv_heads
    for i in range(len(q)):
        first = 0 if shape.window is None else max(0, i - shape.window + 1)
        for head in range(shape.heads):
            profile = r[i, head] @ rel_proj
            scores = np.empty(i + 1 - first)
            for j in range(first, i + 1):
                bias = profile[i - j] if i - j < shape.extent else 0.0
                scores[j - first] = taus[i] * (q[i, head] @ k[j, head // group] / shape.head_dim + bias)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[first : i + 1, head // group]
    return out


def attention(p: dict, x: np.ndarray, config: InklingConfig, local: bool, start: int) -> tuple[np.ndarray, Trace]:
    shape, rows = config.attention(local), len(x)
    q = (x @ p["wq.weight"].T).reshape(rows, shape.heads, shape.head_dim)
    r = (x @ p["wr.weight"].T).reshape(rows, shape.heads, config.rel_dim)
    k_in, v_in = x @ p["wk.weight"].T, x @ p["wv.weight"].T
    k = short_conv(k_in, p["k_conv.weight"]).reshape(rows, shape.kv_heads, shape.head_dim)
    v = short_conv(v_in, p["v_conv.weight"]).reshape(rows, shape.kv_heads, shape.head_dim)
    q = rms_norm(q, p["q_norm.weight"], config.norm_eps)
    k = rms_norm(k, p["k_norm.weight"], config.norm_eps)
    taus = [1.0 if local else tau(start + i, config) for i in range(rows)]
    mixed = attend(q, k, v, r, p["rel_proj"].T, shape, taus).reshape(rows, -1)
    return mixed @ p["wo.weight"].T, {"k": k, "v": v, "k_conv": k_in, "v_conv": v_in}


def route(p: dict, x: np.ndarray, config: InklingConfig) -> tuple[np.ndarray, np.ndarray]:
    """One token's x [H] -> the chosen experts' ids [A] and the weights [A + S], the shared experts' last."""
    logits = p["router.weight"] @ x
    routed, shared = logits[: config.num_experts], logits[config.num_experts :]
    score = 1 / (1 + np.exp(-routed)) + p["router.bias"]
    chosen = np.argsort(-score, kind="stable")[: config.experts_per_token]
    joint = log_sigmoid(np.concatenate([routed[chosen], shared]))
    weights = np.exp(joint) / np.exp(joint).sum()
    return chosen, weights * config.route_scale * p["router.scale"][0]


def moe(p: dict, x: np.ndarray, config: InklingConfig) -> np.ndarray:
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        chosen, weights = route(p, row, config)
        for expert, weight in zip(chosen, weights[: len(chosen)], strict=True):
            out[t] += weight * swiglu(row, p["experts.w13"][expert], p["experts.w2"][expert])
        for sink, weight in enumerate(weights[len(chosen) :]):
            out[t] += weight * swiglu(row, p["shared.w13"][sink], p["shared.w2"][sink])
    return out


def dense_mlp(p: dict, x: np.ndarray) -> np.ndarray:
    return np.stack([swiglu(row, p["w13"], p["w2"]) for row in x]) * p["scale"][0]


def decoder_layer(
    p: dict, x: np.ndarray, config: InklingConfig, local: bool, dense: bool, start: int = 0
) -> tuple[np.ndarray, Trace]:
    normed = rms_norm(x, p["attn_norm.weight"], config.norm_eps)
    attn_out, trace = attention(under(p, "attn"), normed, config, local, start)
    x = x + short_conv(attn_out, p["attn_conv.weight"])
    normed = rms_norm(x, p["mlp_norm.weight"], config.norm_eps)
    mlp = under(p, "mlp")
    mlp_out = dense_mlp(mlp, normed) if dense else moe(mlp, normed, config)
    x = x + short_conv(mlp_out, p["mlp_conv.weight"])
    return x, trace | {"attn_conv": attn_out, "mlp_conv": mlp_out}


# ---------------------------------------------------------------------------------------------------------------- model


def embed(params: Params, config: InklingConfig, tokens: Any) -> np.ndarray:
    table, weight = (np.asarray(params[path], np.float64) for path in ("embed.weight", "embed.norm.weight"))
    return rms_norm(table[np.asarray(tokens)], weight, config.norm_eps)


def unembed(params: Params, config: InklingConfig, hidden: np.ndarray) -> np.ndarray:
    table = np.asarray(params["unembed.weight"], np.float64)[: config.real_vocab_size]
    return hidden / config.logits_divisor @ table.T


def forward(params: Params, config: InklingConfig, tokens: Any, start: int = 0) -> dict[str, Any]:
    """tokens [T] -> hidden [T, H] (after the final norm), logits [T, real V], layers: one `Trace` each.

    `start` is the position that the first token claims to have; nothing stands before it all the same.
    """
    x, traces = embed(params, config, tokens), []
    for i in range(config.num_layers):
        layer = under(params, f"layers.{i}")
        x, trace = decoder_layer(layer, x, config, config.is_local(i), config.is_dense(i), start)
        traces.append(trace)
    hidden = rms_norm(x, np.asarray(params["norm.weight"], np.float64), config.norm_eps)
    return {"hidden": hidden, "logits": unembed(params, config, hidden), "layers": traces}


def depths(params: Params, config: InklingConfig, tokens: Any, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` MTP depths (all of them by default), each fed with the true tokens.

    Depth d has T - d - 1 rows. Row i stands at position i, reads the token at i + d + 1 and predicts the one after it.
    Each entry holds hidden [rows, H], logits [rows, real V] and the depth's `Trace` as "layer".
    """
    tokens = np.asarray(tokens)
    hidden, found = forward(params, config, tokens)["hidden"], []
    for d in range(config.mtp_depths if count is None else count):
        p = under(params, f"mtp.{d}")
        incoming = rms_norm(hidden[: len(tokens) - d - 1], p["hidden_norm.weight"], config.norm_eps)
        token = rms_norm(embed(params, config, tokens[d + 1 :]), p["embed_norm.weight"], config.norm_eps)
        x = np.concatenate([incoming, token], axis=-1) @ p["proj.weight"].T
        hidden, trace = decoder_layer(under(p, "layer"), x, config, config.mtp_is_local(d), dense=True)
        if config.chain_norm:
            hidden = rms_norm(hidden, np.asarray(params["mtp_chain_norm.weight"], np.float64), config.norm_eps)
        found.append({"hidden": hidden, "logits": unembed(params, config, hidden), "layer": trace})
    return found


def depth_logits(params: Params, config: InklingConfig, tokens: Any, depth: int) -> np.ndarray:
    """[T - depth - 1, real V]: what depth `depth` says about the token at i + depth + 2."""
    return depths(params, config, tokens, depth + 1)[depth]["logits"]


# -------------------------------------------------------------------------------------------------------------- weights


def parameter_shapes(config: InklingConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter path of a model with its shape, written out from the table of the architecture."""
    h, shapes = config.hidden_size, {}
    shapes |= {"embed.weight": (config.vocab_size, h), "unembed.weight": (config.vocab_size, h)}
    shapes |= {"embed.norm.weight": (h,), "norm.weight": (h,)}
    for i in range(config.num_layers):
        shapes |= layer_shapes(config, f"layers.{i}", config.is_local(i), config.is_dense(i))
    for d in range(config.mtp_depths):
        shapes |= {f"mtp.{d}.hidden_norm.weight": (h,), f"mtp.{d}.embed_norm.weight": (h,)}
        shapes |= {f"mtp.{d}.proj.weight": (h, 2 * h)}
        shapes |= layer_shapes(config, f"mtp.{d}.layer", config.mtp_is_local(d), dense=True)
    return shapes | ({"mtp_chain_norm.weight": (h,)} if config.chain_norm else {})


def layer_shapes(config: InklingConfig, prefix: str, local: bool, dense: bool) -> dict[str, tuple[int, ...]]:
    a, h, w = config.attention(local), config.hidden_size, config.conv_width
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes = {
        "attn_norm.weight": (h,),
        "mlp_norm.weight": (h,),
        "attn.wq.weight": (queries, h),
        "attn.wk.weight": (keys, h),
        "attn.wv.weight": (keys, h),
        "attn.wr.weight": (a.heads * config.rel_dim, h),
        "attn.wo.weight": (h, queries),
        "attn.q_norm.weight": (a.head_dim,),
        "attn.k_norm.weight": (a.head_dim,),
        "attn.k_conv.weight": (keys, w),
        "attn.v_conv.weight": (keys, w),
        "attn.rel_proj": (a.extent, config.rel_dim),
        "attn_conv.weight": (h, w),
        "mlp_conv.weight": (h, w),
    }
    e, s, f = config.num_experts, config.num_shared_experts, config.expert_size
    if dense:
        shapes |= {"mlp.w13": (2, config.dense_size, h), "mlp.w2": (h, config.dense_size), "mlp.scale": (1,)}
    else:
        shapes |= {"mlp.router.weight": (e + s, h), "mlp.router.bias": (e,), "mlp.router.scale": (1,)}
        shapes |= {"mlp.experts.w13": (e, 2, f, h), "mlp.experts.w2": (e, h, f)}
        shapes |= {"mlp.shared.w13": (s, 2, f, h), "mlp.shared.w2": (s, h, f)}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def random_params(config: InklingConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights (float32) in which every feature shows: no norm or scale is 1, no bias, tap or profile is 0."""
    rng = np.random.default_rng(seed)
    return {path: draw(rng, path, shape, config) for path, shape in parameter_shapes(config).items()}


def draw(rng: np.random.Generator, path: str, shape: tuple[int, ...], config: InklingConfig) -> np.ndarray:
    """One parameter; matrices keep the size of what they are applied to, whatever the widths."""
    noise = rng.standard_normal(shape)
    if path.endswith(("norm.weight", ".scale")):
        value = 1 + 0.2 * noise
    elif path.endswith("conv.weight"):
        value = 0.3 * noise
    elif path.endswith("router.bias"):
        value = 0.2 * noise
    elif path.endswith("rel_proj"):  # in the order of a checkpoint, [R, X]
        value = noise.reshape(shape[::-1]).T / math.sqrt(config.rel_dim)
    elif path == "embed.weight":
        value = noise
    elif path == "unembed.weight":
        value = noise * config.logits_divisor / math.sqrt(config.hidden_size)
    else:
        value = noise / math.sqrt(shape[-1])
    return value.astype(np.float32)


# -------------------------------------------------------------------------------------------------------------- configs

BASE = InklingConfig(
    hidden_size=32,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    local_num_heads=4,
    local_num_kv_heads=2,
    local_head_dim=8,
    window=8,
    rel_dim=4,
    rel_extent=12,
    local_layers=(0, 2, 3),  # under no rule
    dense_layers=(0,),
    dense_size=48,
    expert_size=24,
    num_experts=8,
    num_shared_experts=2,
    experts_per_token=3,
    route_scale=2.5,
    vocab_size=64,
    real_vocab_size=59,
    logits_divisor=3.0,
    norm_eps=1e-6,
    log_scaling_floor=20,
    log_scaling_alpha=0.3,
    conv_width=4,
    max_context=512,
    eos_token_ids=(2,),
    mtp_depths=4,
    mtp_local=(0, 2, 3),
    chain_norm=False,
)

CONFIGS: dict[str, InklingConfig] = {
    "local_ids_under_no_rule": BASE,
    "first_layer_global": replace(BASE, num_layers=3, local_layers=(1, 2), mtp_depths=2, mtp_local=(1,)),
    "kinds_differ": replace(
        BASE,
        hidden_size=48,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        local_num_heads=4,
        local_num_kv_heads=4,
        local_head_dim=8,
        local_layers=(0, 1, 3),
        vocab_size=96,
        real_vocab_size=90,
    ),
    "no_dense_layer": replace(BASE, num_layers=3, dense_layers=(), local_layers=(0, 2), mtp_depths=1, mtp_local=()),
    "one_shared_expert": replace(
        BASE, num_layers=3, num_shared_experts=1, experts_per_token=2, local_layers=(0, 1), dense_layers=(1,)
    ),
    "eight_depths": replace(BASE, num_layers=2, local_layers=(0,), mtp_depths=8, mtp_local=(0, 2, 4, 5, 6, 7)),
    "chain_norm": replace(BASE, num_layers=2, local_layers=(1,), chain_norm=True),
    "no_log_scaling": replace(BASE, num_layers=2, local_layers=(), dense_layers=(0, 1), log_scaling_floor=None),
}


def random_tokens(config: InklingConfig, length: int, seed: int = 0) -> np.ndarray:
    """Token ids [length] below the real vocabulary, int32."""
    return np.random.default_rng(seed).integers(0, config.real_vocab_size, length, dtype=np.int32)
