"""Meshes: what they are made of, what they refuse, and a model on eight devices against one."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from inkling_jax.config import InklingConfig
from inkling_jax.decode.engine import Engine
from inkling_jax.quantization import Quantization
from inkling_jax.sharding import AXES, check_mesh, make_mesh, parse_mesh, sharding_of, shardings, spec_of
from tests import reference

ROOT = Path(__file__).parents[2]
SMALL = InklingConfig.from_name("inkling-small")


def mesh_of(data: int = 1, expert: int = 1, tensor: int = 1):
    """A mesh of devices that need not be here."""
    return AbstractMesh((data, expert, tensor), AXES)


def on_fake_devices(count: int, *command: str) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)


@pytest.mark.slow
def test_eight_devices_agree_with_one():
    run = on_fake_devices(8, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sharding/on_eight.py")
    out, _ = run.communicate(timeout=590)
    assert run.returncode == 0, out


@pytest.mark.slow
def test_two_processes_of_four_devices_agree_with_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    runs = [on_fake_devices(4, "-m", "tests.sharding.one_of_two", str(i), port) for i in range(2)]
    outs = [run.communicate(timeout=590)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outs)


def test_sizes_by_name_take_the_first_devices():
    mesh = make_mesh({"tensor": 1})
    assert mesh.axis_names == AXES and dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert mesh.devices.item() == jax.devices()[0]
    assert make_mesh(None) == mesh


def test_a_mesh_of_ones_own_gets_the_missing_axes():
    mesh = make_mesh(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("tensor", "data")))
    assert mesh.axis_names == AXES


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"model": 2}, r"mesh: there is no axis 'model'; expected data, expert, tensor"),
        ({"tensor": 0}, r"mesh: tensor = 0; expected an integer of at least 1"),
        ({"tensor": True}, r"mesh: tensor = True; expected an integer"),
        ({"expert": 2.0}, r"mesh: expert = 2.0; expected an integer"),
        ("tensor=2", r"mesh: expected sizes as in \{\"tensor\": 2\} or a jax.sharding.Mesh, found 'tensor=2'"),
        (2, r"mesh: expected sizes as in .*, found 2"),
        (Mesh(np.array([], dtype=object), ("tensor",)), r"mesh: it has no devices"),
        ({"tensor": 4096, "expert": 2}, r"mesh: expert=2, tensor=4096 takes 8192 devices and this machine has \d+"),
    ],
)
def test_no_mesh_of_these(spec, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(spec)


def test_sizes_as_the_command_line_has_them():
    assert parse_mesh("tensor=2, expert=4") == {"tensor": 2, "expert": 4}
    for text in ("tensor", "tensor=-1", "tensor=2,tensor=2", "", "tensor=2;expert=4"):
        with pytest.raises(ValueError, match=r"expected each axis once with its size, as in tensor=2,expert=4"):
            parse_mesh(text)


def test_one_axis_of_the_mesh_splits_one_dimension():
    assert spec_of(("expert", None, "expert_mlp", "hidden")) == PartitionSpec("expert", None, "tensor", None)
    with pytest.raises(ValueError, match=r"two of them are split over the same axis"):
        spec_of(("heads", "expert_mlp"))


def test_a_dimension_divides_or_is_refused():
    with pytest.raises(ValueError, match=r"mesh: heads, 10 long, does not divide into 4 \(tensor\)"):
        sharding_of(("heads", "hidden"), (10, 8), mesh_of(tensor=4))


@pytest.mark.parametrize(
    ("sizes", "changed", "message"),
    [
        (dict(expert=3), {}, r"num_experts = 256 does not divide by 3 \(expert\)"),
        (dict(tensor=64), {}, r"num_heads = 32 does not divide by 64 \(tensor\)"),
        (dict(tensor=4), dict(num_kv_heads=6, num_heads=36), r"num_kv_heads = 6: neither it nor tensor = 4 divides"),
        (dict(tensor=4), dict(vocab_size=200102), r"vocab_size = 200102 does not divide by 4 \(expert x tensor\)"),
    ],
)
def test_a_model_that_does_not_divide_says_where(sizes, changed, message):
    with pytest.raises(ValueError, match=r"the model does not divide over the mesh data=1(.|\n)*" + message):
        check_mesh(replace(SMALL, **changed), mesh_of(**sizes))


def test_packed_experts_are_cut_between_blocks():
    config = replace(SMALL, expert_size=192)
    check_mesh(config, mesh_of(tensor=4), Quantization("nvfp4", (4,)))
    with pytest.raises(ValueError, match=r"expert_size = 192 is not whole blocks of 32 on each of 4"):
        check_mesh(config, mesh_of(tensor=4), Quantization("mxfp4", (4,)))


def test_keys_and_values_of_few_heads_are_whole_everywhere():
    found = shardings(SMALL, mesh_of(tensor=16))
    assert found["layers.0.attn.wk.weight"].spec == PartitionSpec()
    assert found["layers.0.attn.wq.weight"].spec == PartitionSpec("tensor")
    assert shardings(SMALL, mesh_of(tensor=8))["layers.0.attn.wk.weight"].spec == PartitionSpec("tensor")


def test_a_mesh_of_one_device_is_not_sharded():
    config = replace(reference.BASE, num_layers=1, local_layers=(0,), mtp_depths=0, mtp_local=())
    params = {path: jnp.asarray(p) for path, p in reference.random_params(config).items()}
    logits = []
    for mesh in (None, make_mesh(None)):
        steps = Engine(config, params, "float32", mesh=mesh)
        length = np.array([7])
        cache = steps.cache(steps.shape(length, 0), length)
        arrays = steps.place(np.zeros((1, 1024), np.int32)), steps.place(length.astype(np.int32)), jnp.int32(0)
        program = steps.teacher_forced.trace(steps.leaves, cache, *arrays, chunk=8, depth=None)
        assert "shard_map" not in str(program.jaxpr)
        logits.append(steps.teacher_forced(steps.leaves, cache, *arrays, chunk=8, depth=None)[0])
    np.testing.assert_array_equal(*logits)
