"""The two kinds of MLP: dense SwiGLU, and a mixture of routed experts with shared ones beside them.

On a mesh that splits "mlp" both give a device's part of a sum, which the residual branch adds up in float32.
"""

from functools import partial
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import Implementation, moe
from pallas_kernels.fp4 import FP4, quantize

from ..cache import Rows
from ..collectives import index, parts, summand_dtype
from ..config import InklingConfig
from ..ops import route, swiglu
from ..quantization import Format
from .basic import Axes, constant, normal


class DenseMLP(nnx.Module):
    """SwiGLU, then the learned scalar `scale`."""

    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, width = config.hidden_size, config.dense_size
        self.w13 = normal(rngs, (2, width, hidden), (None, "mlp", "hidden"), dtype)
        self.w2 = normal(rngs, (hidden, width), ("hidden", "mlp"), dtype)
        self.scale = constant(1.0, (1,), (None,), dtype)

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        return swiglu(
            x,
            self.w13[...],
            self.w2[...],
            summand_dtype("mlp", x.dtype),
            scale=self.scale[0],
            implementation=rows.implementation,
        )


class Router(nnx.Module):
    """Scores of the routed experts, then of the shared ones. Bias and scale stay float32."""

    def __init__(self, config: InklingConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        outputs = config.num_experts + config.num_shared_experts
        self.weight = normal(rngs, (outputs, config.hidden_size), (None, "hidden"), dtype)
        self.bias = constant(0.0, (config.num_experts,), (None,), jnp.float32)
        self.scale = constant(1.0, (1,), (None,), jnp.float32)
        self.experts_per_token = config.experts_per_token
        self.route_scale = config.route_scale

    def __call__(
        self, x: Float[Array, "M H"], implementation: Implementation = "xla"
    ) -> tuple[Int[Array, "M A"], Float[Array, "M AS"]]:
        """Expert ids and float32 weights, the shared experts' weights last."""
        weights = self.weight[...], self.bias[...], self.scale[0]
        return route(x, *weights, self.experts_per_token, self.route_scale, implementation)


class Packed(nnx.Module):
    """Weights [E, ..., I] in 4 bits, as parameters of the words, the scales and, in NVFP4, the experts' scales.

    `packed[...]` is the `FP4` that they make, where a plain parameter gives its array.
    """

    def __init__(self, weights: Float[Array, "E *rows I"], axes: Axes, format: Format):
        packed = quantize(weights, format)
        self.codes = nnx.Param(packed.codes, axes=axes)
        self.scales = nnx.Param(packed.scales, axes=axes)
        scale = packed.expert_scale
        self.expert_scale = None if scale is None else nnx.Param(scale, axes=axes[:1])
        self.format: Format = format

    def __getitem__(self, _: EllipsisType) -> Any:  # as untyped as a parameter's
        scale = None if self.expert_scale is None else self.expert_scale[...]
        return FP4(self.codes[...], self.scales[...], scale, self.format)


class Experts(nnx.Module):
    """Stacked SwiGLU experts; `axes` are those of the stack and of a width. With a `format` weights are `Packed`."""

    def __init__(
        self,
        count: int,
        config: InklingConfig,
        axes: tuple[str | None, str],
        format: Format | None = None,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def weights(shape: tuple[int, ...], axes: Axes) -> nnx.Param | Packed:
            plain = normal(rngs, shape, axes, dtype)
            return plain if format is None else Packed(plain[...], axes, format)

        hidden, size, (stack, width) = config.hidden_size, config.expert_size, axes
        self.w13 = weights((count, 2, size, hidden), (stack, None, width, "hidden"))
        self.w2 = weights((count, hidden, size), (stack, "hidden", width))


class MoE(nnx.Module):
    """Routed experts, in 4 bits with a `format`, and shared ones, never."""

    def __init__(self, config: InklingConfig, format: Format | None = None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.router = Router(config, dtype=dtype, rngs=rngs)
        self.experts = Experts(config.num_experts, config, ("expert", "expert_mlp"), format, dtype=dtype, rngs=rngs)
        self.shared = Experts(config.num_shared_experts, config, (None, "mlp"), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H"], rows: Rows) -> Float[Array, "B T H"]:
        flat = x.reshape(-1, x.shape[-1])
        ids, weights = self.router(flat, rows.implementation)
        routed, shared = (self.experts.w13[...], self.experts.w2[...]), (self.shared.w13[...], self.shared.w2[...])
        mixture = partial(moe, valid=rows.real(x.shape[1]).reshape(-1), implementation=rows.implementation)
        if parts("expert") == 1:
            y = mixture(flat, ids, weights, *routed, *shared)
        else:  # every device has narrow parts of the shared experts besides experts of its own
            here = self.experts.w13[...].shape[0]
            own, elsewhere = ids - index("expert") * here, (parts("expert") - 1) * here  # those add nothing
            y = mixture(flat, own, weights[:, : ids.shape[1]], *routed, elsewhere=elsewhere).astype(jnp.float32)
            for s, (w13, w2) in enumerate(zip(*shared, strict=True)):
                y = y + weights[:, ids.shape[1] + s, None] * swiglu(flat, w13, w2, implementation=rows.implementation)
        return y.reshape(x.shape)
