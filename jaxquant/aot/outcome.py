"""Which matmuls that a step asks for in 8 bits the compiler kept in 8 bits, and which it did not."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from jaxquant.aot.program import Matmul, Program

_NOISE = re.compile(
    r"^(jit\(\w+\)|call_exported|closed_call|checkpoint|rematted_computation|remat|while|body|cond|dot_general|transpose"
    r"|block_scaled_(ragged_)?dot|branch_\d+_fun|jaxquant_(fp8_einsum|block_matmul)\w*|mpmd_map|core_map|convert_element_type|dlhs|drhs|\w*\(?jvp\(.*\)+"
    r"|transpose\(jvp\(.*\)+|[\w.]+\.<lambda>)$"
)


def layer(path: str) -> tuple[str, str]:
    """Split a matmul's path into its layer and the pass it belongs to: forward, recomputed or backward."""
    words = [word for word in path.split("/") if not _NOISE.match(word)]
    backward = "recomputed" if "rematted_computation" in path else "backward"
    return "/".join(words) or "(no path)", backward if "transpose(" in path else "forward"


@dataclasses.dataclass
class Outcome:
    """What became of the matmuls that a step asks for in 8 bits.

    Attributes:
      asked: how many there are in the step as traced, by path.
      fell_back: those that the compiler made in more than 8 bits, or that are gone where it made a wider matmul that
        nothing traced explains.
      merged: those that it made as part of another 8-bit matmul with a common operand.
      removed: those whose result nobody needs, or that equal another.
    """

    asked: dict[str, int]
    fell_back: list[str]
    merged: list[str]
    removed: list[str]


NEARLY = 1.01
"""Works that differ by less are the same: a compiler pads, and a device's share is rounded down."""


def compare(asked: Program, emitted: Program, devices: int = 1) -> Outcome:
    """Compare a step as traced with what a compiler made of it.

    A matmul is followed by its path, which a compiler may lose. One that is gone was merged if an 8-bit matmul of the
    same pass does more work than its own path asks for, as much more as is missing. If not, it fell back where there is
    a wider matmul of at least its work that no traced one explains, neither by path nor by work; otherwise it was
    removed. What is asked for is the work of all ``devices``, what is emitted that of one.

    Args:
      asked: the step as traced.
      emitted: the step as compiled.
      devices: number of devices of the program.
    """
    wanted: dict[str, list[int]] = {}
    for matmul in asked.matmuls:
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
    unexplained = _unexplained(asked, [matmul for matmul in wide if matmul.path not in wanted], devices)
    merged, removed = [], []
    for path, works in wanted.items():
        for work in [] if path in lost else _gone(works, made.get(path, 0)):
            host = next((p for p in spare if layer(p)[1] == layer(path)[1] and spare[p] * NEARLY >= work), None)
            wider = next((each for each in unexplained if each[1] * NEARLY >= work), None)
            if host is not None:
                spare[host] -= work
                merged.append(f"{path} → {layer(host)[0]}")
            elif wider is not None:
                wider[1] -= work
                fell_back.append(f"{path}: fell back or unexplained, {wider[0].dtypes}")
            else:
                removed.append(path)
    return Outcome({path: len(works) for path, works in wanted.items()}, fell_back, merged, removed)


def _gone(works: list[int], made: int) -> list[int]:
    """List the works of a path's matmuls that are not in what was made of it, the largest ones first."""
    missing, gone = sum(works) - made, []
    for work in sorted(works, reverse=True):
        if work <= missing * NEARLY:
            missing -= work
            gone.append(work)
    return gone or ([missing] if missing > 0 else [])


def _unexplained(asked: Program, wide: list[Matmul], devices: int) -> list[list[Any]]:
    """Pair the wide matmuls that no traced wide one explains, by path or else by work, with their work."""
    traced = [matmul for matmul in asked.matmuls if matmul.bits > 8]
    known, kept = {matmul.path for matmul in traced}, {matmul.path for matmul in wide}
    works = [matmul.times * matmul.flops // devices for matmul in traced if matmul.path not in kept]
    found = []
    for matmul in (each for each in wide if each.path not in known):
        work = matmul.times * matmul.flops
        same = next((each for each in works if each <= work * NEARLY and work <= each * NEARLY), None)
        if same is None:
            found.append([matmul, work])
        else:
            works.remove(same)
    return found
