"""Loading: tensors stream one by one, straight to their final dtype and place."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import numpy as np

from inkling_jax.config import InklingConfig
from inkling_jax.errors import CheckpointError
from inkling_jax.quantization import Quantization, quantization_of
from pallas_kernels.fp4 import FP4, VALUES_A_WORD, dequantize

from .files import list_tensors, progress_bar, read_into
from .metadata import read_metadata
from .names import VARIANTS, Shape, stored
from .packed import find_packed, layer_of, leaf_shapes
from .plan import Packed, Plan, Source, make_plan

log = logging.getLogger("inkling_jax")


def find_quantization(directory: str | Path, config: InklingConfig) -> Quantization | None:
    """Which layers of a checkpoint hold their routed experts in 4 bits, from the headers and the metadata.

    Raises `CheckpointError` for files that cannot be read, and where the widths of `config` rule the format out. What
    else may be wrong with the tensors, `load_parameters` says.
    """
    directory = Path(directory)
    tensors, metadata = list_tensors(directory), read_metadata(directory)
    found = {}
    for i in range(config.num_layers):
        for path in () if config.is_dense(i) else (f"layers.{i}.mlp.experts.w13", f"layers.{i}.mlp.experts.w2"):
            places = [stored(path, variant) for variant in VARIANTS]
            if packed := find_packed(tensors, places, metadata.format if metadata else None):
                found[i] = packed[0].format
    if not found:
        return None
    quantization = Quantization(next(iter(found.values())), tuple(found))
    try:
        quantization.check(config)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return quantization


def load_parameters(
    directory: str | Path,
    config: InklingConfig,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Every parameter of `abstract` by dotted path, in its dtype and, where it says one, with its sharding.

    Either layout is read, with the MTP tensors indexed or in `mtp.safetensors`. Towers are left out, which one line of
    log says. Weights in 4 bits stay packed where `abstract` has their words and scales, and are unpacked expert by
    expert where it has the plain weight; scales of activations are ignored, which another line says. Host memory
    beyond the arrays themselves stays below the largest tensor plus a few pieces of 128 MiB, or an unpacked expert.

    Raises `CheckpointError` listing everything that is missing, unexpected, misshapen, quantised or cut short.
    """
    directory = Path(directory)
    plan = open_checkpoint(directory, config, abstract)
    _check_packed(directory, plan, quantization_of(abstract))
    if plan.towers:
        log.warning("%s: leaving out %d tensors of the vision and audio towers", directory, len(plan.towers))
    if plan.unused:
        log.warning("%s: ignoring %d scales of activations: only weights are in 4 bits", directory, len(plan.unused))
    params: dict[str, jax.Array] = {}
    with progress_bar("loading", sum(spec.size * spec.dtype.itemsize for spec in abstract.values()), progress) as bar:
        for path, spec in abstract.items():
            host = _read(plan, path, spec)
            params[path] = jax.block_until_ready(jax.device_put(host, spec.sharding))
            bar.update(host.nbytes)
    return params


def open_checkpoint(directory: Path, config: InklingConfig, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Plan:
    """Where each parameter is, after every check that needs no tensor data. Raises `CheckpointError`."""
    plan = make_plan(list_tensors(directory), unpacked_shapes(abstract), config, read_metadata(directory))
    plan.check(directory)
    return plan


def unpacked_shapes(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Shape]:
    """Shapes by path, of weights in 4 bits those that they have unpacked."""
    shapes: dict[str, Shape] = {}
    for path, spec in abstract.items():
        weight, _, leaf = path.rpartition(".")
        if layer_of(weight) is None:
            shapes[path] = spec.shape
        elif leaf == "codes":
            shapes[weight] = (*spec.shape[:-1], spec.shape[-1] * VALUES_A_WORD)
    return shapes


def _check_packed(directory: Path, plan: Plan, wanted: Quantization | None) -> None:
    found = plan.quantization
    if wanted is not None and (
        found is None or wanted.format != found.format or not set(wanted.layers) <= set(found.layers)
    ):
        raise CheckpointError(f"{directory}: {wanted} is asked for, and {found or 'no quantisation'} is there")


def _read(plan: Plan, path: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    """A parameter in host memory, or one of the arrays of a weight in 4 bits."""
    source = plan.sources.get(path)
    if isinstance(source, Source):
        return read_parameter(source, spec.shape, spec.dtype)
    if source is not None:
        return _read_unpacked(source, spec.shape, spec.dtype)
    weight, _, leaf = path.rpartition(".")
    packed = plan.packed[weight]
    return read_leaf(packed, leaf, spec.shape, spec.dtype)


def read_parameter(source: Source, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """One parameter in host memory. Rows of the unembedding that the file leaves out are zero."""
    host = np.empty(shape, dtype)
    for tensor, view in zip(source.tensors, source.form.views(host), strict=True):
        rows = min(len(view), tensor.shape[0])
        view[rows:] = 0
        read_into(view[:rows], tensor)
    return host


def read_leaf(packed: Packed, leaf: str, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """The words, the scales or the experts' scales of a weight in 4 bits, in host memory.

    Raises `CheckpointError` for an expert's scale that is no finite number.
    """
    host = read_parameter(packed.leaves[leaf], shape, dtype)
    if leaf == "expert_scale":
        if packed.spelling.divides:
            with np.errstate(divide="ignore"):
                host = (1 / host).astype(dtype)
        if not np.isfinite(host).all():
            [tensor] = packed.leaves[leaf].tensors
            raise CheckpointError(f"{tensor.file}: {tensor.name}: the scale of an expert is not a finite number")
    return host


def _read_unpacked(packed: Packed, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """A weight in 4 bits, unpacked in host memory expert by expert."""
    host = np.empty(shape, dtype)
    shapes = leaf_shapes((1, *shape[1:]), packed.spelling.format)
    dtypes = {"codes": np.uint32, "scales": np.uint8, "expert_scale": np.float32}
    for e in range(len(host)):
        one = packed.part(e, len(host))
        arrays = {leaf: read_leaf(one, leaf, shapes[leaf], np.dtype(dtypes[leaf])) for leaf in shapes}
        host[e] = np.asarray(_unpack(packed.spelling.format, dtype, **arrays))[0]
    return host


@partial(jax.jit, static_argnums=(0, 1))
def _unpack(
    format: str, dtype: np.dtype, codes: jax.Array, scales: jax.Array, expert_scale: jax.Array | None = None
) -> jax.Array:
    return dequantize(FP4(codes, scales, expert_scale, format), dtype)
