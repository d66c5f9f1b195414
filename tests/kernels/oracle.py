"""Independent float64 mathematics in NumPy, and how far a dtype may be from it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

STATIC = ("elsewhere", "eps", "implementation", "heads", "kv_heads", "kv_rows", "experts_per_token", "route_scale")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# The unit roundoff of each type and a little for the float32 arithmetic before it; float32 itself gets 8 of them.
ROUNDING = {"bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01, "float32": 2.0**-21}


def random(seed: int, shape: tuple[int, ...], dtype=jnp.float32, scale: float = 1.0) -> jax.Array:
    """Drawn by NumPy: an array operation of jax compiles for each shape, and these tests are mostly compilation."""
    return jnp.asarray((np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype))


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rms_norm64(x: np.ndarray, weight, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * f64(weight)


def assert_rounds_to(
    actual: jax.Array | np.ndarray, exact: np.ndarray, roundings: int = 1, floor: float = 1e-6
) -> None:
    """Each element is the exact value after that many roundings to its type; `floor` is the room near zero."""
    assert actual.shape == exact.shape
    room = ROUNDING[actual.dtype.name] * roundings * np.abs(exact) + floor
    worst = np.abs(f64(actual) - exact) - room
    assert np.all(worst <= 0), (
        f"off by {worst.max()} beyond the rounding, at {np.unravel_index(worst.argmax(), worst.shape)}"
    )


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The raw bits, so that equality means bitwise."""
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_arithmetic(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise; in float32 only near, where two programs of the same arithmetic may fuse a product and a sum apart."""
    if actual.dtype == np.float32:
        np.testing.assert_allclose(actual, expected, rtol=2.0**-20, atol=2.0**-20)
    else:
        np.testing.assert_array_equal(bits(actual), bits(expected))


def jitted(function):
    """The public function under jit, as callers run it; what is no array is static. Results are NumPy arrays."""
    static = [name for name in inspect.signature(function).parameters if name in STATIC]
    run = jax.jit(function, static_argnames=static)
    return lambda *args, **kw: jax.tree.map(np.asarray, run(*args, **kw))
