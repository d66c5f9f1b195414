"""How weights come in and go out: one table of names for both layouts, a streaming reader, a writer, a quantiser."""

from inkling_jax.errors import CheckpointError

from .hub import resolve
from .inspection import Inspection, PartSize, inspect
from .quantizing import quantize
from .read import find_quantization, load_parameters
from .write import convert, save_checkpoint

__all__ = [
    "CheckpointError",
    "Inspection",
    "PartSize",
    "convert",
    "find_quantization",
    "inspect",
    "load_parameters",
    "quantize",
    "resolve",
    "save_checkpoint",
]
