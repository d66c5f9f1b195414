"""The small modules: linear map, RMSNorm, short convolution."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels

from ..cache import Ring, Rows
from ..collectives import all_gather, all_reduce, few, own, reduce_scatter, summands
from ..ops import linear, rms_norm, short_conv

Axes = tuple[str | None, ...]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, dtype: DTypeLike) -> nnx.Param:
    """A parameter drawn from N(0, 1 / fan_in), the size of its last axis, with its logical axes."""
    scale = 1 / math.sqrt(shape[-1])
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: Axes, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


class Linear(nnx.Module):
    """`x @ weight.T`, weight [out, in] as in the checkpoint; with a shard of the input, a shard's part of the sum."""

    def __init__(self, inputs: int, outputs: int, axes: Axes, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (outputs, inputs), axes, dtype)

    def __call__(
        self,
        x: Float[Array, "*rows I"],
        out_dtype: DTypeLike | None = None,
        implementation: kernels.Implementation = "xla",
    ) -> Float[Array, "*rows O"]:
        return linear(x, self.weight[...], out_dtype, implementation=implementation)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, axis: str | None = None, *, dtype: DTypeLike):
        self.weight = constant(1.0, (size,), (axis,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows C"]) -> Float[Array, "*rows C"]:
        return rms_norm(x, self.weight[...], self.eps)


class ShortConv(nnx.Module):
    """Depthwise causal convolution plus its own input, over new rows and the remembered rows before them."""

    def __init__(self, channels: int, width: int, axis: str, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (channels, width), (axis, None), dtype)

    def __call__(
        self, x: Float[Array, "B T C"], rows: Rows, ring: Ring | None, taps: Float[Array, "C W"] | None = None
    ) -> tuple[Float[Array, "B T C"], Ring | None]:
        """`taps`: the weight of the channels of `x`, where these are not all."""
        weight = self.weight[...] if taps is None else taps
        before = weight.shape[1] - 1
        if ring is None:
            return short_conv(x, jnp.zeros((x.shape[0], before, x.shape[2]), x.dtype), weight), None
        left = ring.read(rows.start - before, before)
        return short_conv(x, left, weight), ring.write(x, rows)

    def add_norm(
        self,
        branch: Float[Array, "B T C"],
        rows: Rows,
        ring: Ring | None,
        residual: Float[Array, "B T C"],
        norm: RMSNorm | None,
        axis: str,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"], Ring | None]:
        """The residual stream with this branch added, and `norm` of it; without a norm the stream again.

        `branch` is this device's part of a sum over `axis` (`collectives.summand_dtype`). With few rows
        (`collectives.few`) every device sums and convolves whole rows. With many, or when its part of the ring is all
        it has, it sums and convolves its own channels, with their taps and their part of the ring, and the stream is
        gathered.
        """
        if few(branch.shape[0] * branch.shape[1], axis) and (ring is None or ring.axis is None):
            if norm is None or ring is None or rows.implementation == "xla":
                x = all_reduce(branch, axis).astype(residual.dtype)
                stream, ring = self._add(x, rows, ring, residual, self.weight[...])
                return stream, stream if norm is None else norm(stream), ring
            x = summands(branch, axis)  # the kernel adds them up
            x = x if x.shape[0] > 1 else x[0].astype(residual.dtype)
            stream, normed, new = kernels.short_conv_add_norm(
                *(x, self.weight[...], ring.rows, rows.start, rows.count, residual, norm.weight[...]),
                eps=norm.eps,
                implementation=rows.implementation,
            )
            return stream, normed, dataclasses.replace(ring, rows=new)
        x = reduce_scatter(branch.astype(residual.dtype), axis)
        part = ring if ring is None or ring.axis is not None else Ring(own(ring.rows, axis))
        stream, part = self._add(x, rows, part, own(residual, axis), own(self.weight[...], axis, 0))
        stream = lax.optimization_barrier(all_gather(stream, axis))  # else XLA hands the norm a float32 copy
        if part is not None and ring is not None and ring.axis is None:
            part = Ring(all_gather(part.rows, axis))
        return stream, stream if norm is None else norm(stream), part

    def _add(
        self,
        x: Float[Array, "B T C"],
        rows: Rows,
        ring: Ring | None,
        residual: Float[Array, "B T C"],
        taps: Float[Array, "C W"],
    ) -> tuple[Float[Array, "B T C"], Ring | None]:
        if ring is None or rows.implementation == "xla":
            y, ring = self(x, rows, ring, taps)
            return residual + y, ring
        stream, new = kernels.short_conv(
            x, taps, ring.rows, rows.start, rows.count, residual=residual, implementation=rows.implementation
        )
        return stream, dataclasses.replace(ring, rows=new)


class Embedding(nnx.Module):
    """Token rows, normed: what the backbone and every depth start from."""

    def __init__(self, vocabulary: int, size: int, eps: float, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (vocabulary, size), ("token", "hidden"), dtype)
        self.norm = RMSNorm(size, eps, "hidden", dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return self.norm(self.weight[...][tokens])

    def begin(
        self, tokens: Int[Array, "B T"], next_norm: RMSNorm, rows: Rows
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """The residual stream and `next_norm` of it.

        A kernel makes both: XLA sums a norm's squares in an order that turns with the number of rows.
        """
        weight = next_norm.weight[...]
        if rows.implementation == "xla":
            stream = self(tokens).astype(weight.dtype)  # in training the table is float32
            return stream, next_norm(stream)
        stream, normed = kernels.embed_norm(
            *(tokens, self.weight[...], self.norm.weight[...]),
            eps=self.norm.eps,
            next_weight=weight,
            implementation=rows.implementation,
        )
        return stream, normed
