"""One program a row, or a few rows: all channels where a norm follows, a tile of them where none does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._conv import RowPlan, conv_row, load_taps
from pallas_kernels._dispatch import Implementation, pallas_call
from pallas_kernels._rows import Columns, norm_tiles, rounded

CHANNELS = 512  # of one program where no norm ties the channels together


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """What follows the convolution in the same launch, and whether a real card runs it."""

    residual: bool
    norm: bool
    barrier: bool
    eps: float


def short_conv_kernel(*refs, plan: RowPlan, columns: Columns, fused: Fused):
    """refs: x, weight, start, count, [residual], [norm weight], ring, out, [normed], ring again, in place."""
    x_ref, weight_ref, start_ref, count_ref, *rest = refs
    residual_ref = rest.pop(0) if fused.residual else None
    norm_ref = rest.pop(0) if fused.norm else None
    _, out_ref, *normed_ref, ring_ref = rest
    b, program = pl.program_id(0), pl.program_id(1)
    start, count = start_ref[b], count_ref[b]
    tiles = columns.ranges() if fused.norm else [columns.range_of(pl.program_id(2))]

    def load(ref, row, cols, mask, whether):
        mask = jnp.broadcast_to(whether, cols.shape) & (cols < columns.width if mask is None else mask)
        return plt.load(ref.at[b, row, cols], mask=mask, other=0.0).astype(jnp.float32)

    def convolved(t, cols, mask):
        live = t < count
        y = conv_row(
            t,
            start,
            plan,
            load_taps(weight_ref, (cols,), cols < columns.width),
            lambda row, whether: load(x_ref, row, cols, mask, live & whether),
            lambda row, whether: load(ring_ref, row, cols, mask, live & whether),
        )
        if residual_ref is not None:
            y = y.astype(out_ref.dtype).astype(jnp.float32) + load(residual_ref, t, cols, mask, live)
        return y

    def row(t):
        ys = [convolved(t, cols, mask) for cols, mask in tiles]
        for y, (cols, mask) in zip(ys, tiles, strict=True):
            plt.store(out_ref.at[b, t, cols], y.astype(out_ref.dtype), mask=mask)
        if norm_ref is not None:
            normed = norm_tiles(rounded(ys, out_ref.dtype), columns.load(norm_ref), columns.width, fused.eps)
            columns.store(normed_ref[0], normed, b, t)

    def write(t, slot, whether):
        for cols, mask in tiles:
            mask = jnp.broadcast_to(whether, cols.shape) & (cols < columns.width if mask is None else mask)
            plt.store(ring_ref.at[b, slot, cols], plt.load(x_ref.at[b, t, cols], mask=mask, other=0.0), mask=mask)

    plan.for_each_row(program, row)
    plan.write_ring(program, start, count, write, fused.barrier)


def short_conv_triton(
    x: jax.Array,
    weight: jax.Array,
    ring: jax.Array,
    start: jax.Array,
    count: jax.Array,
    residual: jax.Array | None,
    norm_weight: jax.Array | None,
    eps: float,
    implementation: Implementation,
) -> tuple[jax.Array, ...]:
    """The kernel's call; shapes and results as in the reference."""
    batch, rows, width = x.shape
    norm = norm_weight is not None
    plan = RowPlan.of(rows, ring.shape[1], weight.shape[1])
    columns = Columns.of(width) if norm else Columns.of(width, most=CHANNELS)
    operands = [a for a in (x, weight, start, count, residual, norm_weight, ring) if a is not None]
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outs = [out] * (1 + norm)
    fused = Fused(residual is not None, norm, implementation == "triton", eps)
    call = pallas_call(
        functools.partial(short_conv_kernel, plan=plan, columns=columns, fused=fused),
        op="short_conv",
        implementation=implementation,
        grid=(batch, plan.programs, 1 if norm else columns.count),
        out_shape=[*outs, jax.ShapeDtypeStruct(ring.shape, ring.dtype)],
        threads=256 if norm else 64,
        num_stages=1,
        aliases={len(operands) - 1: len(outs)},
    )
    return tuple(call(*operands))
