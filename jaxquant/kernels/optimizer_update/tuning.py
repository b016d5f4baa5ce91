"""Block sizes of one program of ``optimizer_update``."""

from __future__ import annotations

import math

SUBLANES, LANES, PACKED = 8, 128, 32
"""Rows and columns of a TPU vector register, and rows of a vector register of 8-bit numbers."""
TARGET_ELEMENTS = 2**18
"""Target number of elements of a block: 1 MiB for each float32 array; each array has two buffers."""
MAX_ELEMENTS = 2**19
"""Largest number of elements of a block; larger groups are rejected."""
VMEM_BYTES = 48 * 2**20
"""VMEM limit of a program, in bytes."""


def blocks_for(rows: int, tail: tuple[int, ...], step: int, group: int) -> tuple[int, int]:
    """Return the rows and the last axis of a block, which holds whole groups and whole vectors of group statistics.

    Args:
      rows: rows of the array.
      tail: sizes of the axes after the rows; a block splits only the last of them.
      step: number of rows that must be in one block, a multiple of every group size.
      group: largest group size.
    """
    between = math.prod(tail[:-1])
    if len(tail) == 1:
        step = min(math.lcm(step, group * SUBLANES), -(-rows // step) * step)
    fits = max(TARGET_ELEMENTS // (step * between) // LANES, 1) * LANES
    last = min(tail[-1], fits)
    more = max(TARGET_ELEMENTS // (step * between * last), 1)
    return min(step * more, rows), last
