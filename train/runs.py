"""Read the folders that training runs leave, and set them against each other."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxquant.config.loader import load_yaml
from jaxquant.config.quant_config import QuantConfig
from train import sums

WARM_STEPS = 2
"""First steps of a process that a median step time leaves out, because they compile."""

SMOOTHING = 0.9
"""Weight of the past in a smoothed training loss."""


_HEALTH = ("step", "sequences", "layers")  # what a line of health.jsonl has at least


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run wrote down.

    Attributes:
      name: folder name, or the path where two runs share one.
      config: its ``config.yml``.
      train, held_out: loss by step, in nats per token.
      step_time_s: median of a step in seconds; None where no step was timed.
      summary: its ``summary.json``; {} for a run that has not finished.
      coverage: its ``coverage.json``; {} for a run that wrote none.
      health: the lines of its ``health.jsonl``; none for a run that did not measure health.
      note: what its newest checkpoint says otherwise than ``config.yml``; "" for nothing.
    """

    name: str
    config: dict[str, Any]
    train: dict[int, float]
    held_out: dict[int, float]
    step_time_s: float | None
    summary: dict[str, Any]
    coverage: dict[str, Any] = dataclasses.field(default_factory=dict)
    health: tuple[dict[str, Any], ...] = ()
    note: str = ""

    @property
    def quantization(self) -> str:
        return self.config.get("quantization", "")

    @property
    def backend(self) -> str:
        return self.summary.get("backend") or ""

    @property
    def is_finished(self) -> bool:
        return bool(self.summary)

    @property
    def last_step(self) -> int:
        return max(self.train)

    @property
    def final_loss(self) -> float | None:
        """The last held-out loss; None before the first."""
        return self.held_out[max(self.held_out)] if self.held_out else None

    def gap(self, baseline: Run | None) -> float | None:
        """Relative excess of the last held-out loss over the baseline's at the same step; None where that has none."""
        if baseline is None or not self.held_out:
            return None
        reference = baseline.held_out.get(max(self.held_out))
        return None if reference is None else self.held_out[max(self.held_out)] / reference - 1

    def time_ratio(self, baseline: Run | None) -> float | None:
        """Step time over the baseline's."""
        if baseline is None or not self.step_time_s or not baseline.step_time_s:
            return None
        return self.step_time_s / baseline.step_time_s

    def smoothed(self) -> dict[int, float]:
        """Training loss as an exponential mean without start-up bias; non-finite losses are passed over."""
        total = weight = 0.0
        means = {}
        for step, loss in sorted(self.train.items()):
            if math.isfinite(loss):
                total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
                means[step] = total / weight
        return means


def warm_median(times: Sequence[float]) -> float | None:
    """Return the median of what was measured of steps, without those that compile; None where there is none."""
    return statistics.median(times[WARM_STEPS:] or times) if times else None


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read run folders, in order.

    Raises:
      ValueError: a folder given twice, without metrics, or with a file that is damaged.
      FileNotFoundError: a folder that does not exist.
    """
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) != len(paths):
        raise ValueError(f"run folders {', '.join(map(str, paths))} name one folder twice; name each once")
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names)
    return [load_run(path, name if unique else str(path)) for path, name in zip(paths, names, strict=True)]


def load_run(folder: Path, name: str) -> Run:
    """Read one run folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"run folder {folder} does not exist; give a folder that `python -m train` wrote")
    for file in ("metrics.jsonl", "config.yml"):
        if not (folder / file).is_file():
            raise ValueError(f"run folder {folder} has no {file}; give a folder that `python -m train` wrote")
    train, held_out, times = _read_metrics(folder / "metrics.jsonl")
    if not train:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no training step; let the run make at least one")
    summary, coverage = (_read_json(folder / f"{name}.json") for name in ("summary", "coverage"))
    median = summary.get("step_time_s") or warm_median(times)
    health: list[dict[str, Any]] = []
    if (folder / "health.jsonl").is_file():
        keep = lambda row: health.append(row | {name: row[name] for name in _HEALTH})  # noqa: E731
        _read_lines(folder / "health.jsonl", "health", keep)
    fields = load_yaml(folder / "config.yml")
    steps = [int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal()]
    note = sums.contradiction(folder, max(steps), fields) if steps else ""
    return Run(name, fields, train, held_out, median, summary, coverage, tuple(health), note)


def _read_metrics(path: Path) -> tuple[dict[int, float], dict[int, float], list[float]]:
    train, held_out, times = {}, {}, []

    def take(row: dict[str, Any]) -> None:
        step = int(row["step"])
        for name, losses in (("loss", train), ("held_out_loss", held_out)):
            if name in row:  # null is a number that was not finite
                losses[step] = math.nan if row[name] is None else float(row[name])
        if row.get("step_time_s") is not None:
            times.append(float(row["step_time_s"]))

    _read_lines(path, "metrics", take)
    return train, held_out, times


def _read_lines(path: Path, kind: str, take: Callable[[dict[str, Any]], object]) -> None:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if line.strip():
                take(sums.read_signed(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            shown = repr(line[:60].decode(errors="backslashreplace"))
            raise ValueError(
                f"{path}, line {number} is not a {kind} line: {shown}; resume the run, or delete that line"
            ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = sums.read_signed(path.read_bytes(), indent=1)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not what was written ({error}); start the run again, which writes it anew"
        ) from None
    if not isinstance(summary, dict):
        raise ValueError(f"{path} holds {type(summary).__name__}, not a summary; start the run again")
    return summary


def find_baseline(runs: Iterable[Run]) -> Run | None:
    """Find the unquantized run; None where there is none.

    Raises:
      ValueError: there are two.
    """
    plain = [run for run in runs if not run.quantization and not run.config.get("rules")]
    if len(plain) > 1:
        raise ValueError(
            f"runs {plain[0].name} and {plain[1].name} are both unquantized; give one to measure gaps from"
        )
    return plain[0] if plain else None


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Return the configuration fields, quantization and the run's folder apart, in which runs differ."""
    expected = {field.name for field in dataclasses.fields(QuantConfig)} | {"run_dir"}
    names = sorted({name for run in runs for name in run.config} - expected)
    return [name for name in names if any(run.config.get(name) != runs[0].config.get(name) for run in runs)]
