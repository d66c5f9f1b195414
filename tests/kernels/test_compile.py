"""Every kernel at the real models' shapes lowers for both platforms and fits the cards, without one at hand."""

import re

import jax
import pytest

from pallas_kernels import bench
from pallas_kernels._case import Case
from pallas_kernels._dispatch import SHARED_MEMORY, pallas_call, target, why_not_triton
from tests.kernels.gpu_free import DEVICES, HAS_TRITON, Kernel, MachineCode, device, kernels, lower

CASES = [pytest.param(case, id=f"{op}: {case.shape}") for op in bench.OPS for case in bench.cases(op)]
# One shape an op and layout: the row counts of a batch change the grid, not the code.
ONE_EACH = [
    pytest.param(c, id=f"{op}: {c.shape}") for op in bench.OPS for c in (bench.cases(op)[:1] + bench.cases(op)[-1:])
]


# Operands too small for more: a head's 128 numbers are 8 bytes a lane of AMD's warps, a group's r [16, 16] one number;
# 64 logits are two a lane, or one; a chunk of ids is less than one.
WIDEST = {"combine_kernel": 8, "router_kernel": 4, "place_kernel": 4, "count_kernel": 4, "sum_kernel": 4}
NARROW = {"chunk_kernel": 1}


def triton_kernels(case: Case, arch: str) -> list[Kernel]:
    [(state, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
    return kernels(lower(lambda s, i: case.run("triton", s, i), (state, inputs), arch))


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
@pytest.mark.parametrize("case", CASES)
def test_lowers(case, arch):
    assert triton_kernels(case, arch)


@pytest.mark.parametrize("arch", DEVICES)
def test_each_card_is_known(arch):
    with device(arch):
        where = target()
    assert where.arch == arch and where.shared_memory == SHARED_MEMORY[arch]
    assert why_not_triton(where) is None


@pytest.mark.skipif(not HAS_TRITON, reason="the triton wheel is for Linux on x86-64")
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("case", ONE_EACH)
def test_machine_code_fits_the_card(case, arch):
    for kernel in triton_kernels(case, arch):
        code = MachineCode.of(kernel, arch)
        assert code.shared <= SHARED_MEMORY[arch]
        assert code.spills == 0
        assert max(code.loads) >= WIDEST.get(kernel.name, 16), f"no wide loads: {code.loads}"
        narrow = sum(n for width, n in code.loads.items() if width < 4)
        assert narrow <= NARROW.get(kernel.name, 0), f"narrow loads: {code.loads}"


@pytest.mark.parametrize("name", ["short_conv", "qkvr_prep"])
def test_state_is_aliased_to_its_input(name):
    """Each state's operand and result share memory: in place, where the caller donates it."""
    case = bench.cases(name)[0]
    [(state, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
    text = lower(lambda s, i: case.run("triton", s, i), (state, inputs), "sm_90").as_text()
    assert len(re.findall("output_operand_alias<", text)) == len(jax.tree.leaves(state))


def test_a_kernel_that_does_not_compile_names_itself(monkeypatch):
    """The failure comes from the kernel's own compilation, before the program around it is compiled."""

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    x = jax.numpy.ones(16)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pallas_call(kernel, op="some_op", implementation="triton", grid=(1,), out_shape=out)
    with pytest.raises(RuntimeError, match=r"some_op: the Triton kernel does not compile.*choose implementation='xla'"):
        call(x)  # for a CPU, which Triton cannot reach
