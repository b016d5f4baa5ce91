"""Step times and held-out losses of the quickstart model under every scheme."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.bench.schemes import ROOT, UNQUANTIZED, Row, Scheme, tell
from jaxquant.bench.timing import median_ratio, seconds, undisturbed
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build as build_dataclass
from jaxquant.training.config import TrainConfig
from jaxquant.training.data import make_iterators
from jaxquant.training.report import comparison_rows, load_runs
from jaxquant.training.step import build

QUICKSTART = "configs/quickstart.yml"


class _Stepper:
    """A compiled training step of the quickstart model and its state."""

    def __init__(self, scheme: Scheme, quickstart: dict[str, Any]):
        config = build_dataclass(TrainConfig, quickstart | scheme.config | {"run_dir": "unused"})
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        self.scheme, self._step = scheme, program.step
        self._batch = jax.tree.map(np.asarray, dict(next(data.train)))
        self._state = program.init()
        self.times: list[float] = []
        self.first = seconds(self.run)
        seconds(self.run)

    def run(self) -> Any:
        self._state, values = self._step(self._state, self._batch, jnp.bool_(True))
        return self._state, values


def measure_steps(chosen: Sequence[Scheme], rounds: int) -> list[Row]:
    """Time training steps, one step per scheme and round, so that a slow period of the machine affects all equally.

    The ratio is the median over rounds of a scheme's time over the unquantized time in the same round.
    """
    quickstart = load_yaml(str(ROOT / QUICKSTART))
    steppers = []
    for scheme in (UNQUANTIZED, *chosen):
        steppers.append(_Stepper(scheme, quickstart))
        tell(f"compiled {scheme.string or 'none'} {scheme.backend} in {steppers[-1].first:.1f} s")
    with undisturbed():
        for stepper in rounds * steppers:
            stepper.times.append(seconds(stepper.run))
    base = steppers[0].times
    return [
        {
            **stepper.scheme.cells,
            "step ms": round(1000 * statistics.median(stepper.times), 1),
            "ratio": round(median_ratio(stepper.times, base), 3),
            "first step s": round(stepper.first, 1),
        }
        for stepper in steppers
    ]


def measure_losses(chosen: Sequence[Scheme], steps: int) -> list[Row]:
    """Train the quickstart model under every scheme, each in a subprocess, and compare held-out losses.

    Runs that are already in `runs/losses` are not trained again.
    """
    runs = [_train(scheme, steps) for scheme in (UNQUANTIZED, *chosen)]
    loaded = load_runs(runs)
    if short := [run.name for run in loaded if run.last_step != steps]:
        raise ValueError(f"runs {', '.join(short)} in {runs[0].parent} have another number of steps; remove them")
    return [
        {**scheme.cells, **{name: row[name] for name in ("steps", "held-out loss", "gap")}}
        for scheme, row in zip((UNQUANTIZED, *chosen), comparison_rows(loaded), strict=True)
    ]


def _train(scheme: Scheme, steps: int) -> Path:
    """Train the quickstart model under a scheme, unless it is already trained; return the run's folder."""
    run = ROOT / "runs" / "losses" / "-".join(filter(None, (scheme.string or "none", scheme.backend)))
    if (run / "summary.json").is_file():
        return run
    tell(f"training {run.name}")
    words = [f"{name}={value}" for name, value in scheme.config.items()]
    command = [sys.executable, "-m", "jaxquant.training", QUICKSTART, *words, f"steps={steps}", f"run_dir={run}"]
    done = subprocess.run([*command, "tensorboard=false"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"training {run.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return run
