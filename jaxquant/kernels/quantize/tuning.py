"""Block sizes of one program of ``quantize``."""

from __future__ import annotations

Blocks = tuple[int, int]
"""Rows and columns of a block."""

ROWS = 32
"""Rows of a tile of 8-bit numbers; the rows of a block are a multiple of it."""
BLOCK: Blocks = (512, 1024)


def blocks_for(shape: tuple[int, int]) -> Blocks:
    """Return the block size for a matrix: a multiple of the tile size; if rows are short, a block has whole rows.

    Args:
      shape: shape of the matrix.
    """
    M, N = shape
    rows = min(BLOCK[0], -(-M // ROWS) * ROWS)
    return rows, min(N, BLOCK[1])
