"""However a run has to end, it ends in order: closed output, hang-ups, full disks, folders that are gone, odd data."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from jaxquant.core.typed import to_mapping
from tests.train.conftest import ROOT, STEPS, read_losses, train
from train import sums
from train.__main__ import main
from train.config import TrainConfig
from train.loop import Halted, StopRequest
from train.metrics import Metrics
from train.sources import open_source


class Closing(io.StringIO):
    """Standard output whose reader goes after some lines."""

    def __init__(self, lines: int):
        super().__init__()
        self._left = lines

    def write(self, text: str) -> int:
        if self._left <= 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._left -= text.count("\n")
        return super().write(text)


def test_a_closed_output_saves(copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    """`python -m train ... | head`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closing(2))
        train(tiny, copy, steps=STEPS + 9, checkpoint_every=0, log_every=1)
    reached = max(read_losses(copy))
    assert STEPS < reached < STEPS + 9
    assert (copy / f"checkpoints/{reached}").is_dir()


def test_the_time_that_is_left_counts_no_step_that_compiles(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setattr("train.metrics.time.perf_counter", iter([0, 100, 190, 192, 194]).__next__)
    values = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": 8.0}
    with Metrics(tmp_path, dataclasses.replace(tiny, tensorboard=False, log_every=1, steps=34), 0) as metrics:
        for step in range(1, 5):
            metrics.step(step, values)
    ends = [line.partition("tokens/s")[2] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["", "", "  ETA 0:01:02", "  ETA 0:01:00"]


def test_a_hang_up_is_heard_once_and_not_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with StopRequest() as stop:
            for _ in range(2):  # a shell and a terminal both send one
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
    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    words = [
        f"{name}={json.dumps(value)}" for name, value in to_mapping(tiny).items() if name not in ("run_dir", "steps")
    ]
    words = [str(ROOT / "configs/models/ci.yml"), *words, f"run_dir={copy}", f"steps={STEPS + 3}"]
    with monkeypatch.context() as patch:
        patch.setattr(sums, "write_checkpoint_sums", fail)
        assert main(words) == 1
    message = capfd.readouterr().err.strip()
    assert message.splitlines()[-1].startswith(f"error: run {copy} cannot be written (")
    assert message.endswith(
        f"No space left on device); checkpoint {STEPS} is kept; make it writable, with space, "
        "and the same command goes on from there"
    )
    assert "Traceback" not in message
    train(tiny, copy, steps=STEPS + 3)
    assert list(read_losses(copy)) == list(range(1, STEPS + 4))


def test_a_folder_that_is_gone_is_told(copy: Path, tiny: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    write = Metrics.held_out

    def vanish(self: Metrics, step: int, loss: float) -> None:
        write(self, step, loss)
        shutil.rmtree(copy)

    monkeypatch.setattr(Metrics, "held_out", vanish)
    with pytest.raises(Halted, match=r"run .* cannot be written \(.* is gone\); no checkpoint is kept"):
        train(tiny, copy, steps=STEPS + 1)


@pytest.mark.parametrize("dataset", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("where", ["itself", "in a folder"])
def test_data_that_is_no_file_is_refused(dataset: str, where: str, tmp_path: Path):
    pipe = tmp_path / f"pipe.{dataset}"
    os.mkfifo(pipe)
    path = pipe if where == "itself" else tmp_path
    with pytest.raises(ValueError, match=rf"pipe.{dataset}' is a pipe, not a file"):
        list(open_source(dataset, str(path), "text").documents())
    with pytest.raises(ValueError, match=r"dataset_path '/dev/zero' is a device, not a file"):
        open_source(dataset, "/dev/zero", "text")
