"""A run folder has one writer: a second is refused with the first one's host, and replaces it if its process ended."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxquant.training import lock
from jaxquant.training.config import TrainConfig
from jaxquant.training.lock import Busy, RunLock
from jaxquant.training.loop import Halted, prepare
from jaxquant.training.metrics import Metrics
from tests.train.conftest import ROOT, train


def test_a_second_process_is_refused_by_name_and_a_killed_one_makes_way(tmp_path: Path):
    words = f"import pathlib; from jaxquant.training import lock; lock = lock.RunLock(pathlib.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", f"{words}; lock.acquire(print); print('held', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, **pipes)
    try:
        assert process.stdout.readline() == "held\n"
        who, began = f"process {process.pid} on {socket.gethostname()}", time.monotonic()
        with pytest.raises(Busy, match=f"is being written by {who}; wait for it, stop it, or choose another run_dir"):
            RunLock(tmp_path).acquire(print)
        assert time.monotonic() - began < 2, "a process that can be seen needs no waiting for"
    finally:
        process.kill()
        process.communicate()
    said: list[str] = []
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    assert said == [f"{who} is dead; taking over its lock"]
    with pytest.raises(Busy, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire(print)
    mine.release()
    RunLock(tmp_path).acquire(said.append)
    assert len(said) == 1, "a folder that was let go has no dead writer"


def _left_elsewhere(run: Path) -> Path:
    """Write the lock of a process on another host."""
    words = ("filelock/2", "pid=17", "host=elsewhere", "mode=lease", "token=ab", f"duration={lock.STALE_S}")
    (run / lock.NAME).write_text("".join(f"{word}\n" for word in words))
    return run / lock.NAME


def test_a_writer_on_another_host_is_believed_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The state of its process cannot be read."""
    monkeypatch.setattr(lock, "STALE_S", 3.0)
    monkeypatch.setattr(lock, "_TRY_S", 0.5)
    path, ended, said = _left_elsewhere(tmp_path), threading.Event(), []

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(Busy, match="process 17 on elsewhere"):
            RunLock(tmp_path).acquire(said.append)
    finally:
        ended.set()
        heart.join()
    assert said == [f"{lock.NAME} belongs to process 17 on elsewhere; waiting up to 4 s to check whether it is alive"]
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    assert said[2:] == ["process 17 on elsewhere is dead; taking over its lock"]
    mine.release()


def test_a_run_saves_nothing_beside_its_successor(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, run = Metrics.record_held_out, tmp_path / "run"

    def stand_still(self: Metrics, step: int, loss: float) -> None:
        write(self, step, loss)
        _left_elsewhere(run)

    monkeypatch.setattr(Metrics, "record_held_out", stand_still)
    with pytest.raises(Halted, match=r"taken over by process 17 on elsewhere .* was suspended; this run stops writing"):
        train(tiny, run, steps=1)
    assert not list((run / "checkpoints").glob("[0-9]*"))
    assert not (run / "summary.json").exists()


def test_a_lock_file_of_before_and_of_rubbish_is_nobodys(tmp_path: Path):
    for text in ('{"pid": 1, "host": "here"}\n', "[" * 3000):
        (tmp_path / lock.NAME).write_text(text)
        os.utime(tmp_path / lock.NAME, (0, 0))
        mine = RunLock(tmp_path)
        mine.acquire(print)
        mine.release()


def test_training_is_refused_before_anything_is_built(tiny: TrainConfig, tmp_path: Path):
    holder = RunLock(tmp_path)
    holder.acquire(print)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(Busy, match=f"run {tmp_path} is being written by process {os.getpid()}"):
        prepare(dataclasses.replace(tiny, run_dir=str(tmp_path)), print)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
