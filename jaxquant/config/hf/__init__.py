"""Hugging Face, MAX and MLC configs of quantized checkpoints: read into ordered rules with a frozen spec each."""

from jaxquant.config.hf.encoding import QuantizationEncoding as QuantizationEncoding
from jaxquant.config.hf.max_config import Float8Config as Float8Config
from jaxquant.config.hf.max_config import QuantConfig as QuantConfig
from jaxquant.config.hf.max_config import deinterleave_scales as deinterleave_scales
from jaxquant.config.hf.max_config import fp4_packed_k as fp4_packed_k
from jaxquant.config.hf.max_config import interleave_scales as interleave_scales
from jaxquant.config.hf.max_parse import parse_float8_config as parse_float8_config
from jaxquant.config.hf.max_parse import parse_quant_config as parse_quant_config
from jaxquant.config.hf.mlc import BlockScaleQuantize as BlockScaleQuantize
from jaxquant.config.hf.mlc import read_mlc_quantization as read_mlc_quantization
from jaxquant.config.hf.quantization import CheckpointQuantization as CheckpointQuantization
from jaxquant.config.hf.quantization import LayerRule as LayerRule
from jaxquant.config.hf.read import read_quantization as read_quantization
from jaxquant.config.hf.recipe import to_recipe as to_recipe
from jaxquant.config.hf.spec import InputScaleSpec as InputScaleSpec
from jaxquant.config.hf.spec import LayerSpec as LayerSpec
from jaxquant.config.hf.spec import OperandSpec as OperandSpec
from jaxquant.config.hf.spec import QuantFormat as QuantFormat
from jaxquant.config.hf.spec import ScaleGranularity as ScaleGranularity
from jaxquant.config.hf.spec import ScaleOrigin as ScaleOrigin
from jaxquant.config.hf.spec import WeightScaleSpec as WeightScaleSpec

Float8InputScaleSpec = InputScaleSpec
Float8WeightScaleSpec = WeightScaleSpec
Float8ScaleGranularity = ScaleGranularity
Float8ScaleOrigin = ScaleOrigin
"""MAX 25.6's names."""
