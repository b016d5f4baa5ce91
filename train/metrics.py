"""What a run tells: a progress line, ``metrics.jsonl``, TensorBoard events and, at the end, ``summary.json``."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxquant import terminal
from train import processes, sums
from train.config import TrainConfig
from train.runs import WARM_STEPS


def truncate_metrics(path: Path, step: int, say: Callable[[str], None] = print) -> None:
    """Drop the lines after ``step`` and those that are none, so that a resumed run writes no step twice.

    A last line cut short is what a killed run leaves; of other damage ``say`` is told, and the rest is kept.
    """
    if path.exists() and not path.is_file():
        target = path.with_name(f"{path.name}.damaged")
        path.rename(target)
        say(f"{path} is no file, moved to {target}")
    if not path.exists():
        return
    kept, damaged, last = [], 0, b""
    with path.open("rb") as lines:
        for last in lines:
            number = _step_of(last)
            damaged += number is None
            if number is not None and number <= step:
                kept.append(last)
    if last and not last.endswith(b"\n"):
        damaged -= _step_of(last) is None
        kept = [line if line.endswith(b"\n") else line + b"\n" for line in kept]
    if damaged:
        say(f"{path}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None where it is no line of numbers."""
    try:
        row = sums.read_signed(line)
        return row["step"] if type(row["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def note_changes(run_dir: Path, step: int, changes: dict[str, tuple[Any, Any]], say: Callable[[str], None]) -> None:
    """Write into metrics.jsonl which fields a run goes on with that are others than before ``step``."""
    if not changes:
        return
    path = run_dir / "metrics.jsonl"
    truncate_metrics(path, step, say)
    with path.open("a") as file:
        row = {"step": step, "changed": {name: list(pair) for name, pair in changes.items()}}
        file.write(sums.signed(row) + "\n")
    for name, (before, after) in changes.items():
        say(f"{name} is {after:g} from step {step + 1} on, it was {before:g}")


class _Output(Console):
    """Standard output that may be closed by whoever reads it; rich's own ends the program then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Metrics:
    """Writes the numbers of a run from ``first_step`` on, in process 0. A context manager.

    Attributes:
      is_unheard: whether standard output was closed.
    """

    def __init__(self, run_dir: Path, config: TrainConfig, first_step: int):
        self._config, self._first = config, first_step
        self._is_main = processes.is_main()
        self._file = self._events = None
        self._console = _Output(file=sys.stdout)
        self.is_unheard = False
        if self._is_main:
            path = run_dir / "metrics.jsonl"
            truncate_metrics(path, first_step, self.say)
            self._file = path.open("a")
        if self._is_main and config.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        self._progress = None
        if self._is_main and self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console)
            self._task = self._progress.add_task("", total=config.steps, completed=first_step)
        self.step_times: list[float] = []
        self.tokens_per_s: list[float] = []
        self._clock = time.perf_counter()

    def __enter__(self) -> Metrics:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        with self._heard():
            if self._progress:
                self._progress.stop()
        # What cannot be written has been told by what ended the run.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            if self._file:
                self._file.close()
            if self._events:
                self._events.close()

    def say(self, text: str) -> None:
        """Print a message without disturbing the progress line."""
        if not self._is_main or self.is_unheard:
            return
        with self._heard():
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # a pipe without a reader, a terminal that is gone
            self.is_unheard = True
            terminal.close_output()

    def pause(self) -> None:
        """Leave the time since the last step (a held-out loss, a checkpoint) out of the next step's time."""
        self._clock = time.perf_counter()

    def step(self, step: int, values: dict[str, float]) -> None:
        """Record one training step; its time is the time since the last call."""
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        speed = values["tokens"] / elapsed
        self.step_times.append(elapsed)
        self.tokens_per_s.append(speed)
        numbers = {name: values[name] for name in ("loss", "grad_norm", "learning_rate")}
        self._write(step, numbers | {"step_time_s": elapsed, "tokens_per_s": speed})
        if self._progress:
            self._progress.update(self._task, completed=step, description=_line(values["loss"], speed))
        elif step % self._config.log_every == 0 or step == self._first + 1 or step == self._config.steps:
            left = (self._config.steps - step) * statistics.median(self.step_times[-50:])
            eta = f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"
            self.say(f"step {step}/{self._config.steps}  {_line(values['loss'], speed)}  ETA {eta}")

    def held_out(self, step: int, loss: float) -> None:
        """Record a held-out loss."""
        self._write(step, {"held_out_loss": loss})
        self.say(f"step {step}/{self._config.steps}  held-out loss {loss:.4f}")

    def finite_check(self, step: int, seconds: float) -> None:
        """Record what it took to look whether a state is finite before it is saved."""
        self._write(step, {"finite_check_s": seconds})

    def health(self, step: int, values: dict[str, float]) -> None:
        """Record the worst of a step's health; all of it is in health.jsonl."""
        self._write(step, {f"health/{name}": value for name, value in values.items()})

    def timing(self) -> dict[str, float | None]:
        """Median step time and speed of this process, without the steps that compile; None before the first step."""
        if not self.step_times:
            return {"step_time_s": None, "tokens_per_s": None}
        skip = WARM_STEPS if len(self.step_times) > WARM_STEPS else 0
        return {
            "step_time_s": statistics.median(self.step_times[skip:]),
            "tokens_per_s": statistics.median(self.tokens_per_s[skip:]),
        }

    def _write(self, step: int, values: dict[str, float]) -> None:
        """Write a line; a number that is not finite is null there, as JSON has none, and itself in TensorBoard."""
        if not self._file:
            return
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(sums.signed({"step": step, **numbers}) + "\n")
        self._file.flush()
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


def _line(loss: float, speed: float) -> str:
    return f"loss {loss:.4f}  {speed:,.0f} tokens/s"
