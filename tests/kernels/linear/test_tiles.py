"""The tiles of each number of rows on each card: within shared memory, wide loads, nothing spilled."""

import jax
import pytest

from pallas_kernels._dispatch import SHARED_MEMORY, Target
from pallas_kernels.linear import shapes
from pallas_kernels.linear.tiles import ROWS, choose_tiles
from tests.kernels.gpu_free import DEVICES, HAS_TRITON, MachineCode, kernels, lower


@pytest.mark.skipif(not HAS_TRITON, reason="the triton wheel is for Linux on x86-64")
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize(("name", "rows"), [("q|k|v|r, an eighth", 1), ("o", 64), ("LM head", ROWS)])
def test_machine_code_fits_the_card(name, rows, arch):
    case = shapes.case(name, rows)
    [(state, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
    [kernel] = kernels(lower(lambda s, i: case.run("triton", s, i), (state, inputs), arch))
    code = MachineCode.of(kernel, arch)
    assert code.shared <= SHARED_MEMORY[arch]
    assert code.spills == 0
    assert code.loads.get(16, 0) > 0 and not any(width < 4 for width in code.loads), code.loads


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("outputs", [832, 6144, 201024])
def test_buffers_fit_every_card(arch, outputs):
    where = Target("rocm" if arch.startswith("gfx") else "cuda", arch)
    for itemsize in (2, 4):
        for parts in (1, 2):
            for rows in range(1, ROWS + 1):
                tiles = choose_tiles(rows, outputs, parts, itemsize, where)
                assert (tiles.rows + parts * tiles.outputs) * tiles.depth * itemsize <= where.shared_memory
                assert tiles.num_stages == 2 or tiles.buffers(parts, itemsize) <= where.shared_memory
