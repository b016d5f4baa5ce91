"""Two processes on one host train, evaluate, save, stop, resume and diverge as one process on two devices does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from jaxquant.core.typed import to_mapping
from tests.train.conftest import ROOT, read_lines, read_losses
from tests.train.mesh_worker import PATIENT
from train import processes
from train.__main__ import main
from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.step import build

STEPS = 8
LIMIT_S = 600
"""Longest that a run may take on a machine with other work; on an idle one it takes 15 to 30."""


class Run:
    """``python -m train`` on two devices, in one process or in two. Leaving it ends what is left of them."""

    def __init__(self, config: TrainConfig, run_dir: Path, count: int):
        folder = run_dir.parent
        file = folder / "config.yml"
        file.write_text(yaml.safe_dump(to_mapping(config)))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        flags = f"{PATIENT} --xla_force_host_platform_device_count={2 // count}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
        self.run_dir, self._deadline = run_dir, time.monotonic() + LIMIT_S
        self._logs = [folder / f"{index}.log" for index in range(count)]
        self.processes: list[subprocess.Popen[str]] = []
        for index, log in enumerate(self._logs):
            words = [sys.executable, "-X", "faulthandler", "-m", "train", str(file)]
            if count > 1:
                words += [f"--coordinator-address={address}", f"--num-processes={count}", f"--process-id={index}"]
            words.append(f"run_dir={run_dir}")
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
                )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for_step(self, step: int) -> None:
        path = self.run_dir / "metrics.jsonl"
        while not path.exists() or len(path.read_text().splitlines()) < step:
            assert all(process.poll() is None for process in self.processes), self._texts()
            self._check_time()
            time.sleep(0.005)

    def finish(self, code: int = 0) -> list[str]:
        """Wait for the end; the output of each process."""
        while any(process.poll() is None for process in self.processes):
            self._check_time()
            time.sleep(0.05)
        assert [process.returncode for process in self.processes] == [code] * len(self.processes), self._texts()
        return self._texts()

    def _check_time(self) -> None:
        if time.monotonic() < self._deadline:
            return
        for process in self.processes:
            process.send_signal(signal.SIGABRT)  # faulthandler writes down where it waits
            process.wait()
        raise AssertionError(f"the run hangs: {self._texts()}")

    def _texts(self) -> list[str]:
        return [log.read_text() for log in self._logs]


def _train(config: TrainConfig, run_dir: Path, count: int, code: int = 0) -> list[str]:
    with Run(config, run_dir, count) as run:
        return run.finish(code)


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock."""
    lines = read_lines(run_dir)
    return [{k: v for k, v in line.items() if k not in ("step_time_s", "tokens_per_s")} for line in lines]


def _restore(config: TrainConfig, run_dir: Path) -> tuple[Any, Any]:
    """Load the newest checkpoint of a two-device run onto this process's one device."""
    alone = dataclasses.replace(config, mesh_fsdp=1)
    with Checkpoints(run_dir, config) as checkpoints:
        found = checkpoints.restore(build(alone, 320).abstract_state)
    assert found is not None
    return found


def _assert_same(one: Path, two: Path, config: TrainConfig) -> None:
    """Two addends have one sum in either order, so two devices give the same bits wherever they are."""
    assert list(read_losses(two)) == list(range(1, config.steps + 1))
    assert _lines(two) == _lines(one)
    states = [_restore(config, run)[0] for run in (one, two)]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(states[0]), jax.tree.leaves(states[1]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, two)]
    for name in ("held_out_loss", "layers", "quant_state_bytes", "saved_activation_bytes"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.slow
def test_two_processes_stop_resume_log_health_and_diverge_as_one_does(tiny: TrainConfig, tmp_path: Path):
    """One run shows it all, with delayed scales and with stochastic rounding: each start of a process is expensive."""
    rules = [{"path": ".*/mlp/.*", "recipe": "int8"}]
    fields = {"quantization": "fp8", "quant_backend": "native", "rules": rules, "mesh_data": 1, "mesh_fsdp": 2}
    config = dataclasses.replace(tiny, **fields, steps=STEPS, eval_every=3, health_every=4)
    one, two = tmp_path / "one", tmp_path / "two"
    _train(config, one, 1)
    with Run(config, two, 2) as run:
        run.wait_for_step(2)
        run.processes[1].send_signal(signal.SIGTERM)
        texts = run.finish()
    assert "stopped by a signal to another process after step" in texts[0]
    assert max(read_losses(two)) < STEPS
    texts = _train(config, two, 2)
    assert f"resumed {two} at step" in texts[0]
    assert not any(word in texts[1] for word in ("step", "resumed", "done"))  # process 0 alone prints
    _assert_same(one, two, config)
    recipes = {layer["recipe"] for layer in json.loads((two / "summary.json").read_text())["layers"]}
    assert recipes == {"fp8", "int8"}
    health = (two / "health.jsonl").read_text()
    assert health == (one / "health.jsonl").read_text()
    assert [json.loads(line)["step"] for line in health.splitlines()] == [4, 8]

    state, position = _restore(config, two)
    kernel = state.params["layers"]["mlp"]["wi_0"]  # of a layer that is scaled by what it is, not by its past
    kernel["kernel"] = kernel["kernel"].at[1].set(3e38)
    with Checkpoints(two, config) as checkpoints:
        checkpoints.save(STEPS + 1, state._replace(step=jnp.int32(STEPS + 1)), position)
    texts = _train(dataclasses.replace(config, steps=STEPS + 4), two, 2, code=1)
    assert f"step {STEPS + 2}: loss is nan" in texts[0]
    assert "first non-finite input of a linear layer is that of layers/mlp/wo, layer 1 " in texts[0]
    assert "error" not in texts[1]
    assert max(read_losses(two)) == STEPS


def test_between_cpu_processes_a_program_has_ended_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch):
    square = np.full((600, 600), 1 / 600, np.float32)
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
    jax.block_until_ready(long(square))
    assert not processes.in_order(long(square)).is_ready()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert processes.in_order(long(square)).is_ready()


def test_processes_want_all_three_words(capsys: pytest.CaptureFixture[str]):
    words = [str(ROOT / "configs/models/ci.yml"), "--num-processes", "2", "run_dir=none"]
    assert main(words) == 2
    assert "needs --coordinator-address and --process-id too" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--process-id must be in 0\.\.1, got 2"):
        processes.join("localhost:1", 2, 2)
