"""What will run on a chip that is not here: compile a step with its compiler, read the program, price it."""

from jaxquant.aot.compile import audit, audit_program

__all__ = ["audit", "audit_program"]
