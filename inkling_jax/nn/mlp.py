"""The two kinds of MLP: dense SwiGLU, and a mixture of routed experts with shared ones beside them."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..cache import Rows
from ..config import InklingConfig
from ..ops import mixture, route, swiglu
from .basic import constant, normal


class DenseMLP(nnx.Module):
    """SwiGLU, then the learned scalar `scale`."""

    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, width = config.hidden_size, config.dense_size
        self.w13 = normal(rngs, (2, width, hidden), (None, "mlp", "hidden"), dtype)
        self.w2 = normal(rngs, (hidden, width), ("hidden", "mlp"), dtype)
        self.scale = constant(1.0, (1,), (None,), dtype)

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        return (swiglu(x, self.w13[...], self.w2[...]) * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Router(nnx.Module):
    """Scores of the routed experts, then of the shared ones. Bias and scale stay float32."""

    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        outputs = config.num_experts + config.num_shared_experts
        self.weight = normal(rngs, (outputs, config.hidden_size), (None, "hidden"), dtype)
        self.bias = constant(0.0, (config.num_experts,), (None,), jnp.float32)
        self.scale = constant(1.0, (1,), (None,), jnp.float32)


class Experts(nnx.Module):
    """Stacked SwiGLU experts; the leading axis is `axis`."""

    def __init__(self, count: int, config: InklingConfig, axis: str | None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, width = config.hidden_size, config.expert_size
        self.w13 = normal(rngs, (count, 2, width, hidden), (axis, None, "expert_mlp", "hidden"), dtype)
        self.w2 = normal(rngs, (count, hidden, width), (axis, "hidden", "expert_mlp"), dtype)


class MoE(nnx.Module):
    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.router = Router(config, dtype=dtype, rngs=rngs)
        self.experts = Experts(config.num_experts, config, "expert", dtype=dtype, rngs=rngs)
        self.shared = Experts(config.num_shared_experts, config, None, dtype=dtype, rngs=rngs)
        self.experts_per_token = config.experts_per_token
        self.route_scale = config.route_scale

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        flat = x.reshape(-1, x.shape[-1])
        scale = self.route_scale * self.router.scale[0]
        ids, weights = route(
            flat, self.router.weight[...], self.router.bias[...], scale, self.experts_per_token, rows.implementation
        )
        y = mixture(
            flat,
            ids,
            weights,
            self.experts.w13[...],
            self.experts.w2[...],
            self.shared.w13[...],
            self.shared.w2[...],
            rows.real(x.shape[1]).reshape(-1),
        )
        return y.reshape(x.shape)
