"""Inkling in JAX: load a checkpoint, generate text with drafts from its own MTP depths, convert and inspect."""

from .benchmark import bench
from .chat import ChatFormat, ChatStream, Reply
from .checkpoint import quantize
from .config import InklingConfig
from .errors import CheckpointError, ConfigError
from .model import Completion, Generation, Inkling, Statistics, Stream, load, save, save_async
from .planning import plan

__version__ = "0.1.0"

__all__ = [
    "ChatFormat",
    "ChatStream",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Generation",
    "Inkling",
    "InklingConfig",
    "Reply",
    "Statistics",
    "Stream",
    "bench",
    "load",
    "plan",
    "quantize",
    "save",
    "save_async",
    "__version__",
]
