"""quantize: one read of a matrix gives its quantized elements, their transposed copy and the amax."""
