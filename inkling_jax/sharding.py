"""Where arrays live on a mesh of devices: one table from the model's logical axes to the mesh's axes.

A mesh has the axes data (batches), expert (routed experts) and tensor (heads, widths, vocabulary), each 1 unless asked
for; a single device is the mesh of ones. `TABLE` is the only place that says which axis of an array is split over what.
What runs on a mesh asks `inkling_jax.collectives` for the sums and gathers that these splits call for.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.fp4 import BLOCK_OF

from .config import AttentionShape, InklingConfig
from .quantization import Quantization

AXES = ("data", "expert", "tensor")
MLP_AXES = ("expert", "tensor")
"""What the sum of an MLP runs over: its experts, and the parts of each."""

TABLE: dict[str | None, tuple[str, ...]] = {
    "batch": ("data",),
    "pages": ("data",),  # a sequence's pages lie where the sequence is
    "heads": ("tensor",),
    "kv_heads": ("tensor",),  # whole everywhere when there are fewer than the axis has devices
    "expert": ("expert",),
    "expert_mlp": ("tensor",),
    "mlp": MLP_AXES,  # dense layers and shared experts have no experts to split
    "vocab": MLP_AXES,  # the LM head
    "joined": MLP_AXES,  # what a depth makes of its two inputs
    "token": (),  # the embedding: every device looks its rows up itself
    "hidden": (),  # norms, taps and the inputs of products are whole; the residual convolutions take their slice
    None: (),
}

MeshLike = Mapping[str, int] | Mesh | None


def make_mesh(spec: MeshLike) -> Mesh:
    """A mesh with all three axes from sizes by name (missing ones are 1), another mesh, or None for one device.

    Sizes take the first devices of the machine, of all processes where there are several. Raises ValueError for an
    unknown axis, a size that is not an integer of at least 1, more devices than there are, and a mesh over several
    processes, or by sizes, that leaves one of them without a device.
    """
    if isinstance(spec, Mesh):
        _known(spec.axis_names)
        if spec.empty:
            raise ValueError("mesh: it has no devices")
        _for_all(spec, "this mesh")
        order = [spec.axis_names.index(axis) for axis in AXES if axis in spec.axis_names]
        sizes = [spec.shape.get(axis, 1) for axis in AXES]
        return Mesh(spec.devices.transpose(order).reshape(sizes), AXES)
    spec = {} if spec is None else spec
    if not isinstance(spec, Mapping):
        raise ValueError(f'mesh: expected sizes as in {{"tensor": 2}} or a jax.sharding.Mesh, found {spec!r}')
    _known(spec)
    for axis, size in spec.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"mesh: {axis} = {size!r}; expected an integer of at least 1")
    sizes = [int(spec.get(axis, 1)) for axis in AXES]
    wanted, devices = math.prod(sizes), jax.devices()
    asked = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1) or "one device"
    if wanted > len(devices):
        raise ValueError(f"mesh: {asked} takes {wanted} devices and this machine has {len(devices)}")
    mesh = Mesh(np.array(devices[:wanted]).reshape(sizes), AXES)
    _for_all(mesh, asked, own=False)
    return mesh


def _for_all(mesh: Mesh, name: str, own: bool = True) -> None:
    """Raises ValueError where a process has no device of a mesh, which may be the `own` one of a single process."""
    having = {device.process_index for device in mesh.devices.flat}
    left = set(range(jax.process_count())) - having
    if left and not (own and len(having) == 1 and jax.process_index() in having):
        raise ValueError(
            f"mesh: {name} leaves process {min(left)} without a device: take devices of all {jax.process_count()} "
            f"processes (there are {jax.device_count()} devices), or give each process a jax.sharding.Mesh of its own"
        )


def mesh_of(params: Mapping[str, Any]) -> Mesh | None:
    """The mesh that parameters lie on, None for a single device."""
    for array in params.values():
        where = getattr(array, "sharding", None)
        if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh) and where.mesh.axis_names == AXES:
            return where.mesh
    return None


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in "tensor=2,expert=4". Raises ValueError for anything else; `make_mesh` judges names and sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or match[1] in sizes:
            raise ValueError(f"mesh: {text!r}; expected each axis once with its size, as in tensor=2,expert=4")
        sizes[match[1]] = int(match[2])
    return sizes


def _known(axes: Sequence[str] | Mapping[str, int]) -> None:
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"mesh: there is no axis {axis!r}; expected {', '.join(AXES)}")


def parts_of(mesh: Mesh, axes: Sequence[str]) -> int:
    """Over how many devices a dimension that is split over these axes of the mesh lies."""
    return math.prod(mesh.shape[axis] for axis in axes)


def spec_of(axes: Sequence[str | None]) -> PartitionSpec:
    """The table's answer for an array. Raises ValueError where two of its dimensions ask for one axis of the mesh."""
    split = [TABLE[axis] for axis in axes]
    used = [axis for dimension in split for axis in dimension]
    if len(set(used)) != len(used):
        raise ValueError(f"logical axes {tuple(axes)}: two of them are split over the same axis of the mesh")
    return PartitionSpec(*(dimension or None for dimension in split))


