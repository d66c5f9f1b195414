"""Fused GPU kernels for the Inkling language model, for NVIDIA and AMD, usable from any JAX program."""

from pallas_kernels.embed_dual_norm_cat import embed_dual_norm_cat
from pallas_kernels.embed_norm import embed_norm
from pallas_kernels.short_conv import short_conv, short_conv_add_norm

__all__ = ["embed_dual_norm_cat", "embed_norm", "short_conv", "short_conv_add_norm"]
