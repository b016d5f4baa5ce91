"""What health costs a run: the time of a pass beside that of the steps around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.schemes import ROOT, UNQUANTIZED, Row, Scheme, tell
from benchmarks.steps import QUICKSTART
from benchmarks.timing import seconds, undisturbed
from jaxquant.config.loader import load_yaml
from jaxquant.core.typed import build as build_dataclass
from train.config import TrainConfig
from train.data import make_iterators
from train.health import build_health
from train.step import build

EVERY = 10


class _Runner:
    """A compiled step and a compiled health pass of one configuration."""

    def __init__(self, config: TrainConfig):
        data = make_iterators(config, config.batch_size)
        program = build(config, data.vocab_size)
        self._step, self._health = program.step, build_health(program)
        self._batch = jax.tree.map(np.asarray, dict(next(data.train)))
        self._state = program.init()
        self.first = self.one_pass()
        self.block(with_health=True)

    def block(self, with_health: bool) -> float:
        """Time ``EVERY`` steps, the first with a health pass before it, as the training loop has them."""
        began = time.perf_counter()
        found = self._health.measure(self._state, self._batch) if with_health else None
        for _ in range(EVERY):
            self._state, values = self._step(self._state, self._batch, jnp.bool_(True))
            jax.block_until_ready(values)
        jax.block_until_ready(found)
        return time.perf_counter() - began

    def one_pass(self) -> float:
        return seconds(lambda: self._health.measure(self._state, self._batch))


def measure_health(chosen: Sequence[Scheme], rounds: int, overrides: dict[str, Any] | None = None) -> list[Row]:
    """Time steps with health every 10 steps and without, in turns, in one run.

    ``share``: the time of a health pass over that of ten steps, median over rounds of one pass beside ten steps.
    ``slowdown``: ten steps with a pass over ten without, less 1, median over rounds; on a busy machine its noise is
    larger than what it measures. ``compile s``: the first pass.
    """
    rows = []
    for scheme in (UNQUANTIZED, *chosen):
        fields = load_yaml(str(ROOT / QUICKSTART)) | scheme.config | {"run_dir": "unused"} | (overrides or {})
        rows.append({**scheme.cells, **_measure(_Runner(build_dataclass(TrainConfig, fields)), rounds)})
        tell(f"measured {scheme.string or 'none'} {scheme.backend}")
    return rows


def _measure(runner: _Runner, rounds: int) -> dict[str, Any]:
    plain, passes, ratios = [], [], []
    with undisturbed():
        for _ in range(rounds):
            without, alone, with_it = runner.block(False), runner.one_pass(), runner.block(True)
            plain.append(without)
            passes.append(alone)
            ratios.append(with_it / without - 1)
    shares = [one / ten for one, ten in zip(passes, plain, strict=True)]
    return {
        "step ms": round(1000 * statistics.median(plain) / EVERY, 1),
        "health pass ms": round(1000 * statistics.median(passes), 1),
        "share": f"{statistics.median(shares):.2%}",
        "slowdown": f"{statistics.median(ratios):.2%}",
        "compile s": round(runner.first, 1),
    }
