"""fp8_einsum: a batched matmul of 8-bit operands with their scales in its epilogue."""
