"""Readers of quantization configs in Hugging Face checkpoints: a config becomes ordered rules with layer specs."""

from jaxquant.export.hf.quantization import CheckpointQuantization as CheckpointQuantization
from jaxquant.export.hf.quantization import LayerRule as LayerRule
from jaxquant.export.hf.read import read_quantization as read_quantization
from jaxquant.export.hf.recipe import to_recipe as to_recipe
from jaxquant.export.hf.spec import InputScaleSpec as InputScaleSpec
from jaxquant.export.hf.spec import LayerSpec as LayerSpec
from jaxquant.export.hf.spec import OperandSpec as OperandSpec
from jaxquant.export.hf.spec import QuantFormat as QuantFormat
from jaxquant.export.hf.spec import ScaleGranularity as ScaleGranularity
from jaxquant.export.hf.spec import ScaleOrigin as ScaleOrigin
from jaxquant.export.hf.spec import WeightScaleSpec as WeightScaleSpec
