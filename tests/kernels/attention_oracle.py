"""Relative attention in float64 NumPy, one row and head at a time, and paged caches full of poison to run it on."""

import functools
from collections.abc import Callable

import jax
import numpy as np

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}  # float32: a few units, for its long sums


def attend64(q, k, v, q_pos, rel, tau, *, scale: float, extent: int, window: int | None) -> np.ndarray:
    """q [T, N, D] at positions q_pos over keys k, v [S, K, D] at positions 0 .. S - 1; rel [T, N, X] or None."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for t, n in np.ndindex(*q.shape[:2]):
        keys = [j for j in range(q_pos[t] + 1) if window is None or q_pos[t] - j < window]
        if not keys:
            continue
        scores = k[keys, n // group] @ q[t, n] * scale
        if rel is not None:
            scores += [rel[t, n, q_pos[t] - j] if q_pos[t] - j < extent else 0.0 for j in keys]
        scores *= 1.0 if tau is None else float(tau[t])
        weights = np.exp(scores - scores.max())
        out[t, n] = weights @ v[keys, n // group] / weights.sum()
    return out


# On a CPU these programs take far longer to compile than to run.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def jitted(op: Callable[..., jax.Array], patches: tuple, implementation: str, **options) -> Callable[..., jax.Array]:
    """The op under jit, compiled once for its options and for what a test put in place of the kernel's functions."""
    del patches
    call = functools.partial(op, implementation=implementation, **options)
    return jax.jit(call, compiler_options=None if implementation == "triton" else QUICK)


def scatter_to_pages(
    rows: list[np.ndarray], page: int, max_pages: int, ring: int | None = None, first: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Pages [P, K, page, D] in random order that hold each sequence's rows [S, K, D], and the table of their numbers.

    Whatever no sequence owns is NaN: the rest of each last page, spare pages, page 0. Unused table entries are -1. With
    `ring`, a sequence has that many pages and its entries repeat them, so that its newest rows overwrite the oldest.
    With `first`, the pages wholly before that row of each sequence were given back: NaN too, their entries -1.
    """
    kv_heads, head_dim = rows[0].shape[1:]
    table = np.full((len(rows), max_pages), -1, np.int32)
    used = [-(-len(r) // page) for r in rows]
    owned = [n if ring is None else min(n, ring) for n in used]
    pages = np.full((sum(owned) + 3, kv_heads, page, head_dim), np.nan, rows[0].dtype)
    free = iter(1 + np.random.default_rng(0).permutation(sum(owned) + 1))
    for b, r in enumerate(rows):
        own = [next(free) for _ in range(owned[b])]
        for i in range(used[b]):
            table[b, i] = own[i % len(own)]
            part = r[i * page : (i + 1) * page]
            pages[table[b, i], :, : len(part)] = part.swapaxes(0, 1)
        if first is not None:
            given_back = max(first[b], 0) // page
            pages[table[b, :given_back]] = np.nan
            table[b, :given_back] = -1
    return pages, table


def assert_close(actual, exact: np.ndarray, values: np.ndarray, bias_error: float = 0.0) -> None:
    """Within the rounding of the weights and of the result to their type, each at most a unit of the largest value.

    `bias_error` bounds the absolute error of the bias; it moves each weight by as much, relatively, and their sum too.
    """
    actual = np.asarray(actual)
    room = (3 * UNIT[actual.dtype.name] + 2 * bias_error) * np.nanmax(np.abs(values.astype(np.float64)), initial=1.0)
    worst = np.abs(actual.astype(np.float64) - exact)
    assert np.all(worst <= room), (
        f"off by {worst.max()}, {room} allowed, at {np.argwhere(~(worst <= room))[:5].tolist()}"
    )
