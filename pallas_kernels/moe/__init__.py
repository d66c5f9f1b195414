"""The mixture of experts of a few or many rows, in bfloat16 or with 4-bit weights."""

from pallas_kernels.moe.api import moe

__all__ = ["moe"]
