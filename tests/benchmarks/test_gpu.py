"""The benchmark commands raise errors for what they cannot measure, and the GPU command runs to its end on a CPU."""

import json

import pytest

from jaxquant.bench import gemms, gpu
from jaxquant.bench.gpu_kernels import CASES
from jaxquant.cli import main

OPTIMIZED = False
REFUSED = [
    (["against-cpu", "--string", "banana"], "--string 'banana' is unknown; use one of int8"),
    (["gpu"], "bench gpu requires a GPU, but JAX finds only cpu; add --small"),
]


def test_what_cannot_be_measured_is_an_error(capsys, tmp_path):
    for words, message in REFUSED:
        assert main(["bench", *words, "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def lines_of(folder):
    [path] = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_speedrun_compares_rows_and_draws_them(tmp_path):
    words = ["--small", "--steps", "4", "--only", "jaxquant int8"]
    assert main(["bench", "speedrun", *words, "--out", str(tmp_path)]) == 0
    rows = lines_of(tmp_path)
    assert [(row["row"], row["curve"][-1][0]) for row in rows] == [("bf16", 4), ("jaxquant int8", 4)]
    assert all(loss < 5.77 for row in rows for *_, loss in row["curve"])  # log(320), the loss of a uniform guess
    assert next(tmp_path.glob("*.svg")).read_text().count("<polyline") == 2


@pytest.mark.slow
def test_a_small_run_measures_every_part_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(gemms, "CONTENDERS", (gemms.CONTENDERS[0], *gemms.CONTENDERS[3:5]))  # jax, torch, flax
    assert main(["bench", "gpu", "--small", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    assert list(dict.fromkeys(line["part"] for line in lines)) == ["run", *gpu.PARTS]
    assert {line["row"] for line in lines if "error" in line} == {
        "e4m3 preset",
        "e4m3 preset, no Triton",
        "torch split",
    }
    assert sum(line.get("note", "").startswith("refused: ") for line in lines) == len(CASES)
