"""Time what is compared in turns, so that a slow moment of the machine hits all alike."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

PROGRAMS = ("fwd", "dlhs", "drhs", "bwd")


class Measured(Protocol):
    """One of what is compared; ``measure`` times it once and keeps the time."""

    def measure(self) -> None: ...


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Python from collecting garbage in the middle of what is timed."""
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


def seconds(run: Callable[[], Any]) -> float:
    """Time a call until its arrays are there."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a time over another's in that round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


class MatmulPrograms:
    """The programs ``PROGRAMS`` of one contender and their times by round."""

    def __init__(self, calls: dict[str, Callable[[], Any]]):
        self._calls = calls
        self.times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
        for name in PROGRAMS:  # compile, and once more so that nothing is first
            calls[name]()
            seconds(calls[name])

    def measure(self) -> None:
        for name in PROGRAMS:
            self.times[name].append(seconds(self._calls[name]))

    def total(self) -> list[float]:
        return [fwd + bwd for fwd, bwd in zip(self.times["fwd"], self.times["bwd"], strict=True)]
