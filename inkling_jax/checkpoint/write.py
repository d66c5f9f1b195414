"""Saving and converting: sharded safetensors with an index, complete or not there at all."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.config import InklingConfig, read_json
from inkling_jax.errors import CheckpointError
from inkling_jax.nn import abstract_parameters
from inkling_jax.spelling import Layout

from .files import DTYPES, INDEX, Outgoing, Tensor, read_into, write_json, write_shards
from .names import Shape, Variant, stored, tower_name
from .plan import Plan, Source
from .read import open_checkpoint, read_parameter

MAX_SHARD_BYTES = 5 * 10**9

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_SMALL_FILES = (".json", ".jinja", ".md", ".txt")
_SMALL_BYTES = 64 << 20
_REWRITTEN = ("config.json", INDEX)


def save_checkpoint(
    directory: str | Path,
    config: InklingConfig,
    params: Mapping[str, jax.Array],
    *,
    layout: Layout,
    tokenizer_dir: str | Path | None = None,
    progress: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write parameters, config and tokenizer files to a new directory, which appears only when complete.

    `params` are arrays by dotted path, bfloat16, float16 or float32, written in the dtype they have. The transformers
    layout is that of a text-only model.

    Raises `CheckpointError` when the directory exists and is not empty, or the parameters are not those of `config`.
    """
    _check_layout(layout)
    _check_params(config, params)
    variant = Variant(layout, text_only=True)
    tensors = [tensor for path, array in params.items() for tensor in _saved(path, variant, array)]
    with _new_directory(Path(directory)) as new:
        write_shards(new, tensors, max_shard_bytes, progress)
        write_json(new / "config.json", _config_json(config, layout, params["embed.weight"].dtype))
        if tokenizer_dir is not None:
            _copy(Path(tokenizer_dir), new, _TOKENIZER_FILES)


def convert(src: str | Path, dst: str | Path, layout: Layout, *, progress: bool = True) -> None:
    """Rewrite a checkpoint in another layout, towers included, tensor by tensor and byte for byte.

    Small files (tokenizer, templates, notes) are copied. Holds one parameter in memory at a time.
    Raises `CheckpointError` as loading and saving do; the destination appears only when complete.
    """
    _check_layout(layout)
    src = Path(src)
    raw = read_json(src / "config.json")
    config = InklingConfig.from_dict(raw, str(src / "config.json"))
    abstract = abstract_parameters(config)
    plan = open_checkpoint(src, config, abstract)
    tensors = _converted(plan, {path: spec.shape for path, spec in abstract.items()}, layout)
    with _new_directory(Path(dst)) as new:
        write_shards(new, tensors, MAX_SHARD_BYTES, progress)
        dtype = DTYPES[plan.sources["embed.weight"].tensors[0].dtype]
        text = _config_json(config, layout, dtype)
        write_json(new / "config.json", _multimodal(text, raw, layout) if plan.towers else text)
        _copy(src, new, _small_files(src))


def _check_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise CheckpointError(f"layout = {layout!r}: expected {' or '.join(get_args(Layout))}")


def _check_params(config: InklingConfig, params: Mapping[str, jax.Array]) -> None:
    abstract = abstract_parameters(config)
    wrong = [f"{path} is missing" for path in abstract.keys() - params.keys()]
    wrong += [f"{path} is not a parameter of the config" for path in params.keys() - abstract.keys()]
    for path in abstract.keys() & params.keys():
        if params[path].shape != abstract[path].shape:
            wrong.append(f"{path} has shape {params[path].shape}, expected {abstract[path].shape}")
        if params[path].dtype not in DTYPES.values():
            wrong.append(f"{path} is {params[path].dtype}, expected bfloat16, float16 or float32")
    if wrong:
        raise CheckpointError("these parameters cannot be saved:\n  " + "\n  ".join(sorted(wrong)))


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its place when the block ends well, and vanishes when it does not."""
    target = Path(os.path.realpath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty directory; choose another or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f".{target.name}-unfinished-{secrets.token_hex(4)}"
    try:
        new.mkdir()
        yield new
        if target.exists():
            target.rmdir()
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _outgoing(
    path: str, variant: Variant, shape: Shape, dtype: np.dtype, load: Callable[[], np.ndarray]
) -> Iterator[Outgoing]:
    """The tensors of a variant that hold one parameter, whose array `load` gives."""
    place = stored(path, variant)
    for i, (name, stored_shape) in enumerate(zip(place.names, place.form.shapes(shape), strict=True)):
        yield Outgoing(name, dtype, stored_shape, lambda i=i: place.form.views(load())[i])


def _saved(path: str, variant: Variant, array: jax.Array) -> Iterator[Outgoing]:
    def on_host() -> np.ndarray:
        # An array keeps the host copy it was asked for; off the CPU a temporary one is asked instead.
        on_cpu = all(device.platform == "cpu" for device in array.devices())
        return np.asarray(array if on_cpu else jnp.copy(array))

    return _outgoing(path, variant, array.shape, array.dtype, on_host)


def _converted(plan: Plan, shapes: Mapping[str, Shape], layout: Layout) -> list[Outgoing]:
    variant = Variant(layout, text_only=not plan.towers)
    tensors: list[Outgoing] = []
    for path, source in plan.sources.items():
        shape = source.tensors[0].shape if path == "unembed.weight" else shapes[path]  # perhaps without padding
        dtype = np.result_type(*(DTYPES[tensor.dtype] for tensor in source.tensors))
        load = _reader(source, shape, dtype)
        tensors += _outgoing(path, variant, shape, dtype, load)
    for tensor in plan.towers:
        name = tower_name(tensor.name, layout)
        if name is None or tensor.dtype not in DTYPES:
            raise CheckpointError(f"{tensor.file}: no other layout is known for {tensor.name} ({tensor.dtype})")
        tensors.append(Outgoing(name, DTYPES[tensor.dtype], tensor.shape, _tower_reader(tensor)))
    return tensors


def _reader(source: Source, shape: Shape, dtype: np.dtype) -> Callable[[], np.ndarray]:
    return lambda: read_parameter(source, shape, dtype)


def _tower_reader(tensor: Tensor) -> Callable[[], np.ndarray]:
    def load() -> np.ndarray:
        array = np.empty(tensor.shape, DTYPES[tensor.dtype])
        read_into(array, tensor)
        return array

    return load


def _config_json(config: InklingConfig, layout: Layout, dtype: np.dtype) -> dict[str, Any]:
    return config.to_dict(layout) | {"torch_dtype" if layout == "original" else "dtype": dtype.name}


def _multimodal(text: dict[str, Any], raw: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """A config with what `raw` says about the towers, carried over as it stands."""
    towers = {key: value for key, value in raw.items() if key.startswith(("audio_", "vision_", "image_"))}
    if layout == "original":
        return text | towers
    top = {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model"}
    return top | {key: text[key] for key in ("dtype", "eos_token_id")} | {"text_config": text} | towers


def _copy(src: Path, dst: Path, names: Iterable[str]) -> None:
    for name in names:
        if (src / name).is_file():
            shutil.copyfile(src / name, dst / name)


def _small_files(directory: Path) -> list[str]:
    files = [file for file in directory.iterdir() if file.suffix in _SMALL_FILES or file.name.startswith("LICENSE")]
    return [file.name for file in files if file.name not in _REWRITTEN and file.stat().st_size <= _SMALL_BYTES]
