"""The table of speeds is that of the benchmark, and a string that is slow on the device warns once."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import pytest

import jaxquant
from benchmarks.speeds import table_text
from jaxquant.config import speeds

FOLDER = Path(__file__).parents[2] / "benchmarks/results"


def test_the_table_is_that_of_the_benchmark():
    rows = json.loads((FOLDER / "strings-speed.json").read_text())
    assert table_text(rows) == speeds.TABLE
    assert speeds.speeds_on(list(rows[0])[1])[rows[0]["quantization"]] == list(rows[0].values())[1]


@pytest.mark.parametrize(
    ("kind", "string", "backend", "told"),
    [
        ("TPU v6 lite", "fp8_full", "auto", "'fp8_full' trains .* 0.79 times .* on one TPU v6 lite, .*; 'fp8' at 1.02"),
        ("TPU v6 lite", "int8", "qwix", None),
        ("cpu", "int8", "auto", None),
    ],
)
def test_a_string_that_is_slow_on_the_device_warns_once_and_names_a_faster_one(
    monkeypatch, kind, string, backend, told
):
    table = "string v6e v5e\nint8 0.6 -\nfp8 1.02 0.9\nfp8_full 0.79 -\naqt_fp8_full 1.4 -\nint8_delayed 1.22 -\n"
    monkeypatch.setattr(speeds, "TABLE", table)
    devices = [SimpleNamespace(device_kind=kind)]
    monkeypatch.setattr(speeds, "jax", SimpleNamespace(devices=lambda: devices, dtypes=jax.dtypes))
    speeds.warn_if_slow.cache_clear()
    config = {"quantization": string, "quant_backend": backend}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            jaxquant.maybe_quantize_model(nn.Dense(8), config)
    texts = [str(each.message) for each in found]
    assert re.search(told, texts.pop()) if told else not texts
    assert not texts
    speeds.warn_if_slow.cache_clear()
