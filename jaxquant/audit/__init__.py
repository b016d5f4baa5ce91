"""Inspect what a function runs: coverage of its matmuls, health of its layers, bytes that it saves."""
