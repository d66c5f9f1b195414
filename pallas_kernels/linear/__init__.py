"""Products of few rows with large weights, as fast as the weights can be read."""

from pallas_kernels.linear.api import linear, linear_swiglu

__all__ = ["linear", "linear_swiglu"]
