"""Config classes and functions for quantized checkpoints, under the names of MAX 26.3 and 25.6."""

from jaxquant.compat.max_config import Float8Config as Float8Config
from jaxquant.compat.max_config import QuantConfig as QuantConfig
from jaxquant.compat.max_config import deinterleave_scales as deinterleave_scales
from jaxquant.compat.max_config import fp4_packed_k as fp4_packed_k
from jaxquant.compat.max_config import interleave_scales as interleave_scales
from jaxquant.compat.max_encoding import QuantizationEncoding as QuantizationEncoding
from jaxquant.compat.max_parse import parse_float8_config as parse_float8_config
from jaxquant.compat.max_parse import parse_quant_config as parse_quant_config
from jaxquant.export.hf import InputScaleSpec as InputScaleSpec
from jaxquant.export.hf import QuantFormat as QuantFormat
from jaxquant.export.hf import ScaleGranularity as ScaleGranularity
from jaxquant.export.hf import ScaleOrigin as ScaleOrigin
from jaxquant.export.hf import WeightScaleSpec as WeightScaleSpec

Float8InputScaleSpec = InputScaleSpec
Float8WeightScaleSpec = WeightScaleSpec
Float8ScaleGranularity = ScaleGranularity
Float8ScaleOrigin = ScaleOrigin
"""Names of these classes in MAX 25.6."""
