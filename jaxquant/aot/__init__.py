"""Audit of a step for a chip that is not attached: compile the step, read the compiled program, estimate its time."""

from jaxquant.aot.compile import audit, audit_program

__all__ = ["audit", "audit_program"]
