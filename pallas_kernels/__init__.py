"""Fused GPU kernels for the Inkling language model, for NVIDIA and AMD, usable from any JAX program."""

from pallas_kernels._dispatch import Implementation, resolve
from pallas_kernels.cutoff import cutoff
from pallas_kernels.embed_dual_norm_cat import embed_dual_norm_cat
from pallas_kernels.embed_norm import embed_norm
from pallas_kernels.linear import linear, linear_swiglu
from pallas_kernels.moe import moe
from pallas_kernels.qkvr_prep import QKVR, qkvr_prep
from pallas_kernels.rel_attention import rel_attention
from pallas_kernels.rel_paged_attention import rel_paged_attention
from pallas_kernels.router import router
from pallas_kernels.short_conv import short_conv, short_conv_add_norm

__all__ = [
    "Implementation",
    "QKVR",
    "cutoff",
    "embed_dual_norm_cat",
    "embed_norm",
    "linear",
    "linear_swiglu",
    "moe",
    "qkvr_prep",
    "rel_attention",
    "rel_paged_attention",
    "resolve",
    "router",
    "short_conv",
    "short_conv_add_norm",
]
