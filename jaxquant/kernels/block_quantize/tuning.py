"""Block sizes of one program of ``block_quantize``."""

from __future__ import annotations

TILE = 128
"""Rows and columns that are cast at once: whole blocks of every recipe, and a TPU's lanes."""
LARGEST = (512, 1024)
ROWS = 64
"""Half a tile, which a warpgroup of a GPU holds in registers."""
STRIP = 8
"""Tiles of a GPU's program, at most."""


def blocks_for(shape: tuple[int, int]) -> tuple[int, int]:
    """Choose rows and columns of a block: as many whole tiles as divide the matrix, up to ``LARGEST``.

    Args:
      shape: of the matrix, multiples of ``TILE``.
    """
    sizes = (range(most, 0, -TILE) for most in LARGEST)
    rows, columns = (next(n for n in each if size % n == 0) for size, each in zip(shape, sizes, strict=True))
    return rows, columns
