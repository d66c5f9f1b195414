"""Converting: a checkpoint again in another layout, parameter by parameter, with everything that lies beside it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from inkling_jax.config import InklingConfig, read_json
from inkling_jax.errors import CheckpointError
from inkling_jax.nn import abstract_parameters
from inkling_jax.quantization import Format, Quantization
from inkling_jax.spelling import Layout
from pallas_kernels.fp4 import quantize

from . import packed
from .files import DTYPES, INDEX, Outgoing, Spec, Tensor, in_shards, progress_bar, read_into, write_json, write_shards
from .names import FileLayout, Shape, Variant, tower_name
from .orbax import LIST, groups_of, is_orbax, open_orbax, read_arrays, write_list, write_params
from .packed import layer_of
from .plan import Plan, Source
from .read import open_checkpoint, read_leaf, read_parameter
from .windows import Cut, whole
from .write import (
    MAX_SHARD_BYTES,
    check_layout,
    config_json,
    copy_files,
    new_directory,
    outgoing_tensors,
    quantization_json,
    saved_tensors,
)

_SMALL_FILES = (".json", ".jinja", ".md", ".txt")
_SMALL_BYTES = 64 << 20
_REWRITTEN = ("config.json", "hf_quant_config.json", INDEX, LIST)


def convert(src: str | Path, dst: str | Path, layout: FileLayout, *, progress: bool = True) -> None:
    """Rewrite a checkpoint in another layout, towers included, tensor by tensor and byte for byte.

    Small files (tokenizer, templates, notes) are copied. Holds one parameter in memory at a time, of routed experts one
    expert; to Orbax, one parameter or 4 GiB of them. Weights in 4 bits go to Orbax and back to the original layout.
    Raises `CheckpointError` as loading and saving do; the destination appears only when complete.
    """
    check_layout(layout)
    src, dst = Path(src), Path(dst)
    if is_orbax(src):
        if layout == "orbax":
            raise CheckpointError(f"{src}: is in Orbax's layout already")
        return _from_orbax(src, dst, layout, progress)
    source = Original.open(src, packed=layout == "orbax")
    if layout == "orbax":
        return _to_orbax(source, dst, progress)
    tensors = source.outgoing(layout)
    with new_directory(dst) as new:
        index = write_shards(new, in_shards(tensors, MAX_SHARD_BYTES), progress)
        source.write_rest(new, layout)
        write_json(new / INDEX, index)


def _to_orbax(source: "Original", dst: Path, progress: bool) -> None:
    arrays = dict(source.arrays())
    sizes = {name: math.prod(spec.shape) * spec.dtype.itemsize for name, (spec, _) in arrays.items()}
    with new_directory(dst) as new:
        with progress_bar("writing", sum(sizes.values()), progress) as bar:
            write_params(new, ({name: arrays[name][1]() for name in group} for group in groups_of(sizes)), bar)
        source.write_rest(new, "original")
        write_list(new)


def _from_orbax(src: Path, dst: Path, layout: Layout, progress: bool) -> None:
    raw = read_json(src / "config.json")
    config = InklingConfig.from_dict(raw, str(src / "config.json"))
    saved = open_orbax(src)
    saved.compare({path: spec.shape for path, spec in abstract_parameters(config).items()})
    saved.check()
    if saved.quantization is not None and layout != "original":
        raise CheckpointError(f"{src}: weights in 4 bits can be converted to the original layout only")
    get = lambda name: read_arrays(saved, [name])[name]  # noqa: E731
    variant = Variant(layout, text_only=not saved.towers)
    params, towers = saved.arrays, saved.towers
    tensors = [tensor for path in params for tensor in saved_tensors(path, variant, params, get, saved.quantization)]
    for name, spec in towers.items():
        tensors.append(_tower(name, spec.dtype, spec.shape, layout, partial(get, name), src))
    with new_directory(dst) as new:
        index = write_shards(new, in_shards(tensors, MAX_SHARD_BYTES), progress)
        text = config_json(config, layout, params["embed.weight"].dtype)
        text = _multimodal(text, raw, layout) if towers else text
        write_json(new / "config.json", text | quantization_json(saved.quantization, tensors))
        copy_files(src, new, _small_files(src))
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
    def open(cls, directory: Path, packed: bool = False) -> "Original":
        """Raises `CheckpointError` as loading does, and, unless they may be `packed`, for weights in 4 bits."""
        if is_orbax(directory):
            raise CheckpointError(f"{directory}: is in Orbax's layout: convert it to another first")
        raw = read_json(directory / "config.json")
        config = InklingConfig.from_dict(raw, str(directory / "config.json"))
        abstract = abstract_parameters(config)
        plan = open_checkpoint(directory, config, abstract)
        for weight in () if packed else plan.packed.values():
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
                tensors += outgoing_tensors(path, variant, shape, dtype, read)
        for tensor in self.plan.towers:
            dtype = _tower_dtype(tensor)
            read = partial(_read_tower, tensor, dtype)
            tensors.append(_tower(tensor.name, dtype, tensor.shape, layout, read, tensor.file))
        return tensors

    def arrays(self) -> Iterator[tuple[str, tuple[Spec, Callable[[], np.ndarray]]]]:
        """Every array as Orbax has them: by path, towers by their original names; and what reads it."""
        for path, source in self.plan.sources.items():
            shape = self.shapes[path]
            if isinstance(source, Source):
                dtype = np.result_type(*(DTYPES[tensor.dtype] for tensor in source.tensors))
                yield path, (Spec(path, dtype, shape), partial(read_parameter, source, whole(shape), dtype))
                continue
            for leaf, leaf_shape in packed.leaf_shapes(shape, source.spelling.format).items():
                name, dtype = f"{path}.{leaf}", packed.LEAF_DTYPES[leaf]
                yield name, (Spec(name, dtype, leaf_shape), partial(read_leaf, source, leaf, whole(leaf_shape), dtype))
        for tensor in self.plan.towers:
            dtype = _tower_dtype(tensor)
            name = _tower_name(tensor.name, "original", tensor.file)
            yield name, (Spec(name, dtype, tensor.shape), partial(_read_tower, tensor, dtype))

    def write_rest(self, new: Path, layout: Layout, extra: Mapping[str, Any] | None = None) -> None:
        """Write the config, with `extra` keys, and the small files; all but the weights and their index."""
        dtype = DTYPES[self.plan.sources["embed.weight"].tensors[0].dtype]
        text = config_json(self.config, layout, dtype)
        text = _multimodal(text, self.raw, layout) if self.plan.towers else text
        write_json(new / "config.json", text | dict(extra or {}))
        copy_files(self.directory, new, _small_files(self.directory))


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


def _tower(
    name: str, dtype: np.dtype, shape: Shape, layout: Layout, read: Callable[[], np.ndarray], file: Path
) -> Outgoing:
    return Outgoing((Spec(_tower_name(name, layout, file), dtype, shape),), lambda: iter([(read(),)]))


def _tower_name(name: str, layout: Layout, file: Path) -> str:
    found = tower_name(name, layout)
    if found is None:
        raise CheckpointError(f"{file}: no other layout is known for {name}")
    return found


def _tower_dtype(tensor: Tensor) -> np.dtype:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.file}: no other layout is known for {tensor.name} ({tensor.dtype})")
    return DTYPES[tensor.dtype]


def _read_tower(tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    array = np.empty(tensor.shape, dtype)
    read_into(array, tensor)
    return array


def _multimodal(text: dict[str, Any], raw: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """A config with what `raw` says about the towers, carried over as it stands."""
    towers = {key: value for key, value in raw.items() if key.startswith(("audio_", "vision_", "image_"))}
    if layout == "original":
        return text | towers
    top = {"architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model"}
    return top | {key: text[key] for key in ("dtype", "eos_token_id")} | {"text_config": text} | towers


def _small_files(directory: Path) -> list[str]:
    files = [file for file in directory.iterdir() if file.suffix in _SMALL_FILES or file.name.startswith("LICENSE")]
    return [file.name for file in files if file.name not in _REWRITTEN and file.stat().st_size <= _SMALL_BYTES]
