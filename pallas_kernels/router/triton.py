"""Two launches: the product in parts of the depth, then one warp a row adds them up and takes the arg-max rounds.

Few rows and few experts are too little work for a card unless the depth is spread over it as well. The parts and the
order in which they are added follow from the depth alone, and rows do not meet: a row's result is bitwise the same
whatever else is in the batch.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Implementation, next_power_of_2, pallas_call, target
from pallas_kernels._flash import dot_transposed, every

PART = 512  # columns of x that a program multiplies
LARGEST, LEAST = 2**31 - 1, -(2**31)
LANES = 16  # what the rows of a part are padded to, so that they are loaded 16 bytes at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a call, and the tiles of the product: experts, rows and columns of x."""

    rows: int
    inputs: int
    experts: int
    shared: int
    chosen: int
    scale: float
    tile: tuple[int, int, int]
    num_warps: int
    num_stages: int

    @property
    def outputs(self) -> int:
        return self.experts + self.shared

    @property
    def padded(self) -> int:
        return pl.cdiv(self.outputs, LANES) * LANES

    @property
    def parts(self) -> int:
        return pl.cdiv(self.inputs, PART)


def make_plan(x: jax.Array, weight: jax.Array, experts: int, chosen: int, scale: float) -> Plan:
    """Tiles of few experts: Hopper's wide products, which may add in another order, take 64 of them and more."""
    rows, inputs = x.shape
    if x.dtype == jnp.float32:
        tile, warps, stages = (16, 16, 64), 2, 1
    elif rows <= 64:  # all loads at once
        least = 16 if target().platform == "rocm" else 8  # rows that matrix units take, beside 16 of the weights
        tile = 16, max(next_power_of_2(rows), least), PART
        warps, stages = max(tile[1] // 16, 1), 1
    else:
        tile, warps, stages = (32, 128, 64), 4, 3
    return Plan(rows, inputs, experts, weight.shape[0] - experts, chosen, scale, tile, warps, stages)


def router_product_kernel(x_ref, weight_ref, parts_ref, *, plan: Plan):
    """parts [parts, rows, padded]: x times the weight over one part of the columns."""
    outputs, rows, depth = plan.tile
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    out = pl.program_id(1) * outputs + jnp.arange(outputs, dtype=jnp.int32)
    part = pl.program_id(2)

    def load(ref, index, size, k):
        masks = [] if size % index.size == 0 else [(index < size)[:, None]]
        masks += [] if plan.inputs % PART == 0 else [(k < plan.inputs)[None]]
        mask = every(masks, (index.size, depth))
        return plt.load(ref.at[index[:, None], k[None]], mask=mask, other=None if mask is None else 0.0)

    def step(i, total):
        k = part * PART + i * depth + jnp.arange(depth, dtype=jnp.int32)
        return total + dot_transposed(load(weight_ref, out, plan.outputs, k), load(x_ref, row, plan.rows, k))

    total = jnp.zeros((outputs, rows), jnp.float32)
    total = step(0, total) if depth == PART else lax.fori_loop(0, PART // depth, step, total)
    masks = [] if plan.rows % rows == 0 else [(row < plan.rows)[:, None]]
    masks += [] if plan.padded % outputs == 0 else [(out < plan.padded)[None]]
    plt.store(parts_ref.at[part, row[:, None], out[None]], total.T, mask=every(masks, (rows, outputs)))


def log_sigmoid(x: jax.Array) -> jax.Array:
    return jnp.minimum(x, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(x)))


def ordered(x: jax.Array) -> jax.Array:
    """float32 as int32 in the same order: a reduction over integers is one instruction of NVIDIA's."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)  # -0 equals 0
    return jnp.where(bits < 0, bits ^ LARGEST, bits)


def choose(scores: jax.Array, logits: jax.Array, chosen: int, lanes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lanes of the largest scores, best first, ties to the lowest, and their logits: in tiles like `lanes`.

    A NaN counts as the largest, so that it reaches the weights and can be seen.
    """
    left, expert = ordered(jnp.where(jnp.isnan(scores), jnp.inf, scores)), jnp.arange(scores.shape[0], dtype=jnp.int32)
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    ids, own = jnp.zeros_like(lanes), jnp.zeros_like(lanes)
    for i in range(chosen):
        best = jnp.min(jnp.where(left == jnp.max(left), expert, LARGEST))
        left = jnp.where(expert == best, LEAST, left)
        ids = jnp.where(lanes == i, best, ids)
        own = jnp.where(lanes == i, jnp.max(jnp.where(expert == best, bits, LEAST)), own)
    return ids, lax.bitcast_convert_type(own, jnp.float32)


def router_kernel(parts_ref, bias_ref, scale_ref, ids_ref, weights_ref, *, plan: Plan):
    t, chosen = pl.program_id(0), plan.chosen
    expert = jnp.arange(next_power_of_2(plan.experts), dtype=jnp.int32)
    lanes = jnp.arange(next_power_of_2(chosen + plan.shared), dtype=jnp.int32)
    real = None if expert.size == plan.experts else expert < plan.experts
    is_shared = (lanes >= chosen) & (lanes < chosen + plan.shared)
    other = None if real is None else 0.0
    bias = plt.load(bias_ref.at[expert], mask=real, other=other)
    parts = [plt.load(parts_ref.at[p, t, expert], mask=real, other=other) for p in range(plan.parts)]
    beside = [
        plt.load(parts_ref.at[p, t, plan.experts + lanes - chosen], mask=is_shared, other=0.0)
        for p in range(plan.parts)
    ]
    logits = functools.reduce(jnp.add, parts)
    scores = jax.nn.sigmoid(logits) + bias
    ids, own = choose(scores if real is None else jnp.where(real, scores, -jnp.inf), logits, chosen, lanes)
    own = jnp.where(is_shared, functools.reduce(jnp.add, beside), own)
    log_weight = jnp.where(lanes < chosen + plan.shared, log_sigmoid(own), -jnp.inf)
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    plt.store(ids_ref.at[t, lanes], ids, mask=lanes < chosen)
    weight = weight / jnp.sum(weight) * (plan.scale * scale_ref[0])
    plt.store(weights_ref.at[t, lanes], weight, mask=lanes < chosen + plan.shared)


def router_triton(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
    experts_per_token: int,
    route_scale: float,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """The kernels' calls; shapes as in the reference."""
    plan = make_plan(x, weight, bias.shape[0], experts_per_token, route_scale)
    outputs, rows, _ = plan.tile
    product = pallas_call(
        functools.partial(router_product_kernel, plan=plan),
        op="router",
        implementation=implementation,
        grid=(pl.cdiv(plan.rows, rows), pl.cdiv(plan.outputs, outputs), plan.parts),
        out_shape=jax.ShapeDtypeStruct((plan.parts, plan.rows, plan.padded), jnp.float32),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    choice = pallas_call(
        functools.partial(router_kernel, plan=plan),
        op="router",
        implementation=implementation,
        grid=(plan.rows,),
        out_shape=(
            jax.ShapeDtypeStruct((plan.rows, plan.chosen), jnp.int32),
            jax.ShapeDtypeStruct((plan.rows, plan.chosen + plan.shared), jnp.float32),
        ),
        num_warps=1,
        num_stages=1,
    )
    ids, weights = choice(product(x, weight), bias, scale.reshape(1))
    return ids, weights
