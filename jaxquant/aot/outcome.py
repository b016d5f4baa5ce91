"""Comparison of the 8-bit matmuls of a traced step with the matmuls that the compiler emitted."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from jaxquant.aot.program import HloStep, Matmul

_NOISE = re.compile(
    r"^(jit\(\w+\)|call_exported|closed_call|checkpoint|rematted_computation|remat|while|body|cond|dot_general|transpose"
    r"|block_scaled_(ragged_)?dot|branch_\d+_fun|jaxquant_(fp8_einsum|block_matmul)\w*|mpmd_map|core_map|convert_element_type|dlhs|drhs|\w*\(?jvp\(.*\)+"
    r"|transpose\(jvp\(.*\)+|[\w.]+\.<lambda>)$"
)


def locate(path: str) -> tuple[str, str]:
    """Return the layer of a matmul's path, and its pass: "forward", "recomputed" or "backward"."""
    words = [word for word in path.split("/") if not _NOISE.match(word)]
    backward = "recomputed" if "rematted_computation" in path else "backward"
    return "/".join(words) or "(no path)", backward if "transpose(" in path else "forward"


@dataclasses.dataclass
class Outcome:
    """Result of a comparison of the traced 8-bit matmuls with the compiled matmuls.

    Attributes:
      asked: number of 8-bit matmuls in the traced step, by path.
      fell_back: matmuls that were compiled in more than 8 bits. A missing matmul is included if the compiled step has a
        wider matmul that no traced matmul explains.
      merged: matmuls that were compiled as part of another 8-bit matmul with a common operand.
      removed: matmuls that the compiler removed, because their result is unused or equals another result.
    """

    asked: dict[str, int]
    fell_back: list[str]
    merged: list[str]
    removed: list[str]


TOLERANCE = 1.01
"""Ratio below which two amounts of work count as equal: compilers pad, and a device's share is rounded down."""


def compare(requested: HloStep, emitted: HloStep, devices: int = 1) -> Outcome:
    """Compare a traced step with its compiled program.

    Matmuls are matched by path, which a compiler may lose. Each missing matmul is assigned to the first case that
    applies:

    - Merged: an 8-bit matmul of the same pass does more work than the traced step requests for its path, by at least
      the work of the missing matmul.
    - Fell back: a compiled matmul of more than 8 bits has at least the work of the missing matmul, and no traced matmul
      explains it, neither by path nor by work.
    - Removed: otherwise.

    The traced work is the work of all ``devices``; the compiled work is the work of one device.

    Args:
      requested: traced step.
      emitted: compiled step.
      devices: number of devices of the program.
    """
    wanted: dict[str, list[int]] = {}
    for matmul in requested.matmuls:
        if matmul.bits <= 8:
            wanted.setdefault(matmul.path, []).append(matmul.times * matmul.flops // devices)
    wide = [matmul for matmul in emitted.matmuls if matmul.bits > 8]
    fell_back = [f"{m.path}: {m.dtypes}" for m in wide if m.path in wanted]
    lost = {matmul.path for matmul in wide} & set(wanted)
    made: dict[str, int] = collections.Counter()
    for matmul in emitted.matmuls:
        if matmul.bits <= 8:
            made[matmul.path] += matmul.times * matmul.flops
    spare = {path: work - sum(wanted.get(path, ())) for path, work in made.items()}
    unexplained = _unexplained(requested, [matmul for matmul in wide if matmul.path not in wanted], devices)
    merged, removed = [], []
    for path, works in wanted.items():
        for work in [] if path in lost else _missing_works(works, made.get(path, 0)):
            host = next((p for p in spare if locate(p)[1] == locate(path)[1] and spare[p] * TOLERANCE >= work), None)
            wider = next((each for each in unexplained if each[1] * TOLERANCE >= work), None)
            if host is not None:
                spare[host] -= work
                merged.append(f"{path} → {locate(host)[0]}")
            elif wider is not None:
                wider[1] -= work
                fell_back.append(f"{path}: probably fell back to {wider[0].dtypes}")
            else:
                removed.append(path)
    return Outcome({path: len(works) for path, works in wanted.items()}, fell_back, merged, removed)


def _missing_works(works: list[int], made: int) -> list[int]:
    """Return the work of each matmul of a path that the compiled work of the path does not include, largest first."""
    missing, gone = sum(works) - made, []
    for work in sorted(works, reverse=True):
        if work <= missing * TOLERANCE:
            missing -= work
            gone.append(work)
    return gone or ([missing] if missing > 0 else [])


def _unexplained(requested: HloStep, wide: list[Matmul], devices: int) -> list[list[Any]]:
    """Return (matmul, work) for each wide matmul that no traced wide matmul explains, by path or by work."""
    traced = [matmul for matmul in requested.matmuls if matmul.bits > 8]
    known, kept = {matmul.path for matmul in traced}, {matmul.path for matmul in wide}
    works = [matmul.times * matmul.flops // devices for matmul in traced if matmul.path not in kept]
    found = []
    for matmul in (each for each in wide if each.path not in known):
        work = matmul.times * matmul.flops
        same = next((each for each in works if each <= work * TOLERANCE and work <= each * TOLERANCE), None)
        if same is None:
            found.append([matmul, work])
        else:
            works.remove(same)
    return found
