"""Quantized training in JAX: one config string, real low-precision matmuls, forward and backward."""
