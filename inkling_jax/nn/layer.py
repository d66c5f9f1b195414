"""A decoder layer and an MTP depth."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels

from ..cache import LayerCache, Rows
from ..collectives import all_gather
from ..config import InklingConfig
from ..quantization import Format
from .attention import Attention
from .basic import Embedding, Linear, RMSNorm, ShortConv
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
        normed: Float[Array, "B T H"],
        next_norm: RMSNorm | None,
        rows: Rows,
        cache: LayerCache | None,
        page_table: Int[Array, "B pages"] | None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"], LayerCache | None]:
        """From the residual stream x and `attn_norm(x)` to the stream after this layer and `next_norm` of it.

        A norm leaves with the sum that it reads, so that one kernel does both.
        """
        a, cache = self.attn(normed, rows, cache, page_table)
        x, normed, attn_ring = self.attn_conv.add_norm(a, rows, cache and cache.attn_conv, x, self.mlp_norm, "heads")
        m = self.mlp(normed, rows)
        x, normed, mlp_ring = self.mlp_conv.add_norm(m, rows, cache and cache.mlp_conv, x, next_norm, "mlp")
        if cache is not None:
            assert attn_ring is not None and mlp_ring is not None
            cache = dataclasses.replace(cache, attn_conv=attn_ring, mlp_conv=mlp_ring)
        return x, normed, cache


class Depth(nnx.Module):
    """One MTP depth: joins the previous hidden row with a later token's embedding, then one dense decoder layer."""

    def __init__(self, config: InklingConfig, local: bool, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, eps = config.hidden_size, config.norm_eps
        self.hidden_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.embed_norm = RMSNorm(hidden, eps, "hidden", dtype=dtype)
        self.proj = Linear(2 * hidden, hidden, ("joined", None), dtype=dtype, rngs=rngs)
        self.layer = DecoderLayer(config, local, dense=True, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        h_prev: Float[Array, "B T H"],
        tokens: Int[Array, "B T"],
        embed: Embedding,
        next_norm: RMSNorm | None,
        rows: Rows,
        cache: LayerCache | None,
        page_table: Int[Array, "B pages"] | None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        """`next_norm` of the row that predicts the token after each of `tokens`; without a norm the row itself."""
        implementation = "xla" if cache is None else rows.implementation
        joined = self._join(h_prev, tokens, embed, implementation)
        z = all_gather(self.proj(joined, implementation=implementation), "joined")
        _, out, cache = self.layer(z, self.layer.attn_norm(z), next_norm, rows, cache, page_table)
        return out, cache

    def _join(
        self,
        h_prev: Float[Array, "B T H"],
        tokens: Int[Array, "B T"],
        embed: Embedding,
        implementation: kernels.Implementation,
    ) -> Float[Array, "B T 2*H"]:
        if implementation == "xla":
            e = embed(tokens).astype(h_prev.dtype)
            return jnp.concatenate([self.hidden_norm(h_prev), self.embed_norm(e)], axis=-1)
        joined = kernels.embed_dual_norm_cat(
            h_prev.reshape(-1, h_prev.shape[-1]),
            self.hidden_norm.weight[...],
            self.embed_norm.weight[...],
            eps=self.embed_norm.eps,
            token_ids=tokens.reshape(-1),
            embed_table=embed.weight[...],
            pre_norm_weight=embed.norm.weight[...],
            implementation=implementation,
        )
        return joined.reshape(*h_prev.shape[:-1], -1)