def sharding_of(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where an array of these logical axes and this shape lives.

    Raises ValueError for two dimensions on one axis of the mesh, and for a dimension that does not divide.
    """
    spec = spec_of(axes)
    for name, size in zip(axes, shape, strict=True):
        parts = parts_of(mesh, TABLE[name])
        if size % parts:
            raise ValueError(f"mesh: {name}, {size} long, does not divide into {parts} ({' x '.join(TABLE[name])})")
    return placed(spec, mesh)


def placed(spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """Where an array lives, in the one spelling for it: no mesh axis of a single device, no None at the end.

    JAX compiles a step again for arguments of another spelling, and gives results that of an argument like them.
    """
    dimensions = [(names,) if isinstance(names, str) else names or () for names in spec]
    split = [tuple(name for name in names if mesh.shape[name] > 1) or None for names in dimensions]
    while split and split[-1] is None:
        split.pop()
    return NamedSharding(mesh, PartitionSpec(*split))


def shardings(config: InklingConfig, mesh: Mesh, quantization: Quantization | None = None) -> dict[str, NamedSharding]:
    """Where every parameter lives, by its dotted path. Raises ValueError as `check_mesh` does."""
    from .nn import abstract_parameters, logical_axes  # which run on meshes and import this module

    check_mesh(config, mesh, quantization)
    abstract = abstract_parameters(config, quantization=quantization)
    found = {}
    for path, axes in logical_axes(config, quantization).items():
        attention = _attention_of(config, path)
        if attention is not None and attention.kv_heads < mesh.shape["tensor"]:
            axes = tuple(None if axis == "kv_heads" else axis for axis in axes)
        found[path] = sharding_of(axes, abstract[path].shape, mesh)
    return found


def _attention_of(config: InklingConfig, path: str) -> AttentionShape | None:
    """The attention that a parameter belongs to, None for the rest."""
    if match := re.match(r"layers\.(\d+)\.attn\.", path):
        return config.attention(config.is_local(int(match[1])))
    if match := re.match(r"mtp\.(\d+)\.layer\.attn\.", path):
        return config.attention(config.mtp_is_local(int(match[1])))
    return None


def check_mesh(config: InklingConfig, mesh: Mesh, quantization: Quantization | None = None) -> None:
    """Raises one ValueError that names everything of the model that the mesh does not divide."""
    wrong = list(_misfits(config, mesh, quantization))
    if wrong:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in AXES)
        raise ValueError(f"the model does not divide over the mesh {sizes}:\n  " + "\n  ".join(wrong))


def _misfits(config: InklingConfig, mesh: Mesh, quantization: Quantization | None) -> Iterator[str]:
    mixtures = len(config.dense_layers) < config.num_layers
    split = {("vocab_size", "vocab"): config.vocab_size, ("hidden_size", "mlp"): config.hidden_size}
    if config.dense_layers or config.mtp_depths:
        split["dense_size", "mlp"] = config.dense_size
    if mixtures:
        split["num_experts", "expert"] = config.num_experts
        split["expert_size", "mlp" if config.num_shared_experts else "expert_mlp"] = config.expert_size
    for (name, axis), size in split.items():
        parts = parts_of(mesh, TABLE[axis])
        if size % parts:
            yield f"{name} = {size} does not divide by {parts} ({' x '.join(TABLE[axis])})"
    if mixtures and quantization is not None:
        block, parts = BLOCK_OF[quantization.format], parts_of(mesh, TABLE["expert_mlp"])
        if config.expert_size % (block * parts):
            yield f"expert_size = {config.expert_size} is not whole blocks of {block} on each of {parts} (tensor)"
    tensor = mesh.shape["tensor"]
    for prefix, local in (("", False), ("local_", True)):
        shape = config.attention(local)
        if shape.heads % tensor:
            yield f"{prefix}num_heads = {shape.heads} does not divide by {tensor} (tensor)"
        if shape.kv_heads % tensor and tensor % shape.kv_heads:
            yield f"{prefix}num_kv_heads = {shape.kv_heads}: neither it nor tensor = {tensor} divides the other"
