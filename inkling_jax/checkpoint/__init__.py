"""How weights come in and go out: one table of names for both layouts, a streaming reader, a writer."""

from inkling_jax.errors import CheckpointError

from .hub import resolve
from .inspection import Inspection, PartSize, inspect
from .read import load_parameters
from .write import convert, save_checkpoint

__all__ = [
    "CheckpointError",
    "Inspection",
    "PartSize",
    "convert",
    "inspect",
    "load_parameters",
    "resolve",
    "save_checkpoint",
]
