"""Proof of what a quantized model does and costs."""
