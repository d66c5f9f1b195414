"""Saving and converting: sharded safetensors with an index, or Orbax; complete or not there at all."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.config import InklingConfig
from inkling_jax.errors import CheckpointError
from inkling_jax.nn import abstract_parameters
from inkling_jax.processes import PATIENCE, together
from inkling_jax.quantization import Quantization, quantization_of
from inkling_jax.spelling import Layout
from pallas_kernels.fp4 import VALUES_A_WORD

from . import packed
from .files import DTYPES, INDEX, Outgoing, Spec, in_shards, progress_bar, watch_files, write_json, write_shards
from .metadata import write_metadata
from .names import FileLayout, Shape, Variant, stored
from .orbax import start_writing, write_list
from .packed import layer_of

MAX_SHARD_BYTES = 5 * 10**9
SIGHT = 60  # seconds after which a process that does not see a new directory has given up

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_shared_saves = count()


def save_checkpoint(
    directory: str | Path,
    config: InklingConfig,
    params: Mapping[str, jax.Array],
    *,
    layout: FileLayout,
    tokenizer_dir: str | Path | None = None,
    progress: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write parameters, config and tokenizer files to a new directory, which appears only when complete.

    `params` are arrays by dotted path, bfloat16, float16 or float32, written in the dtype they have. The transformers
    layout is that of a text-only model. Weights in 4 bits stay so, in the original layout and in Orbax's. Arrays that
    lie on devices of several processes can be saved in Orbax's only, by all of these processes together.

    Raises `CheckpointError` when the directory exists and is not empty, or the parameters are not those of `config`.
    """
    check_layout(layout)
    if layout == "orbax":
        return _orbax_save(Path(directory), config, params, tokenizer_dir, progress)()
    quantization = quantization_of(params)
    if quantization is not None and layout != "original":
        raise CheckpointError(f"layout = {layout!r}: weights in 4 bits can be saved as original or orbax only")
    _check_params(config, params, quantization)
    if not all(array.is_fully_addressable for array in params.values()):
        raise CheckpointError(f"layout = {layout!r}: parameters on several processes can be saved as orbax only")
    variant = Variant(layout, text_only=True)
    get = lambda path: _on_host(params[path])  # noqa: E731
    tensors = [tensor for path in params for tensor in saved_tensors(path, variant, params, get, quantization)]
    with new_directory(Path(directory)) as new:
        index = write_shards(new, in_shards(tensors, max_shard_bytes), progress)
        text = config_json(config, layout, params["embed.weight"].dtype)
        write_json(new / "config.json", text | quantization_json(quantization, tensors))
        if tokenizer_dir is not None:
            copy_files(Path(tokenizer_dir), new, _TOKENIZER_FILES)
        write_json(new / INDEX, index)


def save_in_background(
    directory: str | Path,
    config: InklingConfig,
    params: Mapping[str, jax.Array],
    *,
    tokenizer_dir: str | Path | None = None,
) -> Future[None]:
    """Save in Orbax's layout while the program goes on; `result()` of what is returned waits, and raises what failed.

    The arrays must not be donated before. Raises as `save_checkpoint` does, before anything is written.
    """
    executor = ThreadPoolExecutor(1, "save")
    future = executor.submit(_orbax_save(Path(directory), config, params, tokenizer_dir))
    executor.shutdown(wait=False)
    return future


def _orbax_save(
    directory: Path,
    config: InklingConfig,
    params: Mapping[str, jax.Array],
    tokenizer_dir: str | Path | None,
    progress: bool = False,
) -> Callable[[], None]:
    """Checks and begins; what is returned waits for the end."""
    _check_params(config, params, quantization_of(params))
    with ExitStack() as opened:
        new = opened.enter_context(new_directory(directory, shared=True))
        written = start_writing(new, params)
        unfinished = opened.pop_all()

    def finish() -> None:
        with unfinished:
            with progress_bar("writing", sum(array.nbytes for array in params.values()), progress) as bar:
                watch_files(new, bar, written)
            if jax.process_index() == 0:
                write_json(new / "config.json", config_json(config, "original", params["embed.weight"].dtype))
                if tokenizer_dir is not None:
                    copy_files(Path(tokenizer_dir), new, _TOKENIZER_FILES)
                write_list(new)

    return finish


def quantization_json(quantization: Quantization | None, tensors: Sequence[Outgoing]) -> dict[str, Any]:
    """What `config.json` says of tensors in 4 bits: the format, and every other module that has a matrix."""
    if quantization is None:
        return {}
    plain = [outgoing.specs[0] for outgoing in tensors if len(outgoing.specs) == 1]
    excluded = sorted({spec.name.rpartition(".")[0] for spec in plain if len(spec.shape) > 1})
    return {"quantization_config": write_metadata(quantization.format, excluded)}


def check_layout(layout: str) -> None:
    if layout not in get_args(FileLayout):
        raise CheckpointError(f"layout = {layout!r}: expected {' or '.join(get_args(FileLayout))}")


