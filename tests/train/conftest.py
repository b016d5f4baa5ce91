"""A small text corpus, and a tiny run that trains on it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build, to_mapping
from jaxquant.training.config import TrainConfig
from jaxquant.training.loop import prepare
from tests.conftest import optimize_little
from tests.train.mesh_worker import PATIENT

ROOT = Path(__file__).resolve().parents[2]
CI_CONFIG = ROOT / "configs/models/ci.yml"
STEPS = 24
LIMIT_S = 600
"""Seconds after which a run on a busy machine counts as failed; on an idle machine, a run takes 15 to 30 s."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all workers of the session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def made_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Make a folder in the first worker that needs it, while the others wait; after a failure, another worker tries."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            make(new)
            new.rename(folder)
    return folder


@pytest.fixture(scope="session")
def corpus(shared: Path) -> Path:
    """Return forty different documents of numbered words, which are easy to learn."""

    def write(folder: Path) -> None:
        for document in range(40):
            words = [f"item {number * (document + 3) % 97} of {document}" for number in range(30)]
            (folder / f"{document:02}.txt").write_text("\n".join(words))

    return made_once(shared / "corpus", write)


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> TrainConfig:
    fields = {"dataset": "text", "dataset_path": str(corpus), "steps": STEPS, "checkpoint_every": 3}
    return build(TrainConfig, load_yaml(CI_CONFIG) | fields)


@pytest.fixture(scope="session")
def finished(tiny: TrainConfig, shared: Path) -> Any:
    """Return quantization -> folder of an uninterrupted run, made once for all tests, with little optimization.

    The folder is shared: a test that writes to it makes a copy first.
    """

    def make(quantization: str, folder: Path) -> None:
        before = optimize_little(True)
        try:
            train(quantized(tiny, quantization), folder / "run")
        finally:
            optimize_little(before)

    def get(quantization: str) -> Path:
        folder = shared / f"finished-{quantization or 'float'}"
        return made_once(folder, lambda new: make(quantization, new)) / "run"

    return get


@pytest.fixture
def copy(finished: Any, tmp_path: Path) -> Path:
    """Return a copy of the finished unquantized run, which the test may change."""
    return Path(shutil.copytree(finished(""), tmp_path / "run"))


def quantized(config: TrainConfig, quantization: str) -> TrainConfig:
    return dataclasses.replace(config, quantization=quantization)


def train(config: TrainConfig, run_dir: Path, **fields: Any) -> list[str]:
    """Train in this process and return the output before the first step."""
    said: list[str] = []
    prepare(dataclasses.replace(config, run_dir=str(run_dir), **fields), said.append)()
    return said


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def read_losses(run_dir: Path) -> dict[int, float]:
    """Return step -> loss; a step with two losses is a failure."""
    lines = read_lines(run_dir)
    pairs = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(pairs) == len(dict(pairs)), "a step stands twice in metrics.jsonl"
    return dict(pairs)


def start(config: TrainConfig, run_dir: Path, devices: int = 1, processes: int = 1) -> list[subprocess.Popen[bytes]]:
    """Start the command in processes that share the devices; their output goes to files next to the run."""
    file = run_dir.parent / "config.yml"
    file.write_text(yaml.safe_dump(to_mapping(config)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {PATIENT} --xla_force_host_platform_device_count={devices // processes}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    started = []
    for index in range(processes):
        words = [sys.executable, "-m", "jaxquant", "train", str(file), f"run_dir={run_dir}"]
        if processes > 1:
            words += [f"--coordinator-address={address}", f"--num-processes={processes}", f"--process-id={index}"]
        with (run_dir.parent / f"{index}.log").open("w") as out:
            started.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
    return started


def wait_for_step(started: list[subprocess.Popen[bytes]], run_dir: Path, step: int) -> None:
    deadline, path = time.monotonic() + LIMIT_S, run_dir / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < step:
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            finish(started, run_dir)
            raise AssertionError(f"no step {step}: {(run_dir.parent / '0.log').read_text()}")
        time.sleep(0.005)


def finish(started: list[subprocess.Popen[bytes]], run_dir: Path) -> list[str]:
    """Wait for all processes and return the output of each; every process must exit with status 0."""
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    written = [(run_dir.parent / f"{index}.log").read_text() for index in range(len(started))]
    assert not any(codes), written
    return written
