"""Block sizes of one program of ``quantize``."""

from __future__ import annotations

Blocks = tuple[int, int]
"""Rows and columns of a block."""

ROWS = 32
"""Rows of a tile of 8-bit numbers; the rows of a block are a multiple of it."""
BLOCK: Blocks = (512, 1024)


def blocks_for(shape: tuple[int, int]) -> Blocks:
    """Return the block of a matrix: whole tiles, and whole rows if they are short.

    Args:
      shape: shape of the matrix.
    """
    M, N = shape
    rows = min(BLOCK[0], -(-M // ROWS) * ROWS)
    return rows, min(N, BLOCK[1])
