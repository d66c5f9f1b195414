"""What the model is: Flax NNX modules that hold parameters and nothing else."""

from .model import InklingModel, abstract_parameters, logical_axes

__all__ = ["InklingModel", "abstract_parameters", "logical_axes"]
