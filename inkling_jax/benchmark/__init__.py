"""How fast a model decodes here, and how far from the memory limit: `bench`, behind `inkling-jax bench`."""

from .run import PARTS, bench

__all__ = ["PARTS", "bench"]
