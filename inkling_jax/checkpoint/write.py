"""Saving and converting: sharded safetensors with an index, complete or not there at all."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.config import InklingConfig, read_json
from inkling_jax.errors import CheckpointError
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Format, Quantization, quantization_of
from inkling_jax.spelling import Layout
from pallas_kernels.fp4 import VALUES_A_WORD, quantize

from . import packed
from .files import DTYPES, INDEX, Outgoing, Spec, Tensor, in_shards, read_into, write_json, write_shards
from .metadata import write_metadata
from .names import Shape, Variant, stored, tower_name
from .packed import layer_of
from .plan import Plan, Source
from .read import open_checkpoint, read_parameter
from .windows import Cut, whole

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
    layout is that of a text-only model. Weights in 4 bits stay so; there is a layout for them in the original one only.

    Raises `CheckpointError` when the directory exists and is not empty, or the parameters are not those of `config`.
    """
    _check_layout(layout)
    quantization = quantization_of(params)
    if quantization is not None and layout != "original":
        raise CheckpointError(f"layout = {layout!r}: weights in 4 bits can be saved in the original layout only")
    _check_params(config, params, quantization)
    variant = Variant(layout, text_only=True)
    tensors = [tensor for path in params for tensor in _saved(path, variant, params, quantization)]
    with _new_directory(Path(directory)) as new:
        index = write_shards(new, in_shards(tensors, max_shard_bytes), progress)
        text = _config_json(config, layout, params["embed.weight"].dtype)
        write_json(new / "config.json", text | quantization_json(quantization, tensors))
        if tokenizer_dir is not None:
            _copy(Path(tokenizer_dir), new, _TOKENIZER_FILES)
        write_json(new / INDEX, index)


def convert(src: str | Path, dst: str | Path, layout: Layout, *, progress: bool = True) -> None:
    """Rewrite a checkpoint in another layout, towers included, tensor by tensor and byte for byte.

    Small files (tokenizer, templates, notes) are copied. Holds one parameter, of routed experts one expert, in
    memory at a time. Raises `CheckpointError` as loading and saving do; the destination appears only when complete.
    """
    _check_layout(layout)
    source = Original.open(Path(src))
    tensors = source.outgoing(layout)
    with _new_directory(Path(dst)) as new:
        index = write_shards(new, in_shards(tensors, MAX_SHARD_BYTES), progress)
        source.write_rest(new, layout)
        write_json(new / INDEX, index)


@dataclass(frozen=True, slots=True)
class Original:
    """A checkpoint to be written again in another form: its config, as it stands and read, and where everything is."""

    directory: Path
    raw: dict[str, Any]
    config: InklingConfig
    shapes: dict[str, Shape]
    plan: Plan

    @classmethod
    def open(cls, directory: Path) -> "Original":
        """Raises `CheckpointError` as loading does, and for weights in 4 bits."""
        raw = read_json(directory / "config.json")
        config = InklingConfig.from_dict(raw, str(directory / "config.json"))
        abstract = abstract_parameters(config)
        plan = open_checkpoint(directory, config, abstract)
        for weight in plan.packed.values():
            what = "is in 4 bits already: only bf16, f16 and f32 are converted or quantised"
            raise CheckpointError(f"{directory}: {weight.tensors[0].name} {what}")
        return cls(directory, raw, config, {path: spec.shape for path, spec in abstract.items()}, plan)

    def outgoing(self, layout: Layout, quantization: Quantization | None = None) -> list[Outgoing]:
        """Every tensor in a layout, towers included, the routed experts of some layers perhaps in 4 bits."""
        variant = Variant(layout, text_only=not self.plan.towers)
        tensors: list[Outgoing] = []
        for path, source in self.plan.sources.items():
            assert isinstance(source, Source)  # `open` refuses packed weights
            # Perhaps without padding.
            shape = source.tensors[0].shape if path == "unembed.weight" else self.shapes[path]
            dtype = np.result_type(*(DTYPES[tensor.dtype] for tensor in source.tensors))
            layer = layer_of(path)
            read = _reader(source, shape, dtype, parts=1 if layer is None else shape[0])
            if quantization is not None and layer in quantization.layers:
                format = quantization.format
                tensors.append(packed.outgoing(path, shape, format, _quantiser(source, read, format)))
            else:
                tensors += _outgoing(path, variant, shape, dtype, read)
        return tensors + [_tower(tensor, layout) for tensor in self.plan.towers]

    def write_rest(self, new: Path, layout: Layout, extra: Mapping[str, Any] | None = None) -> None:
        """Write the config, with `extra` keys, and the small files; all but the weights and their index."""
        dtype = DTYPES[self.plan.sources["embed.weight"].tensors[0].dtype]
        text = _config_json(self.config, layout, dtype)
        text = _multimodal(text, self.raw, layout) if self.plan.towers else text
        write_json(new / "config.json", text | dict(extra or {}))
        _copy(self.directory, new, _small_files(self.directory))


