"""block_quantize: a matrix quantized in several block shapes, and dequantized to bfloat16, in one read."""
