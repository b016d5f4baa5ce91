"""block_matmul: a matmul of float8 operands with a scale for each 128 elements of the contraction, dense or grouped."""
