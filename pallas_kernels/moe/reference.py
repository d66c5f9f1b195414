"""The definition, in jnp: rows sorted by expert, a block of one expert's rows at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.fp4 import FP4, dequantize


def block_rows(pairs: int, experts: int) -> int:
    """Rows multiplied at a time by one expert: about its share, a power of two."""
    share = max(1, pairs // experts)
    return min(max(8, 1 << (share - 1).bit_length()), 4096)


def linear(x: Float[Array, "M I"], w: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """x w^T in float32; x takes the weights' type, which is its own or, for unpacked weights, float32."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(
        x.astype(w.dtype), w, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def swiglu(x: Float[Array, "M H"], w13: Float[Array, "2 F H"], w2: Float[Array, "H F"]) -> Float[Array, "M H"]:
    # One product: XLA copies a half of the weights before it multiplies by it.
    gate, up = jnp.split(linear(x, w13.reshape(-1, w13.shape[-1])), 2, axis=-1)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), w2)


def expert_of(w: jax.Array | FP4, expert: jax.Array) -> jax.Array:
    """One expert's weights; packed ones unpacked in float32, which alone holds their products exactly."""
    return dequantize(w[expert], jnp.float32) if isinstance(w, FP4) else w[expert]


def routed(
    x: Float[Array, "M H"],
    ids: Int32[Array, "M A"],
    w13: Float[Array, "E 2 F H"] | FP4,
    w2: Float[Array, "E H F"] | FP4,
    elsewhere: int = 0,
) -> Float[Array, "M A H"]:
    """Each row's output from each of its experts, before weighting: float32. Ids outside 0 .. E - 1 give zeros.

    A scan walks over as many blocks as there can be and skips the empty ones, so an expert's weights are read, and
    unpacked, only where somebody was routed to it.
    """
    experts, (rows, per_row) = w13.shape[0], ids.shape
    pairs = rows * per_row
    size = block_rows(pairs, experts + elsewhere)
    flat = jnp.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
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
            y = swiglu(x[pair // per_row], expert_of(w13, expert), expert_of(w2, expert))
            return out.at[jnp.where(offset < count[expert], pair, pairs)].set(y, mode="drop")

        return lax.cond(block < last_block[-1], run, lambda out: out, out), None

    most = pairs // size + min(experts, pairs)
    out, _ = lax.scan(step, jnp.zeros((pairs, x.shape[1]), jnp.float32), jnp.arange(most, dtype=jnp.int32))
    return out.reshape(rows, per_row, -1)


def moe_reference(
    x: Float[Array, "M H"],
    ids: Int32[Array, "M A"],
    weights: Float[Array, "M AS"],
    w13: Float[Array, "E 2 F H"] | FP4,
    w2: Float[Array, "E H F"] | FP4,
    shared_w13: Float[Array, "S 2 F H"] | None,
    shared_w2: Float[Array, "S H F"] | None,
    valid: Bool[Array, " M"] | None,
    elsewhere: int = 0,
) -> Float[Array, "M H"]:
    """sum_a weights[a] expert[ids[a]](x) + sum_s weights[A + s] shared[s](x), in that order."""
    per_row, experts = ids.shape[1], w13.shape[0]
    if valid is not None:
        ids = jnp.where(valid[:, None], ids, experts)
    each = routed(x, ids, w13, w2, elsewhere)
    total = jnp.zeros(x.shape, jnp.float32)
    for a in range(per_row):
        hit = (ids[:, a] >= 0) & (ids[:, a] < experts)
        total = total + jnp.where(hit[:, None], weights[:, a, None] * each[:, a], 0.0)
    if shared_w13 is not None and shared_w2 is not None:
        for s in range(shared_w13.shape[0]):
            total = total + weights[:, per_row + s, None] * swiglu(x, shared_w13[s], shared_w2[s])
    if valid is not None:
        total = jnp.where(valid[:, None], total, 0.0)
    return total.astype(x.dtype)
