"""Residual depthwise causal convolution over new rows and a ring, alone or with the add and norm that follow it."""

from pallas_kernels.short_conv.api import short_conv, short_conv_add_norm

__all__ = ["short_conv", "short_conv_add_norm"]
