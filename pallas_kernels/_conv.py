"""The residual depthwise causal convolution and its position-addressed ring: the definition, and a kernel's parts.

Row t of sequence b stands at position start[b] + t and is real when t < count[b]; position p lives in row p % R of the
ring. A launch reads ring rows before `start` and writes rows from `start` on. As long as R >= T + W - 1 these never
meet, so every row may be a program of its own. With more rows they do, and then only the program that holds a
sequence's first rows touches the ring: it reads them first, and writes when it is done.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._dispatch import check_float, check_index, check_shape, next_power_of_2

Tiles = list[jax.Array]
Store = Callable[[jax.Array, Tiles, jax.Array | bool], None]  # (ring slot, the row, whether to)
Load = Callable[[jax.Array, jax.Array | bool], Tiles]  # (row, whether to) -> the row as stored, 0 where not loaded


def real_rows(count: Int32[Array, " B"], rows: int) -> Bool[Array, "B T"]:
    """Which of the T rows are real."""
    return jnp.arange(rows) < count[:, None]


def conv_reference(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C W"],
    ring: Float[Array, "B R C"],
    start: Int32[Array, " B"],
    count: Int32[Array, " B"],
) -> Float[Array, "B T C"]:
    """y_t = x_t + sum_j w_j x_{t-W+1+j} in float32, oldest tap first, rounded once; zeros past count (spec: sconv)."""
    before = weight.shape[1] - 1
    positions = start[:, None] + jnp.arange(-before, 0)
    left = jnp.take_along_axis(ring, (positions % ring.shape[1])[..., None], axis=1)
    left = jnp.where(positions[..., None] >= 0, left, 0)
    inputs = jnp.concatenate([left, x], axis=1).astype(jnp.float32)
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(weight.shape[1]):
        total = total + inputs[:, j : j + x.shape[1]] * weight[:, j].astype(jnp.float32)
    total = total + x.astype(jnp.float32)
    return jnp.where(real_rows(count, x.shape[1])[..., None], total, 0).astype(x.dtype)


def ring_reference(
    x: Float[Array, "B T C"], ring: Float[Array, "B R C"], start: Int32[Array, " B"], count: Int32[Array, " B"]
) -> Float[Array, "B R C"]:
    """The ring with the real rows written, the last R of them where there are more."""
    size, t, count = ring.shape[1], jnp.arange(x.shape[1]), jnp.minimum(count, x.shape[1])
    kept = (t < count[:, None]) & (t >= count[:, None] - size)
    slots = jnp.where(kept, (start[:, None] + t) % size, size)
    return ring.at[jnp.arange(x.shape[0])[:, None], slots].set(x, mode="drop")


def check_conv(op: str, names: Sequence[str], x: jax.Array, channels: int, weight: jax.Array, ring: jax.Array) -> None:
    """Raise ValueError unless weight [C, W] and ring [B, R >= W - 1, C], so named, fit C channels of x [B, T, ..]."""
    check_float(op, names[0], weight)
    check_shape(op, names[0], weight, (channels, None))
    check_float(op, names[1], ring, like=x)
    check_shape(op, names[1], ring, (x.shape[0], None, channels))
    if ring.shape[1] < max(weight.shape[1] - 1, 1):
        raise ValueError(
            f"{op}: {names[1]} has {ring.shape[1]} rows; expected at least {weight.shape[1] - 1}, the taps less one"
        )


def check_rows(op: str, start: jax.Array, count: jax.Array, batch: int) -> None:
    """Raise ValueError unless start and count are int32 [B]."""
    for name, array in (("start", start), ("count", count)):
        check_shape(op, name, array, (batch,))
        check_index(op, name, array)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which program runs which rows: `block` rows each, one where rows and ring cannot meet."""

    rows: int
    ring_rows: int
    block: int

    @classmethod
    def of(cls, batch: int, rows: int, ring_rows: int, taps: int) -> "RowPlan":
        """Blocks are longer than the taps, so that only a sequence's first block looks at the ring.

        They grow with the rows: a long block loads the taps once, a short one leaves work for every multiprocessor.
        """
        if ring_rows >= rows + taps - 1:
            return cls(rows, ring_rows, 1)
        return cls(rows, ring_rows, next_power_of_2(max(taps - 1, 4, min(batch * rows // 512, 16))))

    @property
    def programs(self) -> int:
        return pl.cdiv(self.rows, self.block)

    def loads(self, row: jax.Array, count: jax.Array) -> jax.Array | bool:
        """Whether to load a row of the launch. A row alone does not wait for the count: it is there, real or not."""
        return True if self.block == 1 else row < count

    def rows_before(
        self, program: jax.Array, start: jax.Array, taps: int, load_new: Load, load_ring: Load
    ) -> list[Tiles]:
        """The taps - 1 rows before a program's first one: of this launch, or from the ring; zeros before position 0."""

        def row_at(row: jax.Array) -> Tiles:
            ring = load_ring(jnp.maximum(start + row, 0) % self.ring_rows, (row < 0) & (start + row >= 0))
            if self.rows == 1:
                return ring
            new = load_new(jnp.maximum(row, 0), row >= 0)
            return [jnp.where(row >= 0, *pair) for pair in zip(new, ring, strict=True)]

        return [row_at(program * self.block - back) for back in range(taps - 1, 0, -1)]

    def for_each_row(self, program: jax.Array, body: Callable, carry: Any) -> None:
        """Run `carry = body(t, carry)` for the rows of a program, counted along the sequence."""
        first = program * self.block
        if self.block == 1:
            body(first, carry)
        else:
            jax.lax.fori_loop(first, jnp.minimum(first + self.block, self.rows), body, carry)

    def write_ring(self, program, start, count, load_new: Load, store: Store, barrier: bool) -> None:
        """Store the rows whose ring slot is this program's to write: its own, or all of the sequence's."""
        if self.block == 1:
            store((start + program) % self.ring_rows, load_new(program, True), program < count)
            return

        @pl.when(program == 0)
        def first_block():
            if barrier:  # other warps of this block may still be reading the rows that are about to go
                plt.debug_barrier()
            oldest = jnp.maximum(count - self.ring_rows, 0)

            def step(t, _):
                store((start + t) % self.ring_rows, load_new(t, True), True)

            jax.lax.fori_loop(oldest, count, step, None)


def add_up(summands: Sequence[jax.Array] | jax.Array) -> jax.Array:
    """Their sum in float32, in order."""
    return functools.reduce(jnp.add, [x.astype(jnp.float32) for x in summands])


def load_taps(ref, taps: int, channel: jax.Array, mask: jax.Array | None, first: jax.Array | int | None) -> Tiles:
    """The taps of a tile of channels, a tile for each tap, from weights [C * W]; anything where the mask is false.

    A channel's taps lie side by side, so they are loaded together and parted in registers: one strided load for each
    would be 2 bytes wide. `first` is given where the tile's channels follow one another: then a thread that holds two
    channels of a row loads its own taps, 16 bytes of them, and none is exchanged.
    """
    padded, shape = next_power_of_2(taps), channel.shape
    if first is not None and padded == taps:
        at = first * taps + jnp.arange(channel.size * taps)
        inside = None if mask is None else at < ref.shape[0]
    else:
        tap = jnp.arange(padded)
        at = (channel[..., None] * taps + tap).reshape(-1, padded)
        inside = jnp.broadcast_to(tap < taps, at.shape)
        inside = inside if mask is None else inside & (at < ref.shape[0])
    loaded = plt.load(ref.at[at], mask=inside, other=None if inside is None else 0.0).reshape(-1, padded)
    parts = jax.lax.split(loaded, [1] * padded, axis=1) if padded > 1 else [loaded]
    return [part.reshape(shape) for part in parts[:taps]]


def convolve(window: Sequence[jax.Array], taps: Tiles) -> jax.Array:
    """One row's convolution in float32, before its rounding, from its own row and those before it, oldest first."""
    x = [row.astype(jnp.float32) for row in window]
    total = jnp.zeros_like(x[-1])
    for tap, row in zip(taps, x, strict=True):
        total = total + tap.astype(jnp.float32) * row
    return total + x[-1]
