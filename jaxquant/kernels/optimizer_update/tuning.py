"""Block sizes of one program of ``optimizer_update``."""

from __future__ import annotations

import math

SUBLANES, LANES, PACKED = 8, 128, 32
"""Rows of a TPU's vectors, their columns, and rows of a vector of 8-bit numbers."""
ELEMENTS = 2**18
"""Target number of elements of a block: 1 MiB for each float32 array, which is held twice."""
MOST = 2**19
"""Largest number of elements of a block; groups that do not fit are rejected."""
VMEM = 48 * 2**20
"""VMEM limit of a program, in bytes."""


def blocks_for(rows: int, tail: tuple[int, ...], step: int, group: int) -> tuple[int, int]:
    """Return rows and last axis of a block: whole groups, and whole vectors of the numbers that groups share.

    Args:
      rows: rows of the array.
      tail: axes after the rows; all but the last are whole.
      step: number of rows that must be in one block, a multiple of all groups.
      group: size of the largest group.
    """
    between = math.prod(tail[:-1])
    if len(tail) == 1:
        step = min(math.lcm(step, group * SUBLANES), -(-rows // step) * step)
    fits = max(ELEMENTS // (step * between) // LANES, 1) * LANES
    last = min(tail[-1], fits)
    more = max(ELEMENTS // (step * between * last), 1)
    return min(step * more, rows), last
