"""Tiles of one program of ``matmul``."""

from __future__ import annotations

import math
from typing import NamedTuple

ROWS, COLUMNS = 64, 128
"""What one warpgroup multiplies: a row of tensor core instructions, and the columns of a block of a weight."""
SWIZZLED = 8
"""Rows that are swizzled together: a matrix in memory has a multiple of them."""
STEPS = 4
"""Tiles of each operand in shared memory: with 192 rows five of them and the results do not fit 227 KB."""
PART = 32
"""Columns that are scaled and stored at once: with the scales of more a thread's registers would not do."""


class Tile(NamedTuple):
    """How the result is cut.

    Attributes:
      warpgroups: that multiply, ``ROWS`` rows each.
      cluster: programs that load an operand's tile together, each for all of them.
    """

    warpgroups: int
    cluster: int

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS


def tile_for(rows: int) -> Tile:
    """Choose the tiles of a product of so many rows: 192×128, two at a time that share the columns, where it has them.

    A multiprocessor then reads 43 bytes of L2 a clock at the full rate of its tensor cores; alone it would read 53, and
    with 128 rows 48.
    """
    warpgroups = min(3, math.ceil(rows / ROWS))
    return Tile(warpgroups, 2 if rows > warpgroups * ROWS else 1)


def grouped_tile(columns: int) -> Tile:
    """Choose the tiles of a product whose rows come in groups of 128: two programs share those rows, if they can."""
    return Tile(2, 2 if columns > COLUMNS else 1)
