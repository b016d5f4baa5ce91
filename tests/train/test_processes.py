"""Two processes on one host train, evaluate, save, stop and resume like one process with two devices."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxquant.cli import main
from jaxquant.training import processes
from jaxquant.training.checkpoint import Checkpoints
from jaxquant.training.config import TrainConfig
from jaxquant.training.step import build
from tests.train.conftest import ROOT, finish, read_lines, read_losses, start, wait_for_step

STEPS = 8


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return metrics without the fields that depend on time."""
    lines = read_lines(run_dir)
    return [{k: v for k, v in line.items() if k not in ("step_time_s", "tokens_per_s")} for line in lines]


def _restore(config: TrainConfig, run_dir: Path) -> Any:
    """Load the latest state of a two-device run onto the one device of this process."""
    alone = dataclasses.replace(config, mesh_fsdp=1)
    with Checkpoints(run_dir, config) as checkpoints:
        found = checkpoints.restore(build(alone, 320).abstract_state)
    assert found is not None
    return found[0]


def _assert_same(one: Path, two: Path, config: TrainConfig) -> None:
    """Check for equal bits: a sum of two terms does not depend on their order, so two devices compute the same bits."""
    assert list(read_losses(two)) == list(range(1, config.steps + 1))
    assert _lines(two) == _lines(one)
    states = [_restore(config, run) for run in (one, two)]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    for name in ("held_out_loss", "layers", "quant_state_bytes", "saved_activation_bytes"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.slow
def test_two_processes_stop_resume_and_log_health_as_one_does(tiny: TrainConfig, tmp_path: Path):
    """One run tests everything, with delayed scaling and stochastic rounding, because starting a process is slow."""
    rules = [{"path": ".*/mlp/.*", "recipe": "int8"}]
    fields = {"quantization": "fp8", "quant_backend": "native", "rules": rules, "mesh_data": 1, "mesh_fsdp": 2}
    config = dataclasses.replace(tiny, **fields, steps=STEPS, eval_every=3, health_every=4)
    one, two = tmp_path / "one/run", tmp_path / "two/run"
    for run in (one, two):
        run.parent.mkdir()
    finish(start(config, one, devices=2), one)
    started = start(config, two, devices=2, processes=2)
    wait_for_step(started, two, 2)
    started[1].send_signal(signal.SIGTERM)
    assert "stopped by a signal to another process after step" in finish(started, two)[0]
    assert max(read_losses(two)) < STEPS
    texts = finish(start(config, two, devices=2, processes=2), two)
    assert f"resumed {two} at step" in texts[0]
    assert not any(word in texts[1] for word in ("step", "resumed", "done"))  # only process 0 prints
    _assert_same(one, two, config)
    recipes = {layer["recipe"] for layer in json.loads((two / "summary.json").read_text())["layers"]}
    assert recipes == {"fp8", "int8"}
    health = (two / "health.jsonl").read_text()
    assert health == (one / "health.jsonl").read_text()
    assert [json.loads(line)["step"] for line in health.splitlines()] == [4, 8]


def test_processes_want_all_three_words(capsys: pytest.CaptureFixture[str]):
    words = ["train", str(ROOT / "configs/models/ci.yml"), "--num-processes", "2", "run_dir=none"]
    assert main(words) == 2
    assert "also requires --coordinator-address and --process-id" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--process-id must be in 0\.\.1, got 2"):
        processes.join("localhost:1", 2, 2)
