"""The command refuses what it cannot measure and writes figures with their circumstances."""

import json

import pytest

from benchmarks import here
from benchmarks.__main__ import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps", "--strings", "banana"], "--strings 'banana' is not a known recipe; known are int8"),
        (["steps", "--strings", "fp8", "--backends", "aqt"], "leave nothing to measure"),
        (["gpu"], "JAX sees only cpu here; --small runs on a CPU"),
    ],
)
def test_what_cannot_be_measured_is_an_error(words, message, capsys, tmp_path):
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_figures_are_written_with_date_machine_and_versions(tmp_path):
    rows = [{"quantization": "none", "ratio": 1.0}, {"quantization": "int8", "ratio": 0.5}]
    data, text = here.write("steps", "About.", rows, tmp_path)
    stored, page = json.loads(data.read_text()), text.read_text()
    assert stored["rows"] == rows
    assert {"date", "device", "cpus", "platform", "python", "versions"} <= set(stored)
    assert all(part in page for part in ("| int8 | 0.5 |", f"jax {stored['versions']['jax']}"))
