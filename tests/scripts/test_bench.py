"""The benchmarks measure what they say, on stacks whose cost is known."""

import json

import pytest

from jaxquant import RECIPES
from scripts import bench

NATIVE_INT8 = bench.Scheme("int8", "native")


def test_every_pair_of_the_table_is_listed_once():
    found = bench.schemes(None, None)
    rows = {id(row): row for name, row in RECIPES.items() if name}.values()
    assert len(found) == sum(len(row.backends) for row in rows)
    assert {name for scheme in found for name in (scheme.string, *scheme.also)} == set(RECIPES) - {""}
    assert all(scheme.backend in RECIPES[scheme.string].backends for scheme in found)


def test_strings_and_backends_choose():
    assert bench.schemes(["int8"], ["auto"]) == [bench.Scheme("int8", RECIPES["int8"].auto)]
    assert bench.schemes(["fp8_gpu"], None)[0].also == ("fp8", "te_fp8_delayedscaling")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strings", "banana"], "--strings 'banana' is not a known recipe; known are int8"),
        (["--strings", "fp8", "--backends", "aqt"], "leave nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_an_error(words, message, capsys, tmp_path):
    assert bench.main(["memory", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_saved_bytes_of_a_native_layer_are_one_an_element():
    base, quantized = bench.measure_memory([NATIVE_INT8], layers=2)
    elements = 256 * 128 + 128 * 128
    assert base["bytes a layer"] == 2 * elements
    assert f"int8 {elements:,}" in quantized["by dtype"]
    assert quantized["bytes a layer"] < 1.1 * elements


def test_program_lines_of_a_bf16_layer():
    base, quantized = bench.measure_trace([NATIVE_INT8], layers=2)
    assert base["same shape"] == base["new shape"] == base["inlined"] > 0
    assert quantized["new shape"] > base["new shape"]
    assert quantized["new shape ratio"] == pytest.approx(quantized["new shape"] / base["new shape"], abs=0.01)


@pytest.mark.slow
def test_step_times_and_ratio():
    tiny = {"emb_dim": 128, "mlp_dim": 128, "num_layers": 1, "sequence_length": 16, "batch_size": 2}
    base, quantized = bench.measure_steps([NATIVE_INT8], rounds=3, overrides=tiny)
    assert base["ratio"] == 1
    assert quantized["step ms"] > 0
    assert quantized["ratio"] > 0


@pytest.mark.slow
def test_the_cost_of_health():
    tiny = {"emb_dim": 128, "mlp_dim": 128, "num_layers": 1, "sequence_length": 16, "batch_size": 2}
    rows = bench.measure_health_of([NATIVE_INT8], rounds=2, overrides=tiny)
    assert [row["quantization"] for row in rows] == ["none", "int8"]
    for row in rows:
        assert row["step ms"] > 0
        assert row["health pass ms"] > 0
        assert float(row["share"].rstrip("%")) > 0


def test_the_stored_figures_say_what_the_command_says():
    about = " ".join((bench.measure_trace.__doc__ or "").split())
    folder = bench.ROOT / "benchmarks"
    assert about in (folder / "trace-cpu.md").read_text()
    assert json.loads((folder / "trace-cpu.json").read_text())["about"] == about


def test_figures_are_written_with_date_machine_and_versions(tmp_path):
    rows = [{"quantization": "none", "ratio": 1.0}, {"quantization": "int8", "ratio": 0.5}]
    data, text = bench.write("memory", "About.", rows, tmp_path)
    stored = json.loads(data.read_text())
    assert stored["rows"] == rows
    assert {"date", "device", "cpus", "platform", "python", "versions"} <= set(stored)
    assert "| int8 | 0.5 |" in text.read_text()
    assert f"jax {stored['versions']['jax']}" in text.read_text()
