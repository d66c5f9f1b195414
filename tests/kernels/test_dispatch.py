"""How kernels are called: those that are the same are known again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._dispatch import pallas_call


def test_a_kernel_is_traced_once_for_all_calls_that_are_the_same():
    traced = []

    def kernel(x_ref, out_ref, *, add):
        traced.append(add)
        out_ref[...] = x_ref[...] + add

    def call(x, add):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas_call(partial(kernel, add=add), op="add", implementation="interpret", grid=(1,), out_shape=shape)(
            x
        )

    @jax.jit
    def layers(x):
        for add in (1, 2, 1, 1):
            x = call(x, add)
        return x, call(x[:2], 1)

    x, part = layers(jnp.arange(4))
    assert traced == [1, 2, 1]  # what is bound, and shapes, make another kernel
    np.testing.assert_array_equal(x, np.arange(4) + 5)
    np.testing.assert_array_equal(part, np.arange(2) + 6)
