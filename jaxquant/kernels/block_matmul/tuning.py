"""Tiles of one program of ``matmul``."""

from __future__ import annotations

import math
from typing import NamedTuple

ROWS, COLUMNS = 64, 128
"""Product size of one warpgroup: the rows of a tensor core instruction, and the columns of a block of a weight."""
SWIZZLED = 8
"""Rows that are swizzled together; a matrix in memory has a multiple of them."""
STEPS = 4
"""Tiles of each operand in shared memory; with 192 rows, five tiles and the results do not fit into 227 KB."""
PART = 32
"""Columns that are scaled and stored at once; a thread does not have registers for the scales of more."""


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