def _check_params(config: InklingConfig, params: Mapping[str, jax.Array], quantization: Quantization | None) -> None:
    abstract = abstract_parameters(config, quantization=quantization)
    wrong = [f"{path} is missing" for path in abstract.keys() - params.keys()]
    wrong += [f"{path} is not a parameter of the config" for path in params.keys() - abstract.keys()]
    for path in abstract.keys() & params.keys():
        if params[path].shape != abstract[path].shape:
            wrong.append(f"{path} has shape {params[path].shape}, expected {abstract[path].shape}")
        is_leaf = layer_of(path.rpartition(".")[0]) is not None
        if is_leaf and params[path].dtype != abstract[path].dtype:
            wrong.append(f"{path} is {params[path].dtype}, expected {abstract[path].dtype}")
        if not is_leaf and params[path].dtype not in DTYPES.values():
            wrong.append(f"{path} is {params[path].dtype}, expected bfloat16, float16 or float32")
    if wrong:
        raise CheckpointError("these parameters cannot be saved:\n  " + "\n  ".join(sorted(wrong)))


@contextmanager
def new_directory(target: Path, shared: bool = False) -> Iterator[Path]:
    """A directory beside `target` that takes its place when the block ends well, and vanishes when it does not.

    A `shared` one is the work of all processes together; the first makes and moves it.
    """
    target = free_target(target)
    shared = shared and jax.process_count() > 1
    number = f"shared-{next(_shared_saves)}" if shared else secrets.token_hex(4)
    new = target.parent / f".{target.name}-unfinished-{number}"
    first = not shared or jax.process_index() == 0
    try:
        if first:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
        _together("begin", new, shared)
        if not new.is_dir():
            raise CheckpointError(
                f"{new.parent}: process {jax.process_index()} does not see what the first writes there"
            )
        _together("all processes see the directory", new, shared, SIGHT)
        yield new
        _together("end", new, shared)
        if first:
            take_place(new, target)
        _together("moved", new, shared)
    except BaseException:
        if first:
            shutil.rmtree(new, ignore_errors=True)
        raise


def _together(what: str, new: Path, shared: bool, timeout: int = PATIENCE) -> None:
    if shared:
        together(what, new.name, timeout)


def free_target(target: Path) -> Path:
    """The real path of a directory to write, whose parent exists then.

    Raises `CheckpointError` where it is taken, and where its parent cannot be made.
    """
    target = Path(os.path.realpath(target.expanduser()))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty directory; choose another or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target.parent}: the directory cannot be made: {error.strerror}") from None
    return target


def take_place(new: Path, target: Path) -> None:
    """Put a finished directory where nothing, or an empty one, is. Raises `CheckpointError` where there is more now."""
    try:
        if target.exists():
            target.rmdir()
        new.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: taken by something else meanwhile: {error.strerror}") from None


def outgoing_tensors(
    path: str, variant: Variant, shape: Shape, dtype: np.dtype, load: Callable[[], Iterable[np.ndarray]]
) -> Iterator[Outgoing]:
    """The tensors of a variant that hold one parameter, whose array `load` gives, in parts along its first axis."""
    place = stored(path, variant)
    for i, (name, stored_shape) in enumerate(zip(place.names, place.form.shapes(shape), strict=True)):
        spec = Spec(name, dtype, stored_shape)
        yield Outgoing((spec,), lambda i=i: ((place.form.views(array)[i],) for array in load()))


def saved_tensors(
    path: str,
    variant: Variant,
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    get: Callable[[str], np.ndarray],
    quantization: Quantization | None,
) -> Iterator[Outgoing]:
    """The tensors of a parameter; those of a weight in 4 bits at the path of its words, and none at its others."""
    weight, _, leaf = path.rpartition(".")
    array = params[path]
    if layer_of(weight) is None:
        yield from outgoing_tensors(path, variant, array.shape, array.dtype, lambda: [get(path)])
    elif leaf == "codes" and quantization is not None:
        shape = (*array.shape[:-1], array.shape[-1] * VALUES_A_WORD)
        leaves = packed.leaf_shapes(shape, quantization.format)
        yield packed.outgoing(
            weight,
            shape,
            quantization.format,
            lambda: iter([{leaf: get(f"{weight}.{leaf}") for leaf in leaves}]),
        )


def _on_host(array: jax.Array) -> np.ndarray:
    # An array keeps the host copy it was asked for; off the CPU a temporary one is asked instead.
    [*devices] = array.devices()
    on_cpu = len(devices) == 1 and devices[0].platform == "cpu"
    return np.asarray(array if on_cpu else jnp.copy(array))


def config_json(config: InklingConfig, layout: Layout, dtype: np.dtype) -> dict[str, Any]:
    return config.to_dict(layout) | {"torch_dtype" if layout == "original" else "dtype": dtype.name}


def copy_files(src: Path, dst: Path, names: Iterable[str]) -> None:
    for name in names:
        if (src / name).is_file():
            shutil.copyfile(src / name, dst / name)
