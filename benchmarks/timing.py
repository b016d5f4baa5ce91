"""Time what is compared in turns, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

PROGRAMS = ("fwd", "dlhs", "drhs", "bwd")


class Measured(Protocol):
    """One of what is compared; ``measure`` times it once and keeps the time."""

    def measure(self) -> None: ...


TURN = "JAXQUANT_BENCH_TURN"
"""Environment variable: a path; PATH.ready says that a process has compiled, PATH.go that it may time."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Python from collecting garbage while it is timed, and wait for its turn among ``scripts/gpu.sh``'s."""
    if turn := os.environ.get(TURN):
        Path(f"{turn}.ready").touch()
        while not Path(f"{turn}.go").exists():
            time.sleep(0.05)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_in_turns(each: Sequence[Measured], rounds: int) -> None:
    """Measure each once a round."""
    with undisturbed():
        for _ in range(rounds):
            for one in each:
                one.measure()


def seconds(run: Callable[[], Any], calls: int = 1) -> float:
    """Time a call until its arrays are there.

    Args:
      run: what is called.
      calls: of it, one behind the other, so that a device has the next one while the host makes the one after; the
        time is one call's share.
    """
    began = time.perf_counter()
    for _ in range(calls - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - began) / calls


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a time over another's in that round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


class MatmulPrograms:
    """The programs of one contender, all or some of ``PROGRAMS``, and their times by round."""

    def __init__(self, calls: dict[str, Callable[[], Any]]):
        self._calls = calls
        self.times: dict[str, list[float]] = {name: [] for name in calls}
        for name in calls:  # compile, and once more so that nothing is first
            calls[name]()
            seconds(calls[name])

    def measure(self) -> None:
        for name in self.times:
            self.times[name].append(seconds(self._calls[name]))

    def total(self) -> list[float]:
        return [fwd + bwd for fwd, bwd in zip(self.times["fwd"], self.times["bwd"], strict=True)]
