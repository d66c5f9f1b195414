"""Attention with short convolutions on keys and values and a learned, query-dependent relative bias."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels

from ..cache import VERIFY_ROWS, LayerCache, PagedKV, Rows
from ..collectives import index, parts, summand_dtype
from ..config import AttentionShape, InklingConfig
from ..ops import attend, linear
from .basic import Linear, RMSNorm, ShortConv, normal


class Attention(nnx.Module):
    """One layer's attention, local or global; the two kinds may differ in heads, KV heads and head_dim.

    On a mesh that splits "heads" its output is a device's part of a sum, float32, which the residual branch rounds.
    """

    def __init__(self, config: InklingConfig, local: bool, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.shape = shape = config.attention(local)
        self.log_scaling = (None if local else config.log_scaling_floor, config.log_scaling_alpha)
        hidden, queries, keys = config.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.wq = Linear(hidden, queries, ("heads", "hidden"), dtype=dtype, rngs=rngs)
        self.wk = Linear(hidden, keys, ("kv_heads", "hidden"), dtype=dtype, rngs=rngs)
        self.wv = Linear(hidden, keys, ("kv_heads", "hidden"), dtype=dtype, rngs=rngs)
        self.wr = Linear(hidden, shape.heads * config.rel_dim, ("heads", "hidden"), dtype=dtype, rngs=rngs)
        self.wo = Linear(queries, hidden, ("hidden", "heads"), dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(shape.head_dim, config.norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(shape.head_dim, config.norm_eps, dtype=dtype)
        self.k_conv = ShortConv(keys, config.conv_width, "kv_heads", dtype=dtype, rngs=rngs)
        self.v_conv = ShortConv(keys, config.conv_width, "kv_heads", dtype=dtype, rngs=rngs)
        # [out, in] as all weights, which is how the kernels read it; a checkpoint holds it the other way round.
        self.rel_proj = normal(rngs, (shape.extent, config.rel_dim), (None, None), dtype)

    def __call__(
        self,
        x: Float[Array, "B T H"],
        rows: Rows,
        cache: LayerCache | None,
        page_table: Int[Array, "B pages"] | None,
    ) -> tuple[Float[Array, "B T H"], LayerCache | None]:
        if cache is not None and page_table is not None and rows.implementation != "xla":
            return self._with_kernels(x, rows, cache, page_table)
        batch, new, _ = x.shape
        shape, (wk, wv, k_taps, v_taps) = self._own_shape(), self._own_keys()
        heads = lambda y, count: y.reshape(batch, new, count, -1)  # noqa: E731
        k, k_ring = self.k_conv(linear(x, wk), rows, cache and cache.k_conv, k_taps)
        v, v_ring = self.v_conv(linear(x, wv), rows, cache and cache.v_conv, v_taps)
        q = self.q_norm(heads(self.wq(x), shape.heads))
        k = self.k_norm(heads(k, shape.kv_heads))
        v = heads(v, shape.kv_heads)
        out, kv = attend(
            q,
            k,
            v,
            heads(self.wr(x), shape.heads),
            self.rel_proj[...].T,
            rows,
            shape,
            tau=self._tau(rows.positions(new)),
            kv=cache and cache.kv,
            page_table=page_table,
        )
        if cache is not None:
            assert kv is not None and k_ring is not None and v_ring is not None
            cache = LayerCache(kv, k_ring, v_ring, cache.attn_conv, cache.mlp_conv)
        return self._output(out, rows), cache

    def _output(self, out: Float[Array, "B T N D"], rows: Rows) -> Float[Array, "B T H"]:
        flat = out.reshape(*out.shape[:2], -1)
        return self.wo(flat, summand_dtype("heads", flat.dtype), rows.implementation)

    def _own_shape(self) -> AttentionShape:
        """The heads of this device: all of them without a mesh."""
        devices = parts("heads")
        kv_heads = max(self.shape.kv_heads // devices, 1)
        return replace(self.shape, heads=self.shape.heads // devices, kv_heads=kv_heads)

    def _own_keys(self) -> list[Float[Array, "C *rest"]]:
        """Weights of keys and values, then their taps, of this device's KV heads.

        They come as shards, except where heads are fewer than devices: then each takes the one its queries attend to.
        """
        weights = [module.weight[...] for module in (self.wk, self.wv, self.k_conv, self.v_conv)]
        devices, heads, dim = parts("heads"), self.shape.kv_heads, self.shape.head_dim
        if devices <= heads:
            return weights
        first = index("heads") * heads // devices * dim
        return [lax.dynamic_slice_in_dim(weight, first, dim) for weight in weights]

    def _with_kernels(
        self, x: Float[Array, "B T H"], rows: Rows, cache: LayerCache, page_table: Int[Array, "B pages"]
    ) -> tuple[Float[Array, "B T H"], LayerCache]:
        """The same with `qkvr_prep` and a relative attention kernel.

        As in `ops.attend`, a verify's rows are in the pages before they attend, a chunk's are written afterwards.
        """
        new = x.shape[1]
        few, shape, kv = new <= VERIFY_ROWS, self._own_shape(), cache.kv
        wk, wv, k_taps, v_taps = self._own_keys()
        pages = dict(k_pages=kv.k, v_pages=kv.v, page_table=page_table)
        made = kernels.qkvr_prep(
            linear(x, [self.wq.weight[...], wk, wv, self.wr.weight[...]], implementation=rows.implementation),
            k_taps,
            v_taps,
            self.q_norm.weight[...],
            self.k_norm.weight[...],
            cache.k_conv.rows,
            cache.v_conv.rows,
            rows.start,
            rows.count,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            eps=self.q_norm.eps,
            kv_rows=kv.ring,
            implementation=rows.implementation,
            **(pages if few else {}),
        )
        attention = partial(
            kernels.rel_paged_attention if few else kernels.rel_attention,
            count=rows.count,
            r=made.r,
            rel_proj=self.rel_proj[...].T,
            scale=1.0 / shape.head_dim,
            extent=shape.extent,
            window=shape.window,
            tau=self._tau(rows.positions(new)),
            implementation=rows.implementation,
        )
        if made.k is None or made.v is None:
            kv = PagedKV(made.k_pages, made.v_pages, kv.ring)
            out = attention(made.q, kv.k, kv.v, page_table, rows.start + rows.count)
        else:
            out = attention(made.q, made.k, made.v, start=rows.start, **pages)
            kv = kv.write(made.k, made.v, page_table, rows)
        rings = replace(cache.k_conv, rows=made.k_ring), replace(cache.v_conv, rows=made.v_ring)
        cache = LayerCache(kv, *rings, cache.attn_conv, cache.mlp_conv)
        return self._output(out, rows), cache

    def _tau(self, positions: Int[Array, "B T"]) -> Float[Array, "B T"] | None:
        """Log scaling of global layers, from the absolute position; exactly 1 below the floor."""
        floor, alpha = self.log_scaling
        if floor is None:
            return None
        return 1.0 + alpha * jnp.log(jnp.maximum((positions + 1).astype(jnp.float32) / floor, 1.0))
