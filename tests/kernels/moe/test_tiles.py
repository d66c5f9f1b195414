"""The tiles of each path on each card: within shared memory, wide loads, nothing spilled."""

import jax
import pytest

from pallas_kernels._dispatch import SHARED_MEMORY, Target
from pallas_kernels.moe import shapes
from pallas_kernels.moe.tiles import choose_tiles, shared_tiles
from tests.kernels.gpu_free import DEVICES, HAS_TRITON, MachineCode, kernels, lower

# test_compile has bfloat16 and MXFP4 decoding. A tile of 128 x 256 sums leaves Hopper four registers short.
PATHS = {"nvfp4 decode": (8, "nvfp4", DEVICES, 0), "bf16 prefill": (8192, None, ("sm_80", "sm_90", "gfx942"), 16)}


@pytest.mark.skipif(not HAS_TRITON, reason="the triton wheel is for Linux on x86-64")
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name, path in PATHS.items() for arch in path[2]])
def test_machine_code_fits_the_card(name, arch):
    rows, form, _, spilled = PATHS[name]
    case = shapes.case(rows, 64, form)
    [(state, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
    for kernel in kernels(lower(lambda s, i: case.run("triton", s, i), (state, inputs), arch)):
        code = MachineCode.of(kernel, arch)
        assert code.shared <= SHARED_MEMORY[arch]
        assert code.spills <= spilled
        assert not any(width < 4 for width in code.loads), code.loads
        assert code.loads.get(16, 0) > 0 or kernel.name != "expert_kernel", code.loads


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_buffers_fit_every_card(arch, packed, up):
    where = Target("rocm" if arch.startswith("gfx") else "cuda", arch)
    for itemsize in (2, 4):
        for rows in (1, 8, 64, 512, 8192):
            tiles = choose_tiles(up, rows, 6 * rows, 64, packed, itemsize, where)
            for t in (tiles, shared_tiles(tiles, rows, packed)):
                one_stage = (t.rows + (1 + up) * t.outputs) * t.depth * itemsize
                assert one_stage <= where.shared_memory
                assert t.num_stages == 2 or t.buffers(1 + up, itemsize) <= where.shared_memory
                assert t.depth % (128 if packed and t is tiles else 16) == 0


def test_experts_on_other_devices_count_too():
    """512 rows choose 6 of 256 experts, half of which are here: 12 rows an expert, as where all are here."""

    def launched(experts: int, elsewhere: int) -> list[tuple[int, int]]:
        case = shapes.case(512, experts, "nvfp4", 4096, 1024, absent=elsewhere)
        [(state, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
        found = kernels(lower(lambda s, i: case.run("triton", s, i), (state, inputs), "sm_90"))
        return [(k.num_warps, k.num_stages) for k in found if k.name == "expert_kernel"]

    assert launched(128, 128) == launched(256, 0) != launched(128, 0)
