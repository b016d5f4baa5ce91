"""Program size and saved bytes of a layer, on stacks whose cost is known."""

import pytest

from benchmarks.layers import measure_memory, measure_trace
from benchmarks.schemes import Scheme

NATIVE_INT8 = Scheme("int8", "native")


def test_saved_bytes_of_a_native_layer_are_one_an_element():
    base, quantized = measure_memory([NATIVE_INT8], layers=2)
    elements = 256 * 128 + 128 * 128
    assert base["bytes a layer"] == 2 * elements
    assert f"int8 {elements:,}" in quantized["by dtype"]
    assert quantized["bytes a layer"] < 1.1 * elements


def test_program_lines_of_a_bf16_layer():
    base, quantized = measure_trace([NATIVE_INT8], layers=2)
    assert base["same shape"] == base["new shape"] == base["inlined"] > 0
    assert quantized["new shape"] > base["new shape"]
    assert quantized["new shape ratio"] == pytest.approx(quantized["new shape"] / base["new shape"], abs=0.01)
