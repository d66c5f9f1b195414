"""Row gather and RMSNorm, optionally with the next norm chained."""

from pallas_kernels.embed_norm.api import embed_norm

__all__ = ["embed_norm"]
