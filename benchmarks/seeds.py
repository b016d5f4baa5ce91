"""seeds: runs of the quickstart model by scheme and seed, each a line of JSON that is written when it ends."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import jax

from benchmarks.schemes import ROOT, Row, tell
from benchmarks.steps import QUICKSTART
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build
from train.config import TrainConfig
from train.loop import prepare
from train.report import load_run

Trials = Mapping[str, tuple[int, Row]]
"""Scheme -> number of seeds, fields of the run's configuration."""
_CURVE = 10  # steps between two training losses of a line


def compared(
    table: Callable[[dict[tuple[str, int], Row]], list[Row]],
    trials: Trials,
    record: Path,
    runs: Path,
    steps: int,
    only: Collection[str],
    seeds: int | None,
) -> list[Row]:
    """Train what the record lacks, and return the rows of a table of it; the rest of the arguments as there.

    Args:
      table: of the record's lines. It leaves out runs that have no other one to be compared with.

    Raises:
      ValueError: the table has no row.
    """
    if rows := table(train_missing(trials, record, runs, steps, only, seeds)):
        return rows
    raise ValueError(
        f"{record} has {', '.join(only)} now, and no run of the same seeds to compare with; train that too: of "
        f"{', '.join(trials)}, or all, without --only"
    )


def train_missing(
    trials: Trials, record: Path, runs: Path, steps: int, only: Collection[str], seeds: int | None
) -> dict[tuple[str, int], Row]:
    """Train what the record lacks, and return its lines by scheme and seed.

    Args:
      trials: what there is.
      record: JSON lines, one a run.
      runs: folder of the runs; one that was interrupted goes on from its checkpoint.
      steps: of each run.
      only: schemes to train, none for all.
      seeds: how many of each, None for those of ``trials``.
    """
    lines = read_record(record, steps)
    wanted = [(seed, name) for name, (count, _) in trials.items() for seed in range(seeds or count)]
    for seed, name in sorted(wanted, key=lambda each: each[0]):  # all schemes of a seed, then those of the next
        if (name, seed) in lines or (only and name not in only):
            continue
        lines[name, seed] = train_run(name, trials[name][1], seed, steps, runs)
        with record.open("a") as file:
            file.write(json.dumps(lines[name, seed]) + "\n")
    return lines


def read_record(record: Path, steps: int) -> dict[tuple[str, int], Row]:
    """Read the lines of runs of so many steps, by scheme and seed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    return {(line["scheme"], line["seed"]): line for line in lines if line["steps"] == steps}


def train_run(name: str, fields: Row, seed: int, steps: int, runs: Path) -> Row:
    """Train the quickstart model with some fields of its config changed; return the line of the record."""
    tell(f"training {name}, seed {seed}")
    folder = runs / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}-{steps}"
    own = {"run_dir": str(folder), "steps": steps, "seed": seed, "data_seed": seed}
    quickstart = load_yaml(str(ROOT / QUICKSTART)) | {"health_every": 0, "tensorboard": False}
    config: TrainConfig = build(TrainConfig, quickstart | fields | own)
    start = time.perf_counter()
    prepare(config, tell)()
    seconds = time.perf_counter() - start
    jax.clear_caches()
    run = load_run(folder, folder.name)
    if not run.summary:
        raise ValueError(
            f"{name}, seed {seed} was stopped after step {run.last_step}; the same command goes on from there"
        )
    parameters = run.summary["parameter_bytes"] // jax.numpy.dtype(config.weight_dtype).itemsize
    tokens = steps * config.batch_size * config.sequence_length
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "scheme": name,
        "config": {key: str(value) for key, value in fields.items()},
        "seed": seed,
        "steps": steps,
        "held_out_loss": run.final_loss,
        "held_out_losses": run.held_out,
        "train_loss": {step: round(loss, 5) for step, loss in run.train.items() if step % _CURVE == 0 or step == 1},
        "seconds": round(seconds, 1),
        "parameters": parameters,
        "tokens_per_parameter": round(tokens / parameters, 3),
        "commit": commit.stdout.strip(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def mean(values: Sequence[float], form: str) -> str:
    """Write the mean of some numbers ± its standard error, which one number has not."""
    written = format(statistics.mean(values), form)
    if len(values) < 2:
        return written
    return f"{written} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form.lstrip('+'))}"