def quantization_json(quantization: Quantization | None, tensors: Sequence[Outgoing]) -> dict[str, Any]:
    """What `config.json` says of tensors in 4 bits: the format, and every other module that has a matrix."""
    if quantization is None:
        return {}
    plain = [outgoing.specs[0] for outgoing in tensors if len(outgoing.specs) == 1]
    excluded = sorted({spec.name.rpartition(".")[0] for spec in plain if len(spec.shape) > 1})
    return {"quantization_config": write_metadata(quantization.format, excluded)}


def _check_layout(layout: str) -> None:
    if layout not in get_args(Layout):
        raise CheckpointError(f"layout = {layout!r}: expected {' or '.join(get_args(Layout))}")


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
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` that takes its place when the block ends well, and vanishes when it does not."""
    target = free_target(target)
    new = target.parent / f".{target.name}-unfinished-{secrets.token_hex(4)}"
    try:
        new.mkdir()
        yield new
        take_place(new, target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def free_target(target: Path) -> Path:
    """The real path of a directory to write, whose parent exists then. Raises `CheckpointError` where it is taken."""
    target = Path(os.path.realpath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not an empty directory; choose another or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def take_place(new: Path, target: Path) -> None:
    """Put a finished directory where nothing, or an empty one, is."""
    if target.exists():
        target.rmdir()
    new.rename(target)


def _outgoing(
    path: str, variant: Variant, shape: Shape, dtype: np.dtype, load: Callable[[], Iterable[np.ndarray]]
) -> Iterator[Outgoing]:
    """The tensors of a variant that hold one parameter, whose array `load` gives, in parts along its first axis."""
    place = stored(path, variant)
    for i, (name, stored_shape) in enumerate(zip(place.names, place.form.shapes(shape), strict=True)):
        spec = Spec(name, dtype, stored_shape)
        yield Outgoing((spec,), lambda i=i: ((place.form.views(array)[i],) for array in load()))


def _saved(
    path: str, variant: Variant, params: Mapping[str, jax.Array], quantization: Quantization | None
) -> Iterator[Outgoing]:
    """The tensors of a parameter; those of a weight in 4 bits at the path of its words, and none at its others."""
    weight, _, leaf = path.rpartition(".")
    array = params[path]
    if layer_of(weight) is None:
        yield from _outgoing(path, variant, array.shape, array.dtype, lambda: [_on_host(array)])
    elif leaf == "codes" and quantization is not None:
        shape = (*array.shape[:-1], array.shape[-1] * VALUES_A_WORD)
        leaves = packed.leaf_shapes(shape, quantization.format)
        yield packed.outgoing(
            weight,
            shape,
            quantization.format,
            lambda: iter([{leaf: _on_host(params[f"{weight}.{leaf}"]) for leaf in leaves}]),
        )


def _on_host(array: jax.Array) -> np.ndarray:
    # An array keeps the host copy it was asked for; off the CPU a temporary one is asked instead.
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    return np.asarray(array if on_cpu else jnp.copy(array))


def _reader(source: Source, shape: Shape, dtype: np.dtype, parts: int) -> Callable[[], Iterator[np.ndarray]]:
    """Reads a parameter in equal parts along its first axis, one at a time."""

    def load() -> Iterator[np.ndarray]:
        for i in range(parts):
            rows = Cut(i * shape[0] // parts, (i + 1) * shape[0] // parts, shape[0])
            yield read_parameter(source, (rows, *whole(shape[1:])), dtype)

    return load


def _quantiser(
    source: Source, read: Callable[[], Iterator[np.ndarray]], format: Format
) -> Callable[[], Iterator[dict[str, np.ndarray]]]:
    """Reads a weight expert by expert and gives each in 4 bits."""

    def load() -> Iterator[dict[str, np.ndarray]]:
        for e, expert in enumerate(read()):
            if not np.isfinite(expert).all():
                tensor = source.tensors[0]
                raise CheckpointError(f"{tensor.file}: {tensor.name}: expert {e} has weights that are not finite")
            quantised = quantize(jnp.asarray(expert), format)
            yield {leaf: np.asarray(getattr(quantised, leaf)) for leaf in packed.leaf_shapes(expert.shape, format)}

    return load


def _tower(tensor: Tensor, layout: Layout) -> Outgoing:
    name = tower_name(tensor.name, layout)
    if name is None or tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.file}: no other layout is known for {tensor.name} ({tensor.dtype})")

    def load() -> Iterator[tuple[np.ndarray, ...]]:
        array = np.empty(tensor.shape, DTYPES[tensor.dtype])
        read_into(array, tensor)
        yield (array,)

    return Outgoing((Spec(name, DTYPES[tensor.dtype], tensor.shape),), load)


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
