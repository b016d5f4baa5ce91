"""block_quantize: one read of a matrix gives it quantized in several shapes of blocks, dequantized to bfloat16 too."""
