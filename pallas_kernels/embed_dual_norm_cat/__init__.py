"""[RMSNorm(hidden) | RMSNorm(RMSNorm(E[id]))] in one launch: the input of an MTP depth."""

from pallas_kernels.embed_dual_norm_cat.api import embed_dual_norm_cat

__all__ = ["embed_dual_norm_cat"]
