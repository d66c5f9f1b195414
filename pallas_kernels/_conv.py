"""The residual depthwise causal convolution and its position-addressed ring: the definition, and one row of a kernel.

Row t of sequence b stands at position start[b] + t and is real when t < count[b]; position p lives in row p % R of the
ring. A launch reads ring rows before `start` and writes rows from `start` on. As long as R >= T + W - 1 these never
meet, so every row may be a program of its own. With more rows they do, and then only the program that holds a
sequence's first rows touches the ring: it reads them first, and writes when it is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels._dispatch import check_float, check_index, check_shape, next_power_of_2

Write = Callable[[jax.Array, jax.Array, jax.Array], None]  # (row, ring slot, whether to)
Load = Callable[[jax.Array, jax.Array | bool], jax.Array]  # (row, whether to) -> one float32 tile, 0 where not loaded


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
    size, t = ring.shape[1], jnp.arange(x.shape[1])
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
    def of(cls, rows: int, ring_rows: int, taps: int) -> "RowPlan":
        """Blocks are longer than the taps, so that only a sequence's first block looks at the ring."""
        apart = ring_rows >= rows + taps - 1
        return cls(rows, ring_rows, 1 if apart else next_power_of_2(max(taps - 1, 4)))

    @property
    def programs(self) -> int:
        return pl.cdiv(self.rows, self.block)

    def for_each_row(self, program: jax.Array, body: Callable[[jax.Array], None]) -> None:
        """Run `body(t)` for the rows of a program, counted along the sequence."""
        first = program * self.block
        if self.block == 1:
            body(first)
        else:
            jax.lax.fori_loop(first, jnp.minimum(first + self.block, self.rows), lambda t, _: body(t), None)

    def write_ring(self, program: jax.Array, start: jax.Array, count: jax.Array, write: Write, barrier: bool) -> None:
        """Call `write` for the rows whose ring slot is this program's to write."""
        if self.block == 1:
            write(program, (start + program) % self.ring_rows, program < count)
            return

        @pl.when(program == 0)
        def first_block():
            if barrier:  # other warps of this block may still be reading the rows that are about to go
                plt.debug_barrier()
            oldest = jnp.maximum(count - self.ring_rows, 0)
            steps = jnp.minimum(count, self.ring_rows)
            jax.lax.fori_loop(
                0,
                steps,
                lambda i, _: write(oldest + i, (start + oldest + i) % self.ring_rows, oldest + i < count),
                None,
            )


def load_taps(ref, index: tuple[jax.Array, ...], mask: jax.Array) -> list[jax.Array]:
    """The taps `ref[*index, :]`, a float32 tile per tap, 0 where the mask is false.

    A channel's taps lie side by side, so they are loaded together and taken apart in registers: one strided load per
    tap would be 2 bytes wide.
    """
    width = ref.shape[-1]
    column = jnp.arange(next_power_of_2(width)).reshape((1,) * mask.ndim + (-1,))
    at = ref.at[(*(i[..., None] for i in index), column)]
    taps = plt.load(at, mask=mask[..., None] & (column < width), other=0.0).astype(jnp.float32)
    return [jnp.sum(jnp.where(column == j, taps, 0.0), axis=-1) for j in range(width)]


def conv_row(t, start, plan: RowPlan, taps: list[jax.Array], load_new: Load, load_ring: Load) -> jax.Array:
    """Row t of the convolution in float32, before its rounding; loads its own row and those before it."""
    x = load_new(t, True)
    total = jnp.zeros_like(x)
    for j, tap in enumerate(taps):
        back = len(taps) - 1 - j
        row = t - back
        value = x
        if back > 0:
            value = load_ring(jnp.maximum(start + row, 0) % plan.ring_rows, (row < 0) & (start + row >= 0))
        if 0 < back < plan.rows:
            value = jnp.where(row >= 0, load_new(jnp.maximum(row, 0), row >= 0), value)
        total = total + tap * value
    return total + x
