"""The command refuses what it cannot measure and writes figures with their circumstances."""

import json
import os
import subprocess

import pytest

from benchmarks.schemes import ROOT
from scripts import bench


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


def test_figures_are_written_with_date_machine_and_versions(tmp_path):
    rows = [{"quantization": "none", "ratio": 1.0}, {"quantization": "int8", "ratio": 0.5}]
    data, text = bench.write("memory", "About.", rows, tmp_path)
    stored = json.loads(data.read_text())
    assert stored["rows"] == rows
    assert {"date", "device", "cpus", "platform", "python", "versions"} <= set(stored)
    assert "| int8 | 0.5 |" in text.read_text()
    assert f"jax {stored['versions']['jax']}" in text.read_text()


def test_a_kernel_that_differs_from_its_reference_fails_the_command(tmp_path, monkeypatch):
    rows = [{"kernel": "quantize", "note": "refused: no GPU"}]
    monkeypatch.setattr(bench, "measure_kernels", lambda rounds, cases: rows)
    assert bench.main(["kernels", "--out", str(tmp_path)]) == 0
    rows.append({"kernel": "matmul", "note": "WRONG: differs from its reference"})
    assert bench.main(["kernels", "--out", str(tmp_path)]) == 1


FAKE_PYTHON = """#!/usr/bin/env bash
[[ "$1" == -c ]] && exit 0
case "$2" in
  gemm-set) sleep 60 ;;  # never ready to time
  strings) echo "compared" ;;  # times nothing
  *)
    touch "$JAXQUANT_BENCH_TURN.ready"
    while [[ ! -e "$JAXQUANT_BENCH_TURN.go" ]]; do sleep 0.05; done
    echo "$2 $3 $4"
    [[ "$2" != kernels ]]  # as where one is wrong
    ;;
esac
"""


def test_steps_on_a_gpu_compile_side_by_side_and_time_in_turns(tmp_path):
    for name, text in (("nvidia-smi", "#!/bin/sh\necho 'GPU 0: one'\n"), ("python3", FAKE_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXQUANT_GPU_PATIENCE": "2"}
    environment.pop("PYTHON", None)
    words = [str(ROOT / "scripts" / "gpu.sh"), "kernels", "strings", "gemm-set", "yardstick"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=50)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("== ")]
    assert lines == ["kernels --rounds 10", "compared", "yardstick --rounds 10"]
    assert "gemm-set did not compile and compare within 2 s, and is stopped" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: failed: kernels, gemm-set"
    assert done.returncode == 1
