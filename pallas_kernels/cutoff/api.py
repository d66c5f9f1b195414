"""The public function."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._dispatch import check_dtype, check_index, check_shape, resolve
from pallas_kernels.cutoff.reference import DEEPEST, Sum, cutoff_reference
from pallas_kernels.cutoff.triton import cutoff_triton

OP = "cutoff"


def cutoff(
    x: Float[Array, "N V"],
    wanted: Float[Array, " N"],
    last: Int32[Array, " N"] | None = None,
    *,
    weighted: bool,
    add_up: Sum | None = None,
    implementation: str | None = None,
) -> Int32[Array, " N"]:
    """How deep into a row, largest numbers first, it takes for the weights to reach `wanted`: top-k and top-p.

    x is float32, at or below 0. A number's depth is the int32 of the bits of -x, which grows as x falls; taken are all
    numbers of that depth and above it, those that tie with the last one too. Their weights are exp(x), or 1 each where
    not `weighted`. Numbers deeper than `last` weigh nothing. 2^31 - 1 where all of a row do not reach what is wanted.
    So top-k is `wanted` = k, and top-p `wanted` = p times the sum of the weights. A row's result does not depend on
    its neighbours. Where several devices have columns of the rows, `add_up` gives the sum over them of its argument
    [N, 32]. Raises ValueError for a wrong shape or dtype, NotImplementedError when the asked implementation cannot run
    here.
    """
    check_shape(OP, "x", x, (None, None))
    check_dtype(OP, "x", x, (jnp.float32,))
    check_shape(OP, "wanted", wanted, x.shape[:1])
    check_dtype(OP, "wanted", wanted, (jnp.float32,))
    last = jnp.full(x.shape[0], DEEPEST, jnp.int32) if last is None else last
    check_shape(OP, "last", last, x.shape[:1])
    check_index(OP, "last", last)
    chosen = resolve(OP, implementation)
    if chosen == "xla" or x.size == 0:
        return cutoff_reference(x, wanted, last, weighted, add_up)
    return cutoff_triton(x, wanted, last, weighted, add_up, chosen)
