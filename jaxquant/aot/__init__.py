"""Audit a step for an absent chip: compile it with the chip's compiler, read the program, price it."""

from jaxquant.aot.compile import audit, audit_program

__all__ = ["audit", "audit_program"]
