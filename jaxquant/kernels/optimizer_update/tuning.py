"""Block sizes of one program of ``optimizer_update``."""

from __future__ import annotations

import math

SUBLANES, LANES, PACKED = 8, 128, 32
"""Rows of a TPU's vectors, their columns, and rows of a vector of 8-bit numbers."""
ELEMENTS = 2**18
"""Of a block, about: of each float32 array 1 MiB, which is held twice."""
MOST = 2**19
"""Of a block, at most: groups that do not fit are refused."""
VMEM = 48 * 2**20
"""Bytes of vector memory that a program may take."""


def blocks_for(rows: int, tail: tuple[int, ...], step: int, group: int) -> tuple[int, int]:
    """Choose rows and last axis of a block: whole groups, and whole vectors of what there is one of for each group.

    Args:
      rows: of the array.
      tail: axes behind the rows; all but the last are whole.
      step: rows that have to be together, a multiple of all groups.
      group: the largest group.
    """
    between = math.prod(tail[:-1])
    if len(tail) == 1:
        step = min(math.lcm(step, group * SUBLANES), -(-rows // step) * step)
    fits = max(ELEMENTS // (step * between) // LANES, 1) * LANES
    last = min(tail[-1], fits)
    more = max(ELEMENTS // (step * between * last), 1)
    return min(step * more, rows), last
