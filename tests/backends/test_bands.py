"""The bands: distances of a quantized decoder from its float twin, as MaxText measured them.

int8 on AQT and Qwix, as it was measured; the others on native, which ``tests/twins`` sets against AQT, Qwix and flax.
"""

from __future__ import annotations

import pytest

import jaxquant
from tests import decoder
from tests.numerics import BAND_RTOL

BANDS = [
    # string (of each row one), options, logits, gradients; int8 was measured on AQT and on Qwix
    ("int8", {}, {"aqt": 0.0186, "qwix": 0.0176}, {"aqt": 0.0301, "qwix": 0.0285}),
    ("fp8", {}, 0.0603, 0.1181),
    ("fp8_full", {"weight_quantization_calibration_method": "absmax,0.5"}, 0.479, 0.706),
    ("int4", {}, 0.2346, 0.3699),
]
CASES = [
    pytest.param(
        string, options, backend, logits, gradients, id="-".join([string, backend, *list(options.values())[:1]])
    )
    for string, options, logits, gradients in BANDS
    for backend in (logits if isinstance(logits, dict) else ["native"])
]


@pytest.mark.parametrize(("string", "options", "backend", "logits", "gradients"), CASES)
def test_band(string, options, backend, logits, gradients):
    model = decoder.Decoder()
    config = {"quantization": string, "quant_backend": backend} | options
    quantized = jaxquant.maybe_quantize_model(model, config, decoder.tokens())
    found = decoder.measure(model, quantized)
    expected = [band[backend] if isinstance(band, dict) else band for band in (logits, gradients)]
    assert found == pytest.approx(expected, rel=BAND_RTOL)
