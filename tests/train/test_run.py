"""Whole runs: they learn, stop, resume exactly, survive kill -9 and broken checkpoints, and end in order."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import to_mapping
from tests.train.conftest import ROOT, STEPS, quantized, read_lines, read_losses, train
from train.config import TrainConfig
from train.report import comparison_rows, load_runs

STRINGS = ["", "int8", "fp8"]


def start(config: TrainConfig, run_dir: Path, folder: Path) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    import yaml

    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(to_mapping(config)))
    words = [sys.executable, "-m", "train", str(file), f"run_dir={run_dir}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    path = run_dir / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not advance"
        time.sleep(0.005)


@pytest.mark.parametrize("quantization", STRINGS)
def test_loss_falls_and_the_summary_says_what_ran(finished: Any, tiny: TrainConfig, quantization: str):
    run = finished(quantization)
    losses = read_losses(run)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < 0.8 * losses[1]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["quantization"] == quantization
    assert summary["backend"] == ("native" if quantization else "")
    assert 0 < summary["held_out_loss"] < losses[1]
    assert summary["step_time_s"] > 0
    assert summary["tokens_per_s"] > 0
    assert summary["saved_activation_bytes"] > 0
    assert (summary["quant_state_bytes"] > 0) == (quantization == "fp8")
    recipes = {layer["path"]: layer["recipe"] for layer in summary["layers"]}
    if quantization:
        assert recipes["layers/mlp/wo"] == quantization
    assert load_yaml(run / "config.yml")["quantization"] == quantization
    lines = read_lines(run)
    assert set(lines[0]) == {"step", "loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s"}
    assert lines[-1] == {"step": STEPS, "held_out_loss": summary["held_out_loss"]}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_killed_at_a_random_step_resumes_bit_identical(finished, tiny, tmp_path, quantization):
    """To the bits of a run that nothing interrupted."""
    run = tmp_path / "run"
    config = quantized(tiny, quantization)
    process = start(config, run, tmp_path)
    step = random.randrange(4, STEPS - 4)
    wait_for_step(process, run, step)
    process.kill()
    process.communicate()
    assert not (run / "summary.json").exists(), "it ended before it was killed"
    train(config, run)
    whole = finished(quantization)
    assert read_losses(run) == read_losses(whole), f"killed at step {step}"
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (run, whole))
    for name in ("held_out_loss", "layers", "parameter_bytes", "quant_state_bytes", "backend"):
        assert ours[name] == theirs[name]


def test_sigterm_saves_exits_0_and_resumes_bit_identical(finished, tiny, tmp_path):
    run = tmp_path / "run"
    process = start(tiny, run, tmp_path)
    wait_for_step(process, run, 5)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "stopped by SIGTERM after step" in text
    reached = max(read_losses(run))
    assert reached < STEPS
    assert (run / "checkpoints" / str(reached)).is_dir()
    assert any("resumed" in line and line.endswith(f"step {reached}") for line in train(tiny, run))
    assert read_losses(run) == read_losses(finished(""))


@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr("train.loop.make_iterators", lambda *_: pytest.fail("data is read before the folder"))


def test_another_config_is_refused_with_the_differences(copy, tiny, capsys, nothing_is_built):
    with pytest.raises(ValueError, match="is of another run") as caught:
        train(tiny, copy, adam_b1=0.5, quantization="int8", steps=30, log_every=2)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  quantization: '' in the checkpoint, 'int8' asked",
        "  adam_b1: 0.9 in the checkpoint, 0.5 asked",
    ]


def test_a_finished_run_ends_again(copy, tiny):
    before = json.loads((copy / "summary.json").read_text())["held_out_loss"]
    (copy / "summary.json").unlink()
    train(tiny, copy)
    assert json.loads((copy / "summary.json").read_text())["held_out_loss"] == before


def test_a_finished_run_is_told_from_its_files(copy, tiny, nothing_is_built):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert [line.partition(":")[0] for line in train(tiny, copy, log_every=2)] == ["done"]
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_finished_run_that_goes_on_is_unfinished_until_it_ends(copy, tiny, monkeypatch):
    monkeypatch.setattr("train.loop._Run._reason", "a test")  # stops after each step
    train(tiny, copy, steps=STEPS + 2)
    assert comparison_rows(load_runs([copy]))[0]["steps"] == f"{STEPS + 1} (unfinished)"
    train(tiny, copy, steps=STEPS + 2)
    assert comparison_rows(load_runs([copy]))[0]["steps"] == f"{STEPS + 2}"
