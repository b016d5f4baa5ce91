"""Tiles of one program of ``matmul``."""

from __future__ import annotations

import math
from typing import NamedTuple

ROWS, COLUMNS = 64, 128
"""Size of one warpgroup's product: rows of a tensor core instruction, and columns of a weight's block."""
SWIZZLED = 8
"""Number of rows that are swizzled together; the rows of a matrix in memory are a multiple of this number."""
STEPS = 4
"""Number of tiles of each operand in shared memory; five tiles of 192 rows and the results exceed 227 KB."""
PART = 32
"""Number of columns that are scaled and stored at once; scales of more columns need too many registers."""


class Tile(NamedTuple):
    """Tile of the result.

    Attributes:
      warpgroups: number of multiplying warpgroups, with ``ROWS`` rows each.
      cluster: number of programs that share the loads of an operand's tile.
    """

    warpgroups: int
    cluster: int

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS


def tile_for(rows: int) -> Tile:
    """Return the tile of a product: 192×128, in clusters of two that share the columns, if there are enough rows.

    A multiprocessor then reads 43 bytes of L2 per clock at the full rate of its tensor cores; without a cluster it
    would read 53, and with 128 rows 48.
    """
    warpgroups = min(3, math.ceil(rows / ROWS))
    return Tile(warpgroups, 2 if rows > warpgroups * ROWS else 1)


def grouped_tile(columns: int) -> Tile:
    """Return the tile of a product with groups of 128 rows; two programs share the rows if columns suffice."""
    return Tile(2, 2 if columns > COLUMNS else 1)
