import importlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels._case import Case, apart

OWN = ("embed_norm", "embed_dual_norm_cat", "short_conv", "qkvr_prep", "router", "rel_paged_attention")
OWN += ("rel_attention", "linear", "moe", "cutoff")


def tiny() -> Case:
    """A state that counts the calls made on it, so that a call lifted out of the loop or dropped would show."""

    def run(implementation, state, inputs):
        del implementation
        return state + 1, inputs * 2

    return Case("tiny", apart(lambda key: (jnp.zeros(3), jax.random.normal(key, (8,)))), run, bytes_moved=64)


def test_the_loop_calls_every_variant_in_every_step():
    case = tiny()
    states, inputs = zip(*case.make(jax.random.key(0), 4), strict=True)
    carry = (list(states), jnp.zeros(1), jnp.float32(0))
    after, buffer, token = jax.lax.fori_loop(0, 5, bench.body(case, "xla", list(inputs), True), carry)
    assert all(bool((state == 5).all()) for state in after)
    assert float(buffer[0]) == 5
    assert float(token) == pytest.approx(5 * sum(float(x[0]) * 2 for x in inputs), rel=1e-5)


def test_a_measurement_is_a_time(monkeypatch):
    monkeypatch.setattr(bench, "SWEEP_BYTES", 2**16)
    monkeypatch.setattr(bench, "RUN_SECONDS", 1e-3)
    monkeypatch.setattr(bench, "REPEATS", 1)
    assert abs(bench.measure(tiny(), "xla", rate=1e12)) < 1


def test_without_a_gpu_it_says_so(capsys):
    assert bench.main(["router"]) == 2
    assert "needs an NVIDIA or AMD GPU" in capsys.readouterr().err


@pytest.mark.parametrize("op", OWN)
def test_every_op_has_shapes_whose_reference_traces(op):
    for case in importlib.import_module(f"pallas_kernels.{op}.shapes").CASES:
        [(state, inputs)] = jax.eval_shape(lambda case=case: case.make(jax.random.key(0), 1))
        after, out = jax.eval_shape(lambda s, i, case=case: case.run("xla", s, i), state, inputs)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert jax.tree.leaves(out) and case.bytes_moved > 0
