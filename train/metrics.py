"""What a run tells: a progress line, ``metrics.jsonl``, TensorBoard events and, at the end, ``summary.json``."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train import processes
from train.config import TrainConfig
from train.runs import WARM_STEPS


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines after ``step``, and a last line cut short, so that a resumed run writes no step twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.replace(path)


class Metrics:
    """Writes the numbers of a run from ``first_step`` on, in process 0. A context manager."""

    def __init__(self, run_dir: Path, config: TrainConfig, first_step: int):
        self._config, self._first = config, first_step
        self._is_main = processes.is_main()
        self._file = self._events = None
        if self._is_main:
            path = run_dir / "metrics.jsonl"
            truncate_metrics(path, first_step)
            self._file = path.open("a")
        if self._is_main and config.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        self._console = Console(file=sys.stdout)
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
        if self._progress:
            self._progress.stop()
        if self._events:
            self._events.close()
        if self._file:
            self._file.close()

    def say(self, text: str) -> None:
        """Print a message without disturbing the progress line."""
        if not self._is_main:
            return
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

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
        self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
        self._file.flush()
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


def _line(loss: float, speed: float) -> str:
    return f"loss {loss:.4f}  {speed:,.0f} tokens/s"
