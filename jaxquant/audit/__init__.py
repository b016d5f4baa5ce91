"""Inspect what a function runs: coverage of its matmuls, health of its layers, size of its program."""
