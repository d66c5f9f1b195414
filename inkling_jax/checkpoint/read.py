"""Loading: tensors stream one by one, straight to their final dtype and place."""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from inkling_jax.config import InklingConfig

from .files import list_tensors, progress_bar, read_into
from .plan import Plan, Source, make_plan, refuse_quantised

log = logging.getLogger("inkling_jax")


def load_parameters(
    directory: str | Path,
    config: InklingConfig,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Every parameter of `abstract` by dotted path, in its dtype and, where it says one, with its sharding.

    Either layout is read, with the MTP tensors indexed or in `mtp.safetensors`. Towers are left out, which one line of
    log says. Host memory beyond the arrays themselves stays below the largest tensor plus a few pieces of 128 MiB.

    Raises `CheckpointError` listing everything that is missing, unexpected, misshapen, quantised or cut short.
    """
    directory = Path(directory)
    plan = open_checkpoint(directory, config, abstract)
    if plan.towers:
        log.warning("%s: leaving out %d tensors of the vision and audio towers", directory, len(plan.towers))
    params: dict[str, jax.Array] = {}
    with progress_bar("loading", sum(spec.size * spec.dtype.itemsize for spec in abstract.values()), progress) as bar:
        for path, spec in abstract.items():
            host = read_parameter(plan.sources[path], spec.shape, spec.dtype)
            params[path] = jax.block_until_ready(jax.device_put(host, spec.sharding))
            bar.update(host.nbytes)
    return params


def open_checkpoint(directory: Path, config: InklingConfig, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Plan:
    """Where each parameter is, after every check that needs no tensor data. Raises `CheckpointError`."""
    tensors = list_tensors(directory)
    plan = make_plan(tensors, {path: spec.shape for path, spec in abstract.items()}, config)
    plan.check(directory)
    refuse_quantised(directory)
    return plan


def read_parameter(source: Source, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One parameter in host memory. Rows of the unembedding that the file leaves out are zero."""
    host = np.empty(shape, dtype)
    for tensor, view in zip(source.tensors, source.form.views(host), strict=True):
        rows = min(len(view), tensor.shape[0])
        view[rows:] = 0
        read_into(view[:rows], tensor)
    return host
