"""The bands: distances of a quantized decoder from its float twin, as MaxText measured them.

int8 on Qwix, as it was measured; the others on native. ``tests/twins`` compares native with AQT, Qwix and flax.
"""

from __future__ import annotations

import pytest

import jaxquant
from tests import decoder
from tests.numerics import BAND_RTOL

CLIPPED = {"weight_quantization_calibration_method": "absmax,0.5"}


@pytest.mark.parametrize(
    ("string", "backend", "options", "logits", "gradients"),
    [
        ("int8", "qwix", {}, 0.0176, 0.0285),
        ("fp8", "native", {}, 0.0603, 0.1181),
        ("fp8_full", "native", CLIPPED, 0.479, 0.706),
        ("int4", "native", {}, 0.2346, 0.3699),
    ],
)
def test_band(string, backend, options, logits, gradients):
    model = decoder.Decoder()
    config = {"quantization": string, "quant_backend": backend} | options
    quantized = jaxquant.maybe_quantize_model(model, config, decoder.tokens())
    assert decoder.measure(model, quantized) == pytest.approx([logits, gradients], rel=BAND_RTOL)
