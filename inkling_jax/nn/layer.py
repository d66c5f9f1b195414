"""A decoder layer and an MTP depth."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..cache import LayerCache, Rows
from ..config import InklingConfig
from ..quantization import Format
from .attention import Attention
from .basic import Linear, RMSNorm, ShortConv
from .mlp import DenseMLP, MoE


class DecoderLayer(nnx.Module):
    """`x + sconv(attention(norm x))`, then `x + sconv(mlp(norm x))`: each branch has two residuals, both real."""

    def __init__(
        self,
        config: InklingConfig,
        local: bool,
        dense: bool,
        format: Format | None = None,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        hidden, eps, width = config.hidden_size, config.norm_eps, config.conv_width
        self.attn_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.attn = Attention(config, local, dtype=dtype, rngs=rngs)
        self.attn_conv = ShortConv(hidden, width, "hidden", dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.mlp = DenseMLP(config, dtype=dtype, rngs=rngs) if dense else MoE(config, format, dtype=dtype, rngs=rngs)
        self.mlp_conv = ShortConv(hidden, width, "hidden", dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T H"],
        rows: Rows,
        cache: LayerCache | None,
        page_table: Int[Array, "B pages"] | None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        a, cache = self.attn(self.attn_norm(x), rows, cache, page_table)
        a, attn_ring = self.attn_conv(a, rows, cache and cache.attn_conv)
        x = x + a
        m, mlp_ring = self.mlp_conv(self.mlp(self.mlp_norm(x), rows), rows, cache and cache.mlp_conv)
        if cache is not None:
            assert attn_ring is not None and mlp_ring is not None
            cache = dataclasses.replace(cache, attn_conv=attn_ring, mlp_conv=mlp_ring)
        return x + m, cache


class Depth(nnx.Module):
    """One MTP depth: joins the previous hidden row with a later token's embedding, then one dense decoder layer."""

    def __init__(self, config: InklingConfig, local: bool, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, eps = config.hidden_size, config.norm_eps
        self.hidden_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.embed_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.proj = Linear(2 * hidden, hidden, ("hidden", None), dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(config, local, dense=True, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        h_prev: Float[Array, "B T H"],
        e: Float[Array, "B T H"],
        rows: Rows,
        cache: LayerCache | None,
        page_table: Int[Array, "B pages"] | None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        z = self.proj(jnp.concatenate([self.hidden_norm(h_prev), self.embed_norm(e)], axis=-1))
        return self.layer(z, rows, cache, page_table)
