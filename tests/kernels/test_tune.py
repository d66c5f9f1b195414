"""The search for tiles: where it goes, what it may change, and that a launch runs with the tiles it is given."""

import math

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, tune
from pallas_kernels.linear.tiles import Tiles as LinearTiles
from pallas_kernels.moe.tiles import Tiles as MoeTiles
from tests.kernels.gpu_free import device, kernels, lower

START = MoeTiles(16, 32, 128, 4, 3)


def test_neighbours_differ_in_one_field_and_keep_the_rows():
    for start in (START, LinearTiles(8, 8, 512, 1, 2)):
        near = [tiles for _, tiles in tune.neighbours(start)]
        fields = ("outputs", "depth", "num_warps", "num_stages", "group")
        assert len(set(near)) == len(near) >= 5
        for tiles in near:
            changed = [f for f in tiles.__dataclass_fields__ if getattr(tiles, f) != getattr(start, f)]
            assert len(changed) == 1 and changed[0] in fields
            least, most = tune.LIMITS[changed[0]]
            assert least <= getattr(tiles, changed[0]) <= most


def test_the_search_finds_the_fastest_and_asks_once_for_each():
    asked = []

    def seconds(tiles):
        asked.append(tiles)
        if tiles.depth > 256:
            raise tune.Refused("too deep")
        goal = {"outputs": 64, "depth": 256, "num_warps": 2, "num_stages": 5, "group": 4}
        return 1 + sum(abs(math.log2(getattr(tiles, field) / value)) for field, value in goal.items())

    lines = []
    best, least, before = tune.descend(START, seconds, lines.append)
    assert (best.rows, best.outputs, best.depth, best.num_warps, best.num_stages, best.group) == (16, 64, 256, 2, 5, 4)
    assert least == 1 < before == seconds(START)
    assert len(set(asked[:-1])) == len(asked) - 1 == len(lines) + 1
    refused = [line for line in lines if "too deep" in line]
    assert refused and all(line.startswith("  depth 256 -> 512 ") for line in refused)


def test_noise_moves_nothing():
    best, least, before = tune.descend(START, lambda tiles: 1.0 if tiles == START else 0.995, lambda _: None)
    assert best == START and least == before == 1.0


@pytest.mark.parametrize(
    ("op", "shape", "launches"),
    [
        ("linear", "o, Small, rows 16", 1),
        ("linear", "dense w13, SwiGLU, rows 16", 1),
        ("moe", "nvfp4 4096 x 1024, rows 8,", 2),
    ],
)
def test_a_launch_runs_with_the_tiles_it_is_given(op, shape, launches):
    [case] = [case for case in bench.cases(op) if case.shape.startswith(shape)]
    [(_, inputs)] = jax.eval_shape(lambda: case.make(jax.random.key(0), 1))
    with device("sm_90"):
        found = tune.searches(op, inputs, jnp.bfloat16)
    assert len(found) == launches
    multiply = lambda lowered: [k for k in kernels(lowered) if k.name in ("linear_kernel", "expert_kernel")]  # noqa: E731
    chosen = multiply(lower(lambda inputs: case.run("triton", (), inputs)[1], (inputs,), "sm_90"))
    for i, search in enumerate(found):
        assert (search.chosen.num_warps, search.chosen.num_stages) == (chosen[i].num_warps, chosen[i].num_stages)
        same = multiply(lower(lambda inputs, s=search: s.run(inputs, s.chosen), (inputs,), "sm_90"))
        assert [k.ir for k in same] == [k.ir for k in chosen]
        other = tune.replace(search.chosen, num_stages=7)
        changed = multiply(lower(lambda inputs, s=search, t=other: s.run(inputs, t), (inputs,), "sm_90"))
        assert [k.num_stages == 7 for k in changed] == [j == i for j in range(launches)]


def test_without_a_gpu_it_says_so(capsys):
    assert tune.main(["linear", "--shape", "LM head"]) == 2
    assert "needs an NVIDIA or AMD GPU" in capsys.readouterr().err


def test_a_shape_that_is_not_there_lists_those_that_are(capsys):
    with pytest.raises(SystemExit):
        tune.main(["linear", "--shape", "LM tail"])
    assert "no shape of linear has 'LM tail'" in (err := capsys.readouterr().err) and "LM head, rows 16" in err
