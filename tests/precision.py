"""Helpers to say how well something was rounded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def bf16(x: Any) -> jax.Array:
    return jnp.asarray(np.asarray(x), jnp.bfloat16)


def half_ulps_bf16(found: Any, exact: np.ndarray) -> float:
    """The largest error of `found` in half units of the last place of bfloat16: at most 1 when rounded only once."""
    _, exponent = np.frexp(exact)
    half_ulp = np.ldexp(1.0, exponent - 9)  # 8 significant bits
    return float(np.max(np.abs(np.asarray(found, float) - exact) / half_ulp))


def relative_error(found: Any, exact: np.ndarray) -> float:
    """The largest error in units of the largest magnitude of `exact`."""
    return float(np.max(np.abs(np.asarray(found, float) - exact)) / np.max(np.abs(exact)))
