"""What is compared on a chip: a CPU compared with itself, and with one that computes something else."""

import contextlib
from types import SimpleNamespace

import jax
import pytest

from benchmarks import on_chip
from benchmarks.on_chip import measure_strings
from benchmarks.schemes import Scheme


def test_a_device_that_computes_something_else_as_written_is_wrong(monkeypatch):
    factors, note = (1.0, 1.02), "WRONG: not what a CPU computes"

    def pool(platform, workers):
        asked.append(platform)
        scales = factors if len(asked) == 1 else (1.0,)

        def run(function, given):
            results = (function(one)[0] for one in given)
            return [
                ([[leaf * scale for leaf in form] for form, scale in zip(forms, scales, strict=True)], "3 f32")
                for forms in results
            ]

        return contextlib.nullcontext(SimpleNamespace(map=run))

    asked = []
    monkeypatch.setattr(on_chip, "_pool", pool)
    rows = measure_strings([Scheme("fp8_block", "native")])
    assert [row["quantization"] for row in rows] == ["none", "fp8_block"]
    assert [row["note"] for row in rows] == [note, note]
    for row in rows:
        assert (row["difference"], row["as written"]) == pytest.approx([factor - 1 for factor in factors], abs=1e-6)
    assert asked == [jax.default_backend(), "cpu"]
