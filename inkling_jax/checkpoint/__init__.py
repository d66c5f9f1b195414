"""How weights come in and go out: one table of names, a reader of slices, writers, Orbax, a quantiser."""

from inkling_jax.errors import CheckpointError

from .converting import convert
from .hub import resolve
from .inspection import Inspection, PartSize, inspect
from .names import FileLayout
from .quantizing import quantize
from .read import find_quantization, load_parameters
from .write import save_checkpoint, save_in_background

__all__ = [
    "CheckpointError",
    "FileLayout",
    "Inspection",
    "PartSize",
    "convert",
    "find_quantization",
    "inspect",
    "load_parameters",
    "quantize",
    "resolve",
    "save_checkpoint",
    "save_in_background",
]
