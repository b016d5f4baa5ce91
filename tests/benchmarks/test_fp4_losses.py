"""The table of FP4 losses: gaps from the float run of the same seed, shares of NVFP4's, goals; nothing runs twice."""

from __future__ import annotations

import json

from benchmarks import optimizer_losses, seeds
from benchmarks.fp4_losses import COMPOSED, FLOAT, NVFP4, RECORD, TRIALS, table
from benchmarks.plot import losses
from benchmarks.schemes import ROOT
from benchmarks.seeds import read_record, train_missing
from scripts.bench import main

FLOATS, BEST = {0: 2.0, 1: 1.0}, "quartet2 4/6"


def line(loss, steps=3):
    """A run, of which the last step counts as the end of its training."""
    return {"held_out_loss": loss, "steps": steps, "train_loss": {"1": 9.0, str(steps): 3 * loss}}


def made(gaps):
    """Runs of seeds with these gaps in percent."""
    return {(name, n): line(FLOATS[n] * (1 + gap / 100)) for name, each in gaps.items() for n, gap in enumerate(each)}


def test_gaps_are_paired_by_seed_and_set_beside_nvfp4_s():
    found = table(made({FLOAT: (0, 0), NVFP4: (4, 2), BEST: (3, 2), COMPOSED: (0.5,), "mxfp8": (0.25,)}))
    rows = {row["scheme"]: row for row in found}
    assert [row["scheme"] for row in found] == [FLOAT, "mxfp8", COMPOSED, BEST, NVFP4]
    assert rows[BEST]["gap %"] == "+3.00 / +2.00"
    assert rows[BEST]["mean gap %"] == "+2.50 ± 0.50"
    assert rows[BEST]["difference"] == "+0.0400 ± 0.0200"
    assert rows[BEST]["of nvfp4's"] == "0.83"
    assert rows[BEST]["goal"] == "≤ 0.80: missed, +0.10 ± 0.30 points from it, training +0.10 ± 0.30"
    assert rows[COMPOSED]["of nvfp4's"] == "0.12"  # of the same seed alone
    assert rows[COMPOSED]["goal"] == "≤ 0.33: held, -0.83 points from it, training -0.83"
    assert rows["mxfp8"]["mean gap %"] == rows["mxfp8"]["training gap %"] == "+0.25"
    drawn = losses("Gaps", found)
    assert drawn.count('r="5"') == 4
    assert drawn.count('stroke="#c33"') == 2


def test_a_scheme_without_its_float_run_has_no_gap():
    assert [row["scheme"] for row in table({(FLOAT, 0): line(2.0), (NVFP4, 1): line(2.1)})] == [FLOAT]


def test_runs_without_what_they_are_compared_with_are_named(tmp_path, capsys):
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(line(2.1, 300) | {"scheme": NVFP4, "seed": 0}) + "\n")
    words = ["fp4-losses", "--only", NVFP4, "--seeds", "1", "--record", str(record), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"{record} has {NVFP4} now, and no run of the same seeds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_in_the_record_is_not_trained_again(tmp_path, monkeypatch):
    trained, record = [], tmp_path / "record.jsonl"

    def train(name, fields, seed, steps, runs):
        trained.append((name, seed))
        return line(2.0 + 0.1 * len(trained), steps) | {"scheme": name, "seed": seed}

    monkeypatch.setattr(seeds, "train_run", train)
    first = train_missing(TRIALS, record, tmp_path, 5, only=[FLOAT, NVFP4], seeds=2)
    assert trained == [(FLOAT, 0), (NVFP4, 0), (FLOAT, 1), (NVFP4, 1)]
    assert train_missing(TRIALS, record, tmp_path, 5, only=[FLOAT, NVFP4], seeds=2) == first
    assert len(trained) == 4
    train_missing(TRIALS, record, tmp_path, 6, only=[FLOAT], seeds=1)  # of another length
    assert trained[4:] == [(FLOAT, 0)]


def test_optimizers_are_compared_in_float32_of_the_same_seed_and_matmuls():
    losses = {
        ("float32, float matmuls", 0): 2.0,
        ("float32, float matmuls", 1): 1.0,
        ("fp8_coat, float matmuls", 0): 2.001,
        ("fp8_coat, float matmuls", 1): 1.0025,
        ("float32, fp8 matmuls", 0): 4.0,
        ("int8_dynamic, fp8 matmuls", 0): 4.002,
        ("int8_dynamic, fp8 matmuls", 1): 5.0,  # its seed has no run to compare it with
        ("Muon, float32, float matmuls", 0): 1.0,
        ("Muon, int8_linear, float matmuls", 0): 1.001,
    }
    found = optimizer_losses.table({key: line(loss) for key, loss in losses.items()})
    rows = {(row["optimizer"], row["matmuls"]): row for row in found}
    assert rows["fp8_coat", "float"]["excess %"] == "+0.15 ± 0.10"
    assert rows["fp8_coat", "float"]["goal"] == "≤ 0.1: missed"
    assert rows["int8_dynamic", "fp8"]["excess %"] == "+0.05"
    assert rows["Muon, int8_linear", "float"]["excess %"] == "+0.10"
    assert rows["int8_dynamic", "fp8"]["goal"] == "≤ 0.1: held"


def test_the_stored_table_is_that_of_the_record():
    lines = read_record(RECORD, 300)
    assert {each["tokens_per_parameter"] for each in lines.values()} == {1.152}
    assert {(name, n) for name in (FLOAT, NVFP4, BEST, COMPOSED) for n in range(TRIALS[name][0])} <= set(lines)
    stored = json.loads((ROOT / "benchmarks/fp4-losses-cpu.json").read_text())
    assert stored["rows"] == table(lines)
