"""The arithmetic of Inkling as pure functions: plain JAX behind calls that a kernel can replace."""

from .attention import attend
from .linear import linear
from .norm import rms_norm
from .router import route
from .short_conv import short_conv
from .swiglu import swiglu

__all__ = ["attend", "linear", "rms_norm", "route", "short_conv", "swiglu"]
