"""A run folder has one writer: the second is refused by name and host, and a dead one's place is taken."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.train.conftest import ROOT, train
from train import lock
from train.config import TrainConfig
from train.lock import Busy, RunLock
from train.loop import Halted, prepare
from train.metrics import Metrics

HOLD = """
import sys, time
from pathlib import Path
from train.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire(print)
print("held", flush=True)
time.sleep(60)
"""


def hold(run: Path) -> subprocess.Popen[str]:
    """Start a process that holds the folder."""
    words = [sys.executable, "-c", HOLD, str(run)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_by_name_and_a_killed_one_makes_way(tmp_path: Path):
    process = hold(tmp_path)
    try:
        who, began = f"process {process.pid} on {socket.gethostname()}", time.monotonic()
        with pytest.raises(Busy, match=f"is being written by {who}; wait for it, stop it, or choose another run_dir"):
            RunLock(tmp_path).acquire(print)
        assert time.monotonic() - began < 2, "a process that can be seen needs no waiting for"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    said: list[str] = []
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    mine.acquire(said.append)
    assert said == [f"{who} is gone; going on in its place"]
    with pytest.raises(Busy, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire(print)
    mine.release()
    RunLock(tmp_path).acquire(said.append)
    assert len(said) == 1, "a folder that was let go has no dead writer"


def _left_elsewhere(run: Path) -> Path:
    """Leave the lock of a process on another host."""
    words = ("filelock/2", "pid=17", "host=elsewhere", "mode=lease", "token=ab", f"duration={lock.STALE_S}")
    (run / lock.NAME).write_text("".join(f"{word}\n" for word in words))
    return run / lock.NAME


@pytest.fixture
def soon_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_S", 3.0)
    monkeypatch.setattr(lock, "_TRY_S", 0.5)


@pytest.mark.usefixtures("soon_stale")
def test_a_writer_on_another_host_is_believed_by_its_heartbeat(tmp_path: Path):
    """Its process cannot be seen."""
    path, ended, said = _left_elsewhere(tmp_path), threading.Event(), []

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(Busy, match="process 17 on elsewhere"):
        RunLock(tmp_path).acquire(said.append)
    ended.set()
    heart.join()
    assert said == [f"{lock.NAME} is of process 17 on elsewhere; waiting for up to 4 s to see whether it lives"]
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    assert said[2:] == ["process 17 on elsewhere is gone; going on in its place"]
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 30
    while path.stat().st_mtime == 0:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.005)
    mine.release()


def test_a_writer_that_stood_still_notices_its_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "_TRY_S", 0.1)
    mine = RunLock(tmp_path)
    mine.acquire(print)
    mine.check()
    (tmp_path / lock.NAME).unlink()
    with pytest.raises(Busy, match=f"run {tmp_path} was taken over by another process while this process stood still"):
        mine.check()  # by one that has ended since
    theirs = _left_elsewhere(tmp_path)
    with pytest.raises(Busy, match="was taken over by process 17 on elsewhere while this process stood still"):
        mine.check()
    mine.release()
    assert "host=elsewhere" in theirs.read_text(), "the successor keeps it"


def test_a_run_saves_nothing_beside_its_successor(tiny: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, run = Metrics.held_out, tmp_path / "run"

    def stand_still(self: Metrics, step: int, loss: float) -> None:
        write(self, step, loss)
        (run / lock.NAME).unlink()
        _left_elsewhere(run)

    monkeypatch.setattr(Metrics, "held_out", stand_still)
    with pytest.raises(Halted, match=r"taken over by process 17 on elsewhere .* stood still; nothing more is written"):
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
