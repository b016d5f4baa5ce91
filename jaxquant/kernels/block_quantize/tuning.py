"""Block sizes of one program of ``block_quantize``."""

from __future__ import annotations

TILE = 128
"""Rows and columns that are cast at once: whole blocks in every recipe, and a TPU's lanes."""
LARGEST = (512, 1024)
ROWS = 64
"""Rows of half a tile, which a GPU warpgroup holds in registers."""
STRIP = 8
"""Largest number of tiles of a GPU program."""


def blocks_for(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of a block: the largest number of tiles, up to ``LARGEST``, that divides the matrix.

    Args:
      shape: shape of the matrix, multiples of ``TILE``.
    """
    sizes = (range(most, 0, -TILE) for most in LARGEST)
    rows, columns = (next(n for n in each if size % n == 0) for size, each in zip(shape, sizes, strict=True))
    return rows, columns
