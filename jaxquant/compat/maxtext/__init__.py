"""Replacement for MaxText's quantization module: ``from jaxquant.compat import maxtext as quantizations``."""

from jaxquant.compat.maxtext.handle import Quantization as Quantization
from jaxquant.compat.maxtext.handle import QuantMode as QuantMode
from jaxquant.compat.maxtext.handle import configure_quantization as configure_quantization
from jaxquant.compat.maxtext.handle import get_quant_mode as get_quant_mode
from jaxquant.compat.maxtext.handle import in_convert_mode as in_convert_mode
from jaxquant.compat.maxtext.handle import in_serve_mode as in_serve_mode
from jaxquant.compat.maxtext.params import match_aqt_and_unquantized_param as match_aqt_and_unquantized_param
from jaxquant.compat.maxtext.params import remove_quantized_params as remove_quantized_params
from jaxquant.compat.maxtext.program import KVQuant as KVQuant
from jaxquant.compat.maxtext.program import configure_kv_quant as configure_kv_quant
from jaxquant.compat.maxtext.program import get_qt_provider as get_qt_provider
from jaxquant.compat.maxtext.program import get_quantization_rule as get_quantization_rule
from jaxquant.compat.maxtext.program import get_static_scale as get_static_scale
from jaxquant.compat.maxtext.program import manual_quantize as manual_quantize
from jaxquant.compat.maxtext.program import maybe_quantize_model as maybe_quantize_model

__all__ = [
    "KVQuant", "QuantMode", "Quantization", "configure_kv_quant", "configure_quantization", "get_qt_provider",
    "get_quant_mode", "get_quantization_rule", "get_static_scale", "in_convert_mode", "in_serve_mode",
    "manual_quantize", "match_aqt_and_unquantized_param", "maybe_quantize_model", "remove_quantized_params",
]  # fmt: skip
