"""Output of a run: progress lines, ``metrics.jsonl``, ``health.jsonl`` and TensorBoard events."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxquant import terminal
from jaxquant.export.sums import write_atomically
from jaxquant.training import processes
from jaxquant.training.config import TrainConfig

WARM_STEPS = 2
"""Number of first steps that the median step time leaves out, because these steps include compilation."""


def warm_median(times: Sequence[float]) -> float | None:
    """Return the median over steps after the first ``WARM_STEPS``, or over all if there are no more; None if empty."""
    return statistics.median(times[WARM_STEPS:] or times) if times else None


def truncate_metrics(path: Path, step: int, say: Callable[[str], None] = print) -> None:
    """Delete the lines after ``step`` and invalid lines, so that a resumed run writes no step twice.

    Config changes that took effect in the next step are deleted too, because the resumed run records its own changes. A
    killed run leaves an incomplete last line. Other damage is reported with ``say``; the other lines are kept.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    lines = [(line, _step_of(line)) for line in data.splitlines()]
    is_cut = not data.endswith(b"\n") and bool(lines) and lines[-1][1] is None
    damaged = sum(number is None for _, number in lines) - is_cut
    kept = [line + b"\n" for line, number in lines if number is not None and number <= step]
    if damaged:
        say(f"{path}: removed {damaged} damaged line{'s' if damaged > 1 else ''}")
    write_atomically(path, b"".join(kept))


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, or the next step if the line is a config change; None if the line is invalid."""
    try:
        row = json.loads(line)
        return row["step"] + ("changed" in row) if type(row["step"]) is int else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Metrics:
    """Writer of a run's metrics from ``first_step`` on, in process 0; a context manager.

    Attributes:
      is_output_closed: whether stdout was closed.
    """

    def __init__(self, run_dir: Path, config: TrainConfig, first_step: int):
        self._config, self._first = config, first_step
        self._is_main = processes.is_main()
        self._files: dict[str, Any] = {}
        self._events = None
        self.is_output_closed = False
        for name in ("metrics.jsonl", "health.jsonl") if self._is_main else ():
            truncate_metrics(run_dir / name, first_step, self.say)
            if name == "metrics.jsonl" or config.health_every:
                self._files[name] = (run_dir / name).open("a")
        if self._is_main and config.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        self.step_times: list[float] = []
        self.tokens_per_s: list[float] = []
        self._clock = time.perf_counter()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The exception that ended the run already reported write errors.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            for file in (*self._files.values(), *([self._events] if self._events else [])):
                file.close()

    def say(self, text: str) -> None:
        """Print a message. If stdout is closed, set ``is_output_closed`` instead of raising."""
        if not self._is_main or self.is_output_closed:
            return
        try:
            print(text, flush=True)
        except OSError:  # a pipe without a reader, or a closed terminal
            self.is_output_closed = True
            terminal.close_output()

    def pause(self) -> None:
        """Exclude the time since the last step, for a held-out loss or a checkpoint, from the next step's time."""
        self._clock = time.perf_counter()

    def record_step(self, step: int, values: dict[str, float]) -> None:
        """Record one training step; its time is the time since the last call."""
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        speed = values["tokens"] / elapsed
        self.step_times.append(elapsed)
        self.tokens_per_s.append(speed)
        numbers = {name: values[name] for name in ("loss", "grad_norm", "learning_rate")}
        self._write(step, numbers | {"step_time_s": elapsed, "tokens_per_s": speed})
        if step % self._config.log_every == 0 or step in (self._first + 1, self._config.steps):
            line = f"step {step}/{self._config.steps}  loss {values['loss']:.4f}  {speed:,.0f} tokens/s"
            if warm := self.step_times[WARM_STEPS:]:
                left = (self._config.steps - step) * statistics.median(warm[-50:])
                line += f"  ETA {datetime.timedelta(seconds=int(left))}"
            self.say(line)

    def record_held_out(self, step: int, loss: float) -> None:
        """Record a held-out loss."""
        self._write(step, {"held_out_loss": loss})
        self.say(f"step {step}/{self._config.steps}  held-out loss {loss:.4f}")

    def record_changes(self, step: int, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """Record the config fields of a resumed run whose values differ from the values up to ``step``."""
        if changes:
            self._line("metrics.jsonl", {"step": step, "changed": {name: list(pair) for name, pair in changes.items()}})
        for name, (before, after) in changes.items():
            self.say(f"{name} is {after:g} from step {step + 1} on (before: {before:g})")

    def record_health(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        """Record a row of health.jsonl, and the worst values of the row in metrics.jsonl."""
        self._line("health.jsonl", row)
        self._write(row["step"], {f"health/{name}": value for name, value in values.items()})

    def medians(self) -> dict[str, float | None]:
        """Return the median step time and speed of this process, without steps that compile; the values can be None."""
        return {"step_time_s": warm_median(self.step_times), "tokens_per_s": warm_median(self.tokens_per_s)}

    def _write(self, step: int, values: dict[str, float]) -> None:
        """Write values of a step. Non-finite numbers are null in JSON and unchanged in TensorBoard."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._line("metrics.jsonl", {"step": step, **finite})
        if self._events:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def _line(self, name: str, row: Mapping[str, Any]) -> None:
        if self._is_main:
            self._files[name].write(json.dumps(row, allow_nan=False) + "\n")
            self._files[name].flush()
