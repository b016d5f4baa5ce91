"""Audit of a step for a chip that is not attached: compile the step, read the compiled program, estimate its time."""

from jaxquant.aot.compile import audit, audit_program
from jaxquant.aot.invariance import VariantOperation, find_variant_operations

__all__ = ["VariantOperation", "audit", "audit_program", "find_variant_operations"]
