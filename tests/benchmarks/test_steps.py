"""Step times are measured in one run, against the unquantized step."""

import pytest

from benchmarks.health import measure_health
from benchmarks.schemes import Scheme
from benchmarks.steps import measure_steps

OPTIMIZED = False  # what is timed is not what is tested


@pytest.mark.slow
def test_step_times_and_ratio():
    tiny = {"emb_dim": 128, "mlp_dim": 128, "num_layers": 1, "sequence_length": 16, "batch_size": 2}
    base, quantized = measure_steps([Scheme("int8", "native")], rounds=3, overrides=tiny)
    assert base["ratio"] == 1
    assert quantized["step ms"] > 0
    assert quantized["ratio"] > 0


@pytest.mark.slow
def test_the_cost_of_health():
    tiny = {"emb_dim": 128, "mlp_dim": 128, "num_layers": 1, "sequence_length": 16, "batch_size": 2}
    rows = measure_health([Scheme("int8", "native")], rounds=2, overrides=tiny)
    assert [row["quantization"] for row in rows] == ["none", "int8"]
    for row in rows:
        assert row["step ms"] > 0
        assert row["health pass ms"] > 0
        assert float(row["share"].rstrip("%")) > 0
