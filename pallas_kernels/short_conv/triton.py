"""One program a row, or a few rows: all channels where a norm follows, a tile of them where none does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._conv import RowPlan, add_up, convolve, load_taps
from pallas_kernels._dispatch import Implementation, fence, pallas_call
from pallas_kernels._rows import Columns, both, load_stored, norm_tiles, rounded

TILE_THREADS = 256  # of one program where no norm ties the channels together, two channels each


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """How many taps, in how many summands x comes (0: whole), what follows the convolution in the same launch, and
    whether a real card runs it.
    """

    taps: int
    summands: int
    residual: bool
    norm: bool
    on_a_card: bool
    eps: float


def short_conv_kernel(*refs, plan: RowPlan, columns: Columns, fused: Fused):
    """refs: x or its summands, weight [C * W], start, count, [residual], [norm weight], ring, out, [normed], and ring.

    What a program keeps it keeps as it is stored. A row alone has all its loads under way before it uses the first: it
    waits for memory twice, for `start`, and for the rows of the ring whose place that says.
    """
    x_ref, weight_ref, start_ref, count_ref, *rest = refs
    residual_ref = rest.pop(0) if fused.residual else None
    norm_ref = rest.pop(0) if fused.norm else None
    _, out_ref, *normed_ref, ring_ref = rest
    b, program, alone = pl.program_id(0), pl.program_id(1), plan.block == 1
    indices = range(columns.count) if fused.norm else [pl.program_id(2)]
    tiles = [columns.range_of(index) for index in indices]

    def load(ref, row, whether: jax.Array | bool = True, part: tuple[int, ...] = ()):
        masks = [both(mask, whether, cols.shape) for cols, mask in tiles]
        return [load_stored(ref.at[(*part, b, row, cols)], m) for (cols, _), m in zip(tiles, masks, strict=True)]

    def store(ref, row, values, whether: jax.Array | bool = True):
        for (cols, mask), value in zip(tiles, values, strict=True):
            plt.store(ref.at[b, row, cols], value.astype(ref.dtype), mask=both(mask, whether, cols.shape))

    def load_new(t, whether: jax.Array | bool = True):
        whether = whether if alone else whether & (t < count)
        if not fused.summands:
            return load(x_ref, t, whether)
        parts = [load(x_ref, t, whether, (p,)) for p in range(fused.summands)]
        return [add_up(tile).astype(ring_ref.dtype) for tile in zip(*parts, strict=True)]

    def load_row(t):
        return load_new(t), None if residual_ref is None else load(residual_ref, t, True if alone else t < count)

    taps = [
        load_taps(weight_ref, fused.taps, cols, mask, index * columns.tile)
        for index, (cols, mask) in zip(indices, tiles, strict=True)
    ]
    norm = columns.load(norm_ref) if fused.norm else None

    own = load_row(program) if alone else None
    fence(fused.on_a_card and alone)
    start, count = start_ref[b], jnp.minimum(count_ref[b], plan.rows)
    window = plan.rows_before(program, start, fused.taps, load_new, functools.partial(load, ring_ref))
    fence(fused.on_a_card and alone)

    def row(t, window, x, residual):
        window = [*window, x]
        ys = [convolve(rows, w) for *rows, w in zip(*window, taps, strict=True)]
        if residual is not None:
            ys = [y + r.astype(jnp.float32) for y, r in zip(rounded(ys, out_ref.dtype), residual, strict=True)]
        ys = [jnp.where(t < count, y, 0.0) for y in ys]
        store(out_ref, t, ys)
        if norm is not None:
            store(normed_ref[0], t, norm_tiles(rounded(ys, out_ref.dtype), norm, columns.width, fused.eps))
        return window[1:]

    store_ring = functools.partial(store, ring_ref)
    if own is not None:
        plan.write_ring(program, start, count, lambda *_: own[0], store_ring, fused.on_a_card)
        row(program, window, *own)
    else:
        plan.for_each_row(program, lambda t, window: row(t, window, *load_row(t)), window)
        plan.write_ring(program, start, count, load_new, store_ring, fused.on_a_card)


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
    batch, rows, width = x.shape[-3:]
    norm, taps = norm_weight is not None, weight.shape[1]
    plan = RowPlan.of(batch, rows, ring.shape[1], taps)
    threads = TILE_THREADS if not norm else 1024 if plan.block == 1 else 512
    columns = Columns.of(width) if norm else Columns.of(width, most=2 * TILE_THREADS)
    operands = [a for a in (x, weight.reshape(-1), start, count, residual, norm_weight, ring) if a is not None]
    out = jax.ShapeDtypeStruct(x.shape[-3:], ring.dtype)
    outs = [out] * (1 + norm)
    summands = x.shape[0] if x.ndim == 4 else 0
    fused = Fused(taps, summands, residual is not None, norm, implementation == "triton", eps)
    call = pallas_call(
        functools.partial(short_conv_kernel, plan=plan, columns=columns, fused=fused),
        op="short_conv",
        implementation=implementation,
        grid=(batch, plan.programs, 1 if norm else columns.count),
        out_shape=[*outs, jax.ShapeDtypeStruct(ring.shape, ring.dtype)],
        threads=threads,
        num_stages=1,
        aliases={len(operands) - 1: len(outs)},
    )
    return tuple(call(*operands))
