"""The table of speeds equals the benchmark's table, and a string that is slow on the device warns once."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import pytest

import jaxquant
from jaxquant.bench.speeds import table_text
from jaxquant.config import speeds

FOLDER = Path(__file__).parents[2] / "benchmarks/results"


def test_the_table_is_that_of_the_benchmark():
    rows = json.loads((FOLDER / "strings-speed.json").read_text())
    assert table_text(rows) == speeds.TABLE
    assert speeds.speeds_on(list(rows[0])[1])[rows[0]["quantization"]] == list(rows[0].values())[1]


V6E = "TPU v6 lite"
WARNS = "'fp8_full' trains .* 0.79 times .* on one TPU v6 lite .*; use 'fp8' for 1.02 times"
CASES = [(V6E, "fp8_full", WARNS), (V6E, "fp8", None), ("cpu", "fp8_full", None)]


@pytest.mark.parametrize(("kind", "string", "told"), CASES)
def test_a_slow_string_warns_once_and_names_a_faster_one(monkeypatch, recwarn, kind, string, told):
    monkeypatch.setattr(speeds, "TABLE", "string v6e v5e\nint8 0.6 -\nfp8 1.02 0.9\nfp8_full 0.79 -\n")
    devices = [SimpleNamespace(device_kind=kind)]
    monkeypatch.setattr(speeds, "jax", SimpleNamespace(devices=lambda: devices, dtypes=jax.dtypes))
    speeds.warn_if_slow.cache_clear()
    for _ in range(2):
        jaxquant.maybe_quantize_model(nn.Dense(8), {"quantization": string})
    speeds.warn_if_slow.cache_clear()
    texts = [str(each.message) for each in recwarn]
    assert len(texts) == (told is not None)
    assert not texts or re.search(told, texts[0])
