"""Audit of a step for an absent chip: compile it with the chip's compiler, read the program, estimate its time."""

from jaxquant.aot.compile import audit, audit_program

__all__ = ["audit", "audit_program"]
