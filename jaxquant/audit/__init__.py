"""Audits of a function: coverage of its matmuls, health of its layers, bytes saved for the backward pass."""
