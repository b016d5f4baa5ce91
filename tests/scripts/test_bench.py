"""The command refuses what it cannot measure and writes figures with their circumstances."""

import json

import pytest

from scripts import bench
from train.benchmarks.layers import measure_trace
from train.benchmarks.schemes import ROOT


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


def test_the_stored_figures_say_what_the_command_says():
    about = " ".join((measure_trace.__doc__ or "").split())
    folder = ROOT / "benchmarks"
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


def test_a_small_gemm_set_is_written_under_its_own_name(tmp_path, monkeypatch):
    asked = []

    def measure_gemm_set(layer, rounds):
        """Time.

        Args: none.
        """
        asked.append((layer, rounds))
        return [{"library": "jax", "speedup": 1.0}]

    monkeypatch.setattr(bench, "measure_gemm_set", measure_gemm_set)
    assert bench.main(["gemm-set", "--small", "--rounds", "3", "--out", str(tmp_path)]) == 0
    assert asked == [(bench.SMALL, 3)]
    [data] = tmp_path.glob("gemm-set-small-*.json")
    assert json.loads(data.read_text())["about"] == "Time."
