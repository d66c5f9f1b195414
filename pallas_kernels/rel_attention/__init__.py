"""Relative attention of many new rows over themselves and earlier pages: prefill and chunks."""

from pallas_kernels.rel_attention.api import rel_attention

__all__ = ["rel_attention"]
