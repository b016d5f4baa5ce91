"""Quantized training in JAX: one config string, real low-precision matmuls, forward and backward.

``import jaxquant`` loads nothing else. Each public name, and each subpackage, is loaded when it is first asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors alone: at run time ``__getattr__`` loads these
    from jaxquant import ops, optim, serving, state
    from jaxquant.aot.compile import audit
    from jaxquant.audit.coverage import coverage
    from jaxquant.config.quant_config import QuantConfig
    from jaxquant.config.recipes import RECIPES
    from jaxquant.inject.handle import configure_quantization, get_quant_mode, in_convert_mode, in_serve_mode
    from jaxquant.inject.maxtext import (
        configure_kv_quant,
        get_qt_provider,
        get_quantization_rule,
        get_static_scale,
        manual_quantize,
    )
    from jaxquant.inject.model import describe_layers, linear_layers, maybe_quantize_model
    from jaxquant.ops.remat import save_matmuls, save_quantized
    from jaxquant.ops.residuals import compress_residuals
    from jaxquant.serving.calibration import calibrate
    from jaxquant.serving.conversion import convert
    from jaxquant.serving.maxtext import match_aqt_and_unquantized_param, remove_quantized_params
    from jaxquant.trace.quantize import quantize
    from jaxquant.trace.registry import register_function

_PUBLIC = {
    "config.quant_config": "QuantConfig",
    "config.recipes": "RECIPES",
    "audit.coverage": "coverage",
    "inject.handle": "configure_quantization get_quant_mode in_convert_mode in_serve_mode",
    "inject.maxtext": "configure_kv_quant get_qt_provider get_quantization_rule get_static_scale manual_quantize",
    "inject.model": "describe_layers linear_layers maybe_quantize_model",
    "ops.remat": "save_matmuls save_quantized",
    "ops.residuals": "compress_residuals",
    "serving.calibration": "calibrate",
    "serving.conversion": "convert",
    "serving.maxtext": "match_aqt_and_unquantized_param remove_quantized_params",
    "trace.quantize": "quantize",
    "trace.registry": "register_function",
}
"""The public names of each module; those that are not here are subpackages."""

_DEFINED_IN = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names.split()}
_COMPILE = "jaxquant.aot.compile"

__all__ = [
    "RECIPES",
    "QuantConfig",
    "audit",
    "calibrate",
    "compress_residuals",
    "configure_kv_quant",
    "configure_quantization",
    "convert",
    "coverage",
    "describe_layers",
    "get_qt_provider",
    "get_quant_mode",
    "get_quantization_rule",
    "get_static_scale",
    "in_convert_mode",
    "in_serve_mode",
    "linear_layers",
    "manual_quantize",
    "match_aqt_and_unquantized_param",
    "maybe_quantize_model",
    "ops",
    "optim",
    "quantize",
    "register_function",
    "remove_quantized_params",
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
        if name in _DEFINED_IN:
            value = getattr(importlib.import_module(_DEFINED_IN[name]), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        text = f"module {__name__!r} has no attribute {name!r}"
        for room in () if name.startswith("_") else ("state", "serving", "ops", "optim"):
            with contextlib.suppress(ImportError):
                if name in importlib.import_module(f"{__name__}.{room}").__all__:
                    text += f"; it is {__name__}.{room}.{name}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallableAudit(types.ModuleType):
    """The subpackage ``jaxquant.audit``, which is also the function that audits a step for a chip that is not here.

    Calling it is ``jaxquant.aot.compile.audit``; that is a layer above it, so what makes it callable is here.
    """

    def __call__(self, step: Any, *shapes: Any, target: str, topology: str = "", name: str = "") -> Any:
        """Compile a step with the real compiler of an absent chip and report what it made: ``aot.compile.audit``."""
        audit = importlib.import_module(_COMPILE).audit
        return audit(step, *shapes, target=target, topology=topology, name=name)


class _Face(types.ModuleType):
    """This module: Python sets a subpackage as its attribute once it has imported it, from wherever that was."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "audit" and isinstance(value, types.ModuleType):
            value.__class__ = _CallableAudit
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def _audit_command() -> int:
    """Run the command of ``python -m jaxquant.audit``, which is that of ``python -m jaxquant.aot``."""
    return importlib.import_module("jaxquant.aot.__main__").main()
