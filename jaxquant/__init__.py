"""Quantized training in JAX: one config string, real low-precision matmuls, forward and backward.

``import jaxquant`` loads nothing else. Each public name, and each subpackage, is loaded when it is first asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors alone: at run time ``__getattr__`` loads these
    __version__: str
    from jaxquant import aot, audit, compat, ops, optim, serving, state
    from jaxquant.audit.coverage import coverage
    from jaxquant.config.quant_config import QuantConfig
    from jaxquant.config.recipes import RECIPES
    from jaxquant.inject.model import describe_layers, maybe_quantize_model
    from jaxquant.ops.remat import compress_residuals, save_matmuls, save_quantized
    from jaxquant.serving.calibration import calibrate
    from jaxquant.serving.conversion import convert
    from jaxquant.trace.quantize import quantize
    from jaxquant.trace.registry import register_function

_PUBLIC = {
    "config.quant_config": "QuantConfig",
    "config.recipes": "RECIPES",
    "audit.coverage": "coverage",
    "inject.model": "describe_layers maybe_quantize_model",
    "ops.remat": "compress_residuals save_matmuls save_quantized",
    "serving.calibration": "calibrate",
    "serving.conversion": "convert",
    "trace.quantize": "quantize",
    "trace.registry": "register_function",
}
"""The public names of each module; those that are not here are subpackages."""

_DEFINED_IN = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names.split()}

__all__ = [
    "RECIPES",
    "QuantConfig",
    "aot",
    "audit",
    "calibrate",
    "compat",
    "compress_residuals",
    "convert",
    "coverage",
    "describe_layers",
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


if not TYPE_CHECKING:  # or a type checker would take every name

    def __getattr__(name: str) -> Any:
        """Load a public name or a subpackage.

        Raises:
          AttributeError: there is no such name.
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
                    text += f"; it is {__name__}.{room}.{name}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
