"""Audits of a function: coverage of its matmuls, health of its layers, bytes saved for the backward pass."""

from jaxquant.audit.difference import Difference, first_difference

__all__ = ["Difference", "first_difference"]
