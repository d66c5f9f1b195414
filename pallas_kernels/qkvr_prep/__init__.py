"""From the fused q|k|v|r product to what attention reads, in one launch."""

from pallas_kernels.qkvr_prep.api import QKVR, qkvr_prep

__all__ = ["QKVR", "qkvr_prep"]
