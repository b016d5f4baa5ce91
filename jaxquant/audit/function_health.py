"""FunctionHealth, by the module that it is imported from: ``audit.health`` has it."""

from jaxquant.audit.health import FunctionHealth as FunctionHealth
