"""The mixture of experts: every row through the few experts it was routed to, never through all."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp4 import FP4, dequantize

from ..collectives import index, parts
from .swiglu import swiglu


def block_rows(assignments: int, experts: int) -> int:
    """Rows multiplied at a time by one expert: about its share, a power of two."""
    share = max(1, assignments // experts)
    return min(max(8, 1 << (share - 1).bit_length()), 4096)


def mixture(
    x: Float[Array, "M H"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M AS"],
    w13: Float[Array, "E 2 F H"] | FP4,
    w2: Float[Array, "E H F"] | FP4,
    shared_w13: Float[Array, "S 2 G H"],
    shared_w2: Float[Array, "S H G"],
    valid: Bool[Array, " M"] | None = None,
) -> Float[Array, "M H"]:
    """Weighted sum over the routed and the shared experts, float32 throughout.

    `weights` hold the A routed experts of each row, then the S shared ones. Rows that are not `valid` (padding) visit
    no routed expert. The sum runs in a fixed order, so that a row's result does not depend on its neighbours. Routed
    experts in 4 bits are unpacked one at a time, those that are hit only, in the dtype of `x`.

    On a mesh `ids` are of all experts, the weights those of this device (of shared experts it may have narrower parts,
    G wide), and the result is its part of the sum.
    """
    routed = _routed(x, ids, w13, w2, valid)
    total = jnp.zeros(x.shape, jnp.float32)
    for a in range(ids.shape[1]):
        total = total + weights[:, a, None] * routed[:, a]
    for s in range(shared_w13.shape[0]):
        total = total + weights[:, ids.shape[1] + s, None] * swiglu(x, shared_w13[s], shared_w2[s])
    return total


def _routed(
    x: Float[Array, "M H"],
    ids: Int[Array, "M A"],
    w13: Float[Array, "E 2 F H"] | FP4,
    w2: Float[Array, "E H F"] | FP4,
    valid: Bool[Array, " M"] | None,
) -> Float[Array, "M A H"]:
    """Each row's output from each of its experts, before weighting: float32.

    The (row, expert) pairs are sorted by expert and cut into blocks that hold one expert each. A scan walks over as
    many blocks as there can be and skips the empty ones, so an expert's weights are read only where somebody was
    routed to it.
    """
    experts, (rows, per_row) = w13.shape[0], ids.shape
    pairs = rows * per_row
    size = block_rows(pairs, experts * parts("expert"))
    flat = ids.reshape(-1)
    if parts("expert") > 1:
        flat = flat - index("expert") * experts
        flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    if valid is not None:
        flat = jnp.where(jnp.repeat(valid, per_row), flat, experts)
    order = jnp.argsort(flat, stable=True)
    count = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)[:experts]
    first = jnp.cumsum(count) - count
    blocks = -(-count // size)
    last_block = jnp.cumsum(blocks)

    def step(out: Float[Array, "pairs H"], block: Int[Array, ""]):
        def run(out: Float[Array, "pairs H"]) -> Float[Array, "pairs H"]:
            expert = jnp.searchsorted(last_block, block, side="right")
            offset = (block - (last_block - blocks)[expert]) * size + jnp.arange(size)
            pair = order[jnp.minimum(first[expert] + offset, pairs - 1)]
            y = swiglu(x[pair // per_row], _one(w13, expert, x.dtype), _one(w2, expert, x.dtype))
            return out.at[jnp.where(offset < count[expert], pair, pairs)].set(y, mode="drop")

        return lax.cond(block < last_block[-1], run, lambda out: out, out), None

    most = pairs // size + min(experts, pairs)
    out, _ = lax.scan(step, jnp.zeros((pairs, x.shape[1]), jnp.float32), jnp.arange(most, dtype=jnp.int32))
    return out.reshape(rows, per_row, -1)


def _one(weights: Float[Array, "E *rows I"] | FP4, expert: Int[Array, ""], dtype: DTypeLike) -> Float[Array, "*rows I"]:
    """The weights of one expert."""
    return dequantize(weights[expert], dtype) if isinstance(weights, FP4) else weights[expert]
