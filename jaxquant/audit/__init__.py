"""What a function runs: the coverage of its matmuls, the health of its layers, the size of its program."""

import importlib
from typing import Any

_MODULES = ("cost", "coverage", "function_health", "health", "statistics")


def __getattr__(name: str) -> Any:
    """Load a module of this package when it is asked for.

    Raises:
      AttributeError: there is no such module.
    """
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
