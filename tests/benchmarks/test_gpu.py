"""The one call for a GPU runs to its end on a CPU, and loses no figure to a failure, a limit or Ctrl-C."""

import json
import time

import pytest

from benchmarks import gemms, gpu
from benchmarks.__main__ import main
from benchmarks.gpu_kernels import CASES
from benchmarks.timing import Prepared

OPTIMIZED = False


def lines_of(folder):
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_small_run_measures_every_part_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(gemms, "CONTENDERS", (gemms.CONTENDERS[0], *gemms.CONTENDERS[3:5]))  # jax, torch, flax
    assert main(["gpu", "--small", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    assert list(dict.fromkeys(line["part"] for line in lines)) == ["run", *gpu.PARTS]
    timed = {(line["part"], line["row"]): line for line in lines if "rounds" in line}
    assert {part for part, _ in timed} == set(gpu.PARTS) - {"kernels"}
    assert timed["mlp", "fp8"]["× bf16"] > 0
    assert sum("round" in line for line in lines) == 2 * len(timed)
    errors = {line["row"]: line["error"] for line in lines if "error" in line}
    assert set(errors) == {"e4m3 preset", "e4m3 preset, no Triton", "torch split"}
    assert sum(line.get("note", "").startswith("refused: ") for line in lines) == len(CASES)


def test_figures_survive_a_part_that_fails_ctrl_c_and_the_limit(monkeypatch, tmp_path):
    def fails(part):
        part.time_in_turns({"bf16": lambda: Prepared({"step": lambda: 1}), "no torch": lambda: 1 / 0}, base="bf16")
        raise MemoryError("no room")

    def interrupted(part):
        part.write("first", {"us": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", {"one": (fails, 1), "two": (interrupted, 1)})
    assert main(["gpu", "--small", "--out", str(tmp_path)]) == 130
    rows = [line["row"] for line in lines_of(tmp_path) if "round" not in line]
    assert rows == ["machine", "bf16", "no torch", "bf16", "part", "first", "interrupted"]
    assert lines_of(tmp_path)[-3]["error"] == "MemoryError: no room"

    codes = []
    monkeypatch.setattr(gpu.os, "_exit", codes.append)
    monkeypatch.setattr(gpu, "PARTS", {"slow": (lambda part: time.sleep(0.5), 1)})
    main(["gpu", "--small", "--out", str(tmp_path), "--limit", "0.1"])
    assert codes == [1]
    assert {"part": "slow", "row": "limit", "error": "stopped after 0.1 s"} in lines_of(tmp_path)
