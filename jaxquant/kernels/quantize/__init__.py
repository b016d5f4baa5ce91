"""quantize: quantized elements of a matrix, their transposed copy and the amax, in one read."""
