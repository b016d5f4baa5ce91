"""A run folder has one writer: the second is refused by name and host, and a dead one's place is taken."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import ROOT
from train import lock
from train.config import TrainConfig
from train.lock import Busy, RunLock
from train.loop import prepare

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
        who = f"process {process.pid} on {socket.gethostname()}"
        with pytest.raises(Busy, match=f"is being written by {who}; wait for it, stop it, or choose another run_dir"):
            RunLock(tmp_path).acquire(print)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    said: list[str] = []
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    mine.acquire(said.append)
    assert said == [f"{who} has ended without a word; going on in its place"]
    with pytest.raises(Busy, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire(print)
    mine.release()
    RunLock(tmp_path).acquire(said.append)
    assert len(said) == 1, "a folder that was let go has no dead writer"


def _left_by(run: Path, pid: int, host: str, seconds_ago: float) -> None:
    (run / lock.NAME).write_text(json.dumps({"pid": pid, "host": host}))
    then = time.time() - seconds_ago
    os.utime(run / lock.NAME, (then, then))


def test_a_writer_on_another_host_is_believed_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Locks of some shared file systems do not reach from host to host."""
    _left_by(tmp_path, 17, "elsewhere", lock.STALE_S / 2)
    for _ in range(2):  # asking does not keep it alive
        with pytest.raises(Busy, match="process 17 on elsewhere"):
            RunLock(tmp_path).acquire(print)
        assert time.time() - (tmp_path / lock.NAME).stat().st_mtime > lock.STALE_S / 3
    _left_by(tmp_path, 17, "elsewhere", 2 * lock.STALE_S)
    said: list[str] = []
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    mine = RunLock(tmp_path)
    mine.acquire(said.append)
    assert said == ["process 17 on elsewhere has ended without a word; going on in its place"]
    os.utime(tmp_path / lock.NAME, (0, 0))
    deadline = time.monotonic() + 10
    while (tmp_path / lock.NAME).stat().st_mtime == 0:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.005)
    mine.release()


def test_where_files_have_no_locks_the_heartbeat_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    mine = RunLock(tmp_path)
    mine.acquire(print)
    with pytest.raises(Busy, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire(print)
    mine.release()
    _left_by(tmp_path, 17, socket.gethostname(), 2 * lock.STALE_S)
    said: list[str] = []
    RunLock(tmp_path).acquire(said.append)
    assert said == [f"process 17 on {socket.gethostname()} has ended without a word; going on in its place"]


def test_a_lock_file_of_rubbish_is_nobodys(tmp_path: Path):
    (tmp_path / lock.NAME).write_text("[" * 3000)
    RunLock(tmp_path).acquire(print)


def test_training_is_refused_before_anything_is_built(tiny: TrainConfig, tmp_path: Path):
    holder = RunLock(tmp_path)
    holder.acquire(print)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(Busy, match=f"run {tmp_path} is being written by process {os.getpid()}"):
        prepare(dataclasses.replace(tiny, run_dir=str(tmp_path)), print)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
