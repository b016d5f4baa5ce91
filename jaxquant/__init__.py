"""Quantized training in JAX: one config string, real low-precision matmuls, forward and backward."""

import jax as _jax

from jaxquant import audit, ops, serving, state
from jaxquant.audit.coverage import coverage
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.recipes import RECIPES
from jaxquant.inject.handle import configure_quantization, get_quant_mode, in_convert_mode, in_serve_mode
from jaxquant.inject.model import describe_layers, linear_layers, maybe_quantize_model
from jaxquant.ops.dot_general import RESIDUAL_NAME as _RESIDUAL_NAME
from jaxquant.serving import calibrate, convert
from jaxquant.serving.maxtext import match_aqt_and_unquantized_param, remove_quantized_params
from jaxquant.trace import quantize

save_quantized = _jax.checkpoint_policies.save_only_these_names(_RESIDUAL_NAME)
"""Remat policy that keeps what quantized layers save for backward (one byte an element) and recomputes the rest."""

__all__ = [
    "RECIPES",
    "QuantConfig",
    "audit",
    "calibrate",
    "configure_quantization",
    "convert",
    "coverage",
    "describe_layers",
    "get_quant_mode",
    "in_convert_mode",
    "in_serve_mode",
    "linear_layers",
    "match_aqt_and_unquantized_param",
    "maybe_quantize_model",
    "ops",
    "quantize",
    "remove_quantized_params",
    "save_quantized",
    "serving",
    "state",
]
