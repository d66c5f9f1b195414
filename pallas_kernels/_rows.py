"""RMSNorm and what the row kernels share: the definition in jnp, and the same over the column tiles of a kernel.

A kernel holds a row as a list of tiles whose sizes are powers of two, so that a width like 6144 = 3 * 2048 wastes no
lane. The fastest axis is indexed by a bare range: anything else costs the 16-byte loads.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels._dispatch import next_power_of_2

LEAST_TILE, MOST_TILE = 256, 2048
Tiles = list[jax.Array]
Range = tuple[jax.Array, jax.Array | None]  # columns, mask


def rms_norm(x: Float[Array, "... H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "... H"]:
    """x * rsqrt(mean(x^2) + eps) * w in float32, rounded once to the type of x (spec: RMSNorm)."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) / x.shape[-1] + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def norm_tiles(x: Tiles, weight: Tiles, width: int, eps: float) -> Tiles:
    """`rms_norm` of one row of `width` columns before its rounding; lanes past the width hold 0."""
    x = [tile.astype(jnp.float32) for tile in x]
    squares = sum((tile * tile for tile in x[1:]), start=x[0] * x[0])
    scale = lax.rsqrt(jnp.sum(squares) / width + eps)
    return [tile * scale * w.astype(jnp.float32) for tile, w in zip(x, weight, strict=True)]


def rounded(tiles: Tiles, dtype: jnp.dtype) -> Tiles:
    """The tiles as they would come back from memory: one rounding to dtype, held in float32."""
    return [tile.astype(dtype).astype(jnp.float32) for tile in tiles]


def both(mask: jax.Array | None, whether: jax.Array | bool, shape: tuple[int, ...]) -> jax.Array | None:
    """The mask of a tile that is there only if `whether`; None where nothing is masked."""
    if isinstance(whether, bool):
        return mask if whether else jnp.zeros(shape, bool)
    whether = jnp.broadcast_to(whether, shape)
    return whether if mask is None else mask & whether


def load_stored(ref, mask: jax.Array | None) -> jax.Array:
    """A tile in the type it is stored in, 0 where it is masked."""
    return plt.load(ref, mask=mask, other=None if mask is None else 0.0)


@dataclass(frozen=True, slots=True)
class Columns:
    """How a kernel cuts `width` columns into tiles of `tile` lanes."""

    width: int
    tile: int

    @classmethod
    def of(cls, width: int, most: int = MOST_TILE) -> "Columns":
        """The largest power of two that divides the width, else one masked tile or several."""
        divisor = min(width & -width, most)
        return cls(width, divisor if divisor >= LEAST_TILE else min(next_power_of_2(width), most))

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return -(-self.width // self.tile)

    def range_of(self, index: int | jax.Array) -> Range:
        """A tile's column indices, and the mask of its real ones where tiles pass the width."""
        columns = index * self.tile + jnp.arange(self.tile)
        inside = self.width % self.tile == 0 or (isinstance(index, int) and index < self.count - 1)
        return columns, None if inside else columns < self.width

    def ranges(self) -> list[Range]:
        """All tiles."""
        return [self.range_of(index) for index in range(self.count)]

    def load(self, ref, *index) -> Tiles:
        """Row `ref[*index, :width]` in the type it is stored in."""
        return [load_stored(ref.at[(*index, cols)], mask) for cols, mask in self.ranges()]

    def store(self, ref, tiles: Tiles, *index, start: int = 0) -> None:
        """Write the row to `ref[*index, start:start + width]`, rounded to the type of ref."""
        for (cols, mask), tile in zip(self.ranges(), tiles, strict=True):
            plt.store(ref.at[(*index, start + cols if start else cols)], tile.astype(ref.dtype), mask=mask)
