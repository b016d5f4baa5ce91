"""Whole runs: learning, stopping, exact resumption, kill -9, damaged checkpoints, and orderly ends."""

from __future__ import annotations

import json
import random
import signal
from typing import Any

import pytest

from jaxquant.config.loader import load_yaml
from jaxquant.training.config import TrainConfig
from jaxquant.training.report import comparison_rows, load_runs
from tests.train.conftest import STEPS, finish, quantized, read_lines, read_losses, start, train, wait_for_step

STRINGS = ["", "int8", "fp8"]


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
    assert min(summary[name] for name in ("step_time_s", "tokens_per_s", "saved_activation_bytes")) > 0
    assert (summary["quant_state_bytes"] > 0) == (quantization == "fp8")
    recipes = {layer["path"]: layer["recipe"] for layer in summary["layers"]}
    if quantization:
        assert recipes["layers/mlp/wo"] == quantization
    assert load_yaml(run / "config.yml")["quantization"] == quantization
    lines = read_lines(run)
    assert set(lines[0]) == {"step", "loss", "grad_norm", "learning_rate", "step_time_s", "tokens_per_s"}
    assert lines[-1] == {"step": STEPS, "held_out_loss": summary["held_out_loss"]}


@pytest.mark.slow
def test_killed_at_a_random_step_resumes_bit_identical(finished, tiny, tmp_path):
    """The result has the bits of an uninterrupted run."""
    run, quantization = tmp_path / "run", "fp8"
    config = quantized(tiny, quantization)
    started = start(config, run)
    step = random.randrange(4, STEPS - 4)
    wait_for_step(started, run, step)
    started[0].kill()
    started[0].wait()
    assert not (run / "summary.json").exists(), "it ended before it was killed"
    train(config, run)
    whole = finished(quantization)
    assert read_losses(run) == read_losses(whole), f"killed at step {step}"
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (run, whole))
    for name in ("held_out_loss", "layers", "parameter_bytes", "quant_state_bytes", "backend"):
        assert ours[name] == theirs[name]


def test_sigterm_saves_exits_0_and_resumes_bit_identical(finished, tiny, tmp_path):
    run = tmp_path / "run"
    started = start(tiny, run)
    wait_for_step(started, run, 5)
    started[0].send_signal(signal.SIGTERM)
    (text,) = finish(started, run)
    assert "stopped by SIGTERM after step" in text
    reached = max(read_losses(run))
    assert reached < STEPS
    assert (run / "checkpoints" / str(reached)).is_dir()
    assert any("resumed" in line and line.endswith(f"step {reached}") for line in train(tiny, run))
    assert read_losses(run) == read_losses(finished(""))


def test_a_finished_run_is_told_from_its_files_and_ends_again_without_its_summary(copy, tiny, monkeypatch):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("jaxquant.training.loop.make_iterators", lambda *_: pytest.fail("data is read before the folder"))
        assert [line.partition(":")[0] for line in train(tiny, copy, log_every=2)] == ["done"]
        with pytest.raises(ValueError, match="belongs to another run") as caught:
            train(tiny, copy, adam_b1=0.5, quantization="int8", steps=30, log_every=2)
    lines = ["  quantization: '' in the checkpoint, 'int8' now", "  adam_b1: 0.9 in the checkpoint, 0.5 now"]
    assert str(caught.value).splitlines()[1:] == lines
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    (copy / "summary.json").unlink()
    train(tiny, copy)
    summaries = (copy / "summary.json").read_bytes(), before[copy / "summary.json"]
    assert len({json.loads(summary)["held_out_loss"] for summary in summaries}) == 1


def test_a_finished_run_that_goes_on_is_unfinished_until_it_ends(copy, tiny, monkeypatch):
    monkeypatch.setattr("jaxquant.training.loop._Run._stop_reason", "a test")  # stops after each step
    train(tiny, copy, steps=STEPS + 2)
    assert comparison_rows(load_runs([copy]))[0]["steps"] == f"{STEPS + 1} (unfinished)"
    train(tiny, copy, steps=STEPS + 2)
    assert comparison_rows(load_runs([copy]))[0]["steps"] == f"{STEPS + 2}"
