"""Quantized training in JAX: one config string, real low-precision matmuls, forward and backward.

``import jaxquant`` imports no submodule. Each public name and each subpackage is imported on first access.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # only for type checkers and editors; at run time ``__getattr__`` imports these
    __version__: str
    from jaxquant import aot, audit, compat, exact, ops, optim, serving, state
    from jaxquant.audit.coverage import coverage
    from jaxquant.audit.health import health
    from jaxquant.config.quant_config import ConfigLike, QuantConfig
    from jaxquant.config.recipes import RECIPES
    from jaxquant.inject.model import describe_layers, maybe_quantize_model
    from jaxquant.ops.remat import compress_residuals, save_matmuls, save_quantized
    from jaxquant.serving.calibration import calibrate
    from jaxquant.serving.conversion import convert
    from jaxquant.trace.quantize import quantize
    from jaxquant.trace.registry import register_function

_PUBLIC = {
    "config.quant_config": "ConfigLike QuantConfig",
    "config.recipes": "RECIPES",
    "audit.coverage": "coverage",
    "audit.health": "health",
    "inject.model": "describe_layers maybe_quantize_model",
    "ops.remat": "compress_residuals save_matmuls save_quantized",
    "serving.calibration": "calibrate",
    "serving.conversion": "convert",
    "trace.quantize": "quantize",
    "trace.registry": "register_function",
}
"""Public names of each module; other public names are subpackages."""

_DEFINED_IN = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [
    "RECIPES",
    "ConfigLike",
    "QuantConfig",
    "aot",
    "audit",
    "calibrate",
    "compat",
    "compress_residuals",
    "convert",
    "coverage",
    "describe_layers",
    "exact",
    "health",
    "maybe_quantize_model",
    "ops",
    "optim",
    "quantize",
    "register_function",
    "save_matmuls",
    "save_quantized",
    "serving",
    "state",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name or a subpackage.

        Raises:
          AttributeError: the name does not exist.
        """
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version(__name__)
        if name in _DEFINED_IN:
            value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        text = f"module {__name__!r} has no attribute {name!r}"
        for room in () if name.startswith("_") else ("state", "serving", "ops", "optim", "compat.maxtext"):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(f"{__name__}.{room}")
                if name in getattr(module, "__all__", dir(module)):
                    text += f"; use {__name__}.{room}.{name}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
