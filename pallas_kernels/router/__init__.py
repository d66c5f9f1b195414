"""Which experts a row visits, and with which weights."""

from pallas_kernels.router.api import router

__all__ = ["router"]
