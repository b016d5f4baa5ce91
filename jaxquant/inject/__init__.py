"""Quantization of Linen and NNX models without changes to their code."""
