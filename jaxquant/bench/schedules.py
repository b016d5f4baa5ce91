"""Reader of the final schedules that the compiler writes for TPU kernels.

A TPU runs one bundle per cycle. The final schedule of a kernel is two files: one has its bundles, loops and branches,
the other has the slots that each bundle fills. libtpu writes both to the folder that ``dump_environment`` sets.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+ +(?:(LH|LB|LE|PB|PF|CT)\b)?:?\s*:? *(>*)")
_BRANCH = re.compile(r"\bsbr\.rel \(!?%\w+\) target = \$region(\d+)")
_REGION = re.compile(r"Start region (\d+)")
_EXIT = re.compile(r"scmp\.\w+\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
PIPELINE = 2
"""Iterations of a kernel's outer loop that skip its body: they load the first operands or store the last results."""


def dump_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that make libtpu write schedules; they must be set before libtpu starts.

    Args:
      folder: folder to write to. Every compilation leaves about a hundred files there.
    """
    return {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Work of a TPU in one cycle.

    Attributes:
      loops: number of loops around the bundle.
      guards: number of branches that can skip the bundle.
      mxu: number of slots of the matrix units that the bundle fills.
      fills, spills: number of loads and stores of spilled registers.
    """

    loops: int
    guards: int
    mxu: int
    fills: int
    spills: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Schedule of a TPU kernel.

    Attributes:
      bundles: bundles in the order of their addresses.
      mxu: number of slots of the matrix units in a bundle.
      trip_counts: number of iterations of each loop, from the outermost loop.
    """

    bundles: tuple[Bundle, ...]
    mxu: int
    trip_counts: tuple[int, ...]

    def count(self, loops: int, guards: range = range(1000)) -> int:
        """Return the number of bundles at a loop depth and inside a number of branches.

        Args:
          loops: number of loops around a bundle.
          guards: accepted numbers of branches around a bundle.
        """
        return sum(each.loops == loops and each.guards in guards for each in self.bundles)

    @property
    def cycles(self) -> int:
        """Number of bundles, each multiplied by the iterations of its loops, as if no branch were taken."""
        return sum(math.prod(self.trip_counts[: each.loops]) for each in self.bundles)

    @property
    def mxu_share(self) -> float:
        """Share of filled slots of the matrix units, from the first bundle that fills one to the last."""
        used = [index for index, each in enumerate(self.bundles) if each.mxu]
        if not used:
            return 0.0
        region = self.bundles[used[0] : used[-1] + 1]
        return sum(each.mxu for each in region) / (self.mxu * len(region))

    @property
    def fills_and_spills(self) -> tuple[int, int]:
        """Number of loads and of stores of spilled registers in the schedule."""
        return sum(each.fills for each in self.bundles), sum(each.spills for each in self.bundles)


def read_schedule(folder: Path, kernel: str) -> Schedule:
    """Return the final schedule of a kernel.

    Args:
      folder: folder that libtpu wrote to.
      kernel: name in ``pallas_call``.

    Raises:
      FileNotFoundError: no kernel of that name was compiled.
      ValueError: the two texts do not have the same number of bundles, or two loops have the same depth.
    """
    text = _only(folder, f"*{kernel}*-final_bundles.txt").read_text()
    bundles = list(_loops_and_guards(text))
    slots, capacity = _slots(_only(folder, f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt").read_text())
    if len(bundles) != len(slots):
        raise ValueError(f"{kernel}: the schedule has {len(bundles)} bundles, but the file of slots has {len(slots)}")
    made = (
        Bundle(*place, mxu=each["MXU"], fills=each["VLOAD:FILL"], spills=each["VSTORE:SPILL"])
        for place, each in zip(bundles, slots, strict=True)
    )
    return Schedule(tuple(made), capacity["MXU"], _trip_counts(text))


def _only(folder: Path, pattern: str) -> Path:
    found = [path for path in folder.glob(pattern) if "schedule-analysis" not in path.name]
    if not found:
        raise FileNotFoundError(f"{folder} has no file {pattern}")
    return found[-1]


def _loops_and_guards(text: str) -> Iterator[tuple[int, int]]:
    """Yield the numbers of loops and branches around each bundle.

    A branch to a region that has not begun skips the bundles before its label, ``PF``. A branch to a region that has
    begun closes a loop.
    """
    begun, guards = set[str](), 0
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if not found or "{" not in line:
            continue
        guards -= found[1] == "PF"
        yield len(found[2]), guards
        begun |= set(_REGION.findall(line))
        guards += sum(target not in begun for target in _BRANCH.findall(line))


def _trip_counts(text: str) -> tuple[int, ...]:
    """Return the iterations of the loops. Kernels of this package have at most one loop per depth."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        if exit_test := _EXIT.search(line):
            place = _BUNDLE.match(line)
            assert place is not None
            depth = len(place[2])
            if depth in found:
                raise ValueError(f"the schedule has two loops at depth {depth}")
            found[depth] = int(exit_test[1]) - (PIPELINE if depth == 1 else 0)
    return tuple(found[depth] for depth in sorted(found))


def _slots(text: str) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Return the number of slots of each unit that every bundle fills, and the number of slots of each unit."""
    lines = [line.strip() for line in text.splitlines()]
    head = next(index for index, line in enumerate(lines) if line.startswith("MXU,"))
    units = [name.strip() for name in lines[head].split(",")]
    capacity, *rows = [
        dict(zip(units, map(int, line.split()), strict=True)) for line in lines if re.fullmatch(r"[\d ]+", line)
    ]
    return rows, capacity
