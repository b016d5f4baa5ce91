"""Ways in which a run ends: closed output, hang-ups, full disks, deleted folders, unusual data."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from jaxquant.cli import main
from jaxquant.core.typed import to_mapping
from jaxquant.training import sums
from jaxquant.training.config import TrainConfig
from jaxquant.training.loop import Halted, StopRequest
from jaxquant.training.metrics import Metrics
from jaxquant.training.sources import open_source
from tests.train.conftest import CI_CONFIG, STEPS, read_losses, train


class Closing(io.StringIO):
    """Standard output whose reader closes it after some lines."""

    def __init__(self, lines: int):
        super().__init__()
        self._left = lines

    def write(self, text: str) -> int:
        if self._left <= 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._left -= text.count("\n")
        return super().write(text)


def test_a_closed_output_saves(copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    """A run saves if its output is closed, as with `python -m train ... | head`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closing(2))
        train(tiny, copy, steps=STEPS + 9, checkpoint_every=0, log_every=1)
    reached = max(read_losses(copy))
    assert STEPS < reached < STEPS + 9
    assert (copy / f"checkpoints/{reached}").is_dir()


def test_a_hang_up_is_heard_once_and_not_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with StopRequest() as stop:
            for _ in range(2):  # a shell and a terminal both send SIGHUP
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop.signal == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_full_disk_is_told_in_a_sentence_with_what_is_kept(
    copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    fields = to_mapping(tiny) | {"run_dir": str(copy), "steps": STEPS + 3}
    words = ["train", str(CI_CONFIG), *(f"{name}={json.dumps(value)}" for name, value in fields.items())]

    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(sums, "write_checkpoint_sums", fail)
        assert main(words) == 1
    message = capfd.readouterr().err.strip()
    assert message.splitlines()[-1].startswith(f"error: run {copy} cannot be written (")
    kept = f"No space left on device); checkpoint {STEPS} is kept; make the folder writable, with free space"
    assert message.endswith(f"{kept}, and run the same command again to resume from there")
    assert "Traceback" not in message
    train(tiny, copy, steps=STEPS + 3)
    assert list(read_losses(copy)) == list(range(1, STEPS + 4))


def test_a_folder_that_is_gone_is_told(copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    write = Metrics.record_held_out

    def vanish(self: Metrics, step: int, loss: float) -> None:
        write(self, step, loss)
        shutil.rmtree(copy)

    monkeypatch.setattr(Metrics, "record_held_out", vanish)
    with pytest.raises(Halted, match=r"run .* cannot be written \(.* is gone\); no checkpoint is kept"):
        train(tiny, copy, steps=STEPS + 1)


def test_data_that_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", tmp_path):
        with pytest.raises(ValueError, match=r"pipe.jsonl' is a pipe; pass the path of a regular file"):
            list(open_source("jsonl", str(path), "text").documents())
    with pytest.raises(ValueError, match=r"dataset_path '/dev/zero' is a device; pass the path of a regular file"):
        open_source("jsonl", "/dev/zero", "text")
