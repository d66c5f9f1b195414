"""The products of Inkling's decode steps, of Inkling-Small's, and of their parts on eight devices."""

import jax
import jax.numpy as jnp

from pallas_kernels._case import Case, apart
from pallas_kernels.linear.api import linear, linear_swiglu

PRODUCTS = {  # outputs of each weight, inputs
    "q|k|v|r": ((8192, 2048, 2048, 1024), 6144),
    "q|k|v|r, an eighth": ((1024, 256, 256, 128), 6144),
    "q|k|v|r, Small": ((4096, 1024, 1024, 512), 4096),
    "o": ((6144,), 8192),
    "o, an eighth": ((6144,), 1024),
    "o, Small": ((4096,), 4096),
    "dense w2": ((6144,), 24576),
    "MTP join": ((6144,), 12288),
    "LM head": ((201024,), 6144),
}


def weight(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)


def case(name: str, rows: int) -> Case:
    sizes, inputs = PRODUCTS[name]
    out_dtype = jnp.dtype(jnp.float32 if name == "LM head" else jnp.bfloat16)

    def make_one(key):
        weights = [weight(k, (size, inputs)) for k, size in zip(jax.random.split(key, len(sizes)), sizes, strict=True)]
        return (), (jax.random.normal(key, (rows, inputs), jnp.bfloat16), weights)

    def run(implementation, state, inputs):
        return state, linear(*inputs, out_dtype=out_dtype, implementation=implementation)

    moved = 2 * inputs * (sum(sizes) + rows) + out_dtype.itemsize * rows * sum(sizes)
    return Case(f"{name}, rows {rows}", apart(make_one), run, moved, flops=2 * rows * inputs * sum(sizes))


def swiglu_case(rows: int, width: int = 24576, inputs: int = 6144) -> Case:
    def make_one(key):
        x = jax.random.normal(key, (rows, inputs), jnp.bfloat16)
        return (), (x, weight(key, (2, width, inputs)))

    def run(implementation, state, inputs):
        return state, linear_swiglu(*inputs, implementation=implementation)

    moved = 2 * inputs * (2 * width + rows) + 2 * rows * width
    return Case(f"dense w13, SwiGLU, rows {rows}", apart(make_one), run, moved, flops=4 * rows * inputs * width)


ROWS = (1, 16, 64)
CASES = (*(case(name, rows) for name in PRODUCTS for rows in ROWS), *map(swiglu_case, ROWS))
