"""Relative attention of a few new rows over a paged KV cache: decode and verify."""

from pallas_kernels.rel_paged_attention.api import rel_paged_attention

__all__ = ["rel_paged_attention"]
