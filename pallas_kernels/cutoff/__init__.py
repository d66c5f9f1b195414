"""How deep into a row of logits top-k and top-p go, without a sort."""

from pallas_kernels.cutoff.api import cutoff
from pallas_kernels.cutoff.reference import DEEPEST, depth_of

__all__ = ["DEEPEST", "cutoff", "depth_of"]
