"""Block sizes of one program of ``quantize``."""

from __future__ import annotations

Blocks = tuple[int, int]
"""Rows and columns."""

ROWS = 32
"""Rows of a tile of 8-bit numbers: blocks have a multiple of it."""
BLOCK: Blocks = (512, 1024)


def blocks_for(shape: tuple[int, int]) -> Blocks:
    """Choose the block of a matrix: whole tiles, whole rows where these are short.

    Args:
      shape: of the matrix.
    """
    M, N = shape
    rows = min(BLOCK[0], -(-M // ROWS) * ROWS)
    return rows, min(N, BLOCK[1])
