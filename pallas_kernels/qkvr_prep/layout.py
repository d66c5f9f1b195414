"""The shapes of one call, and the names of its operands and results."""

from dataclasses import dataclass
from typing import NamedTuple

import jax


class Weights(NamedTuple):
    """What the layer holds: conv taps [K*D, W] and norm weights [D]."""

    k_conv: jax.Array
    v_conv: jax.Array
    q_norm: jax.Array
    k_norm: jax.Array


class Pages(NamedTuple):
    """Paged keys and values [P, K, page, D], and the page table int32 [B, max_pages]."""

    k: jax.Array
    v: jax.Array
    table: jax.Array


class QKVR(NamedTuple):
    """What attention reads. k and v are None when they went into pages, the pages None when there were none."""

    q: jax.Array  # [B, T, N, D]
    r: jax.Array  # [B, T, N, R]
    k: jax.Array | None  # [B, T, K, D]
    v: jax.Array | None
    k_ring: jax.Array  # [B, ring rows, K*D], updated
    v_ring: jax.Array
    k_pages: jax.Array | None  # [P, K, page, D], updated
    v_pages: jax.Array | None


@dataclass(frozen=True, slots=True)
class Heads:
    """Where the parts of a product row lie: N query heads, K keys, K values of D columns, then N times R."""

    queries: int
    kv: int
    dim: int
    rel: int

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """First columns of q, k, v and r."""
        q, kv = self.queries * self.dim, self.kv * self.dim
        return 0, q, q + kv, q + 2 * kv

    @property
    def columns(self) -> int:
        return self.starts[3] + self.queries * self.rel
