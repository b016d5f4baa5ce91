"""block_matmul: a dense or grouped matmul of float8 operands with a scale for each 128 elements of the contraction."""
