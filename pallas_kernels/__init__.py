"""Fused GPU kernels for the Inkling language model, for NVIDIA and AMD, usable from any JAX program."""
