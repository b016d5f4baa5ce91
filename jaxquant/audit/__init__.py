"""Inspect what a function runs: coverage of its matmuls, health of its layers, size of its program."""

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = ("cost", "coverage", "health", "statistics")

if TYPE_CHECKING:  # at run time ``__getattr__`` loads these
    from jaxquant.audit import cost as cost
    from jaxquant.audit import coverage as coverage
    from jaxquant.audit import health as health
    from jaxquant.audit import statistics as statistics
else:

    def __getattr__(name: str) -> Any:
        """Load a module of this package when it is asked for.

        Raises:
          AttributeError: there is no such module.
        """
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
