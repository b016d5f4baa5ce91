"""Held-out losses of the quickstart model by scheme and seed; each finished run is appended as a line of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jaxquant.bench.schemes import QUICKSTART, Row, print_progress
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build
from jaxquant.training.config import TrainConfig
from jaxquant.training.loop import prepare
from jaxquant.training.report import load_run

_CURVE = 10  # steps between two recorded training losses


@dataclasses.dataclass(frozen=True)
class Trial:
    """A scheme to train.

    Attributes:
      base: scheme to compare with, by seed.
      fields: fields of the run's configuration.
      seeds: number of runs.
    """

    base: str
    fields: Row
    seeds: int = 3


def compare(trials: Mapping[str, Trial], record: Path, steps: int, only: Sequence[str] = ()) -> list[Row]:
    """Compare the held-out loss of the quickstart model under each scheme with the loss under the scheme's base.

    A seed determines the initial parameters, the order of the data and the noise; each run is compared with the run of
    its base with the same seed. Runs in the record are not trained again, and an interrupted run resumes from its
    checkpoint. Figures after ± are the standard error of the mean over seeds.

    Args:
      trials: trials by scheme.
      record: file of JSON lines, one per run.
      steps: steps of each run.
      only: schemes to train; empty selects all. The table has every run of the record.

    Raises:
      ValueError: there is no pair of a run and a run of its base with the same seed.
    """
    losses = {key: line["held_out_loss"] for key, line in train_missing(trials, record, steps, only).items()}
    rows = []
    for name, trial in trials.items():
        seeds = [n for n in range(trial.seeds) if (name, n) in losses and (trial.base, n) in losses]
        pairs = [(losses[name, n], losses[trial.base, n]) for n in seeds]
        if pairs:
            rows.append(
                {
                    "scheme": name,
                    "held-out loss": " / ".join(f"{loss:.4f}" for loss, _ in pairs),
                    "difference": mean([loss - base for loss, base in pairs], "+.4f"),
                    "excess %": mean([100 * (loss / base - 1) for loss, base in pairs], "+.2f"),
                }
            )
    if not rows:
        raise ValueError(f"{record} has no scheme and base scheme with the same seed; train {trials[only[0]].base!r}")
    return rows


def train_missing(
    trials: Mapping[str, Trial], record: Path, steps: int, only: Sequence[str]
) -> dict[tuple[str, int], Row]:
    """Train the runs that are not in the record; return its lines by scheme and seed. Arguments as for ``compare``."""
    lines = read_record(record, steps)
    wanted = [(seed, name) for name, trial in trials.items() for seed in range(trial.seeds)]
    for seed, name in sorted(wanted, key=lambda each: each[0]):  # all schemes of one seed, then of the next
        if (name, seed) in lines or (only and name not in only):
            continue
        lines[name, seed] = train_run(name, trials[name].fields, seed, steps, Path("runs") / record.stem)
        with record.open("a") as file:
            file.write(json.dumps(lines[name, seed]) + "\n")
    return lines


def read_record(record: Path, steps: int) -> dict[tuple[str, int], Row]:
    """Return the lines of runs with this number of steps, by scheme and seed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    return {(line["scheme"], line["seed"]): line for line in lines if line["steps"] == steps}


def train_run(name: str, fields: Row, seed: int, steps: int, runs: Path) -> Row:
    """Train the quickstart model with some fields of its config changed; return the line of the record."""
    print_progress(f"training {name}, seed {seed}")
    folder = runs / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}-{steps}"
    own = {"run_dir": str(folder), "steps": steps, "seed": seed, "data_seed": seed}
    quickstart = load_yaml(QUICKSTART) | {"health_every": 0, "tensorboard": False}
    config: TrainConfig = build(TrainConfig, quickstart | fields | own)
    start = time.perf_counter()
    prepare(config, print_progress)()
    seconds = time.perf_counter() - start
    jax.clear_caches()
    run = load_run(folder, folder.name)
    if not run.summary:
        raise ValueError(
            f"{name}, seed {seed} was stopped after step {run.last_step}; run the same command again to resume"
        )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "scheme": name,
        "config": {key: str(value) for key, value in fields.items()},
        "seed": seed,
        "steps": steps,
        "held_out_loss": run.final_loss,
        "held_out_losses": run.held_out,
        "train_loss": {step: round(loss, 5) for step, loss in run.train.items() if step % _CURVE == 0 or step == 1},
        "seconds": round(seconds, 1),
        "commit": commit.stdout.strip(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def mean(values: Sequence[float], form: str) -> str:
    """Return the mean of some numbers ± its standard error as text; a single number has no error."""
    written = format(statistics.mean(values), form)
    if len(values) < 2:
        return written
    return f"{written} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form.lstrip('+'))}"
