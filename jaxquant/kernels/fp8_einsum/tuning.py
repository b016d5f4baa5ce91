"""Block sizes of one program of ``matmul``."""

from __future__ import annotations

from collections.abc import Callable

Blocks = tuple[int, int, int]
"""Rows, columns and depth."""

LANES = 128
BLOCK: Blocks = (1024, 1024, 1024)
"""Best of four on v5e and v6e, by bundles: benchmarks/results/kernels-tpu.md."""
VMEM_BYTES = 40 * 2**20
"""What a program may take: two of each operand and of a float32 result, and the sums. The smallest chip has 64 MiB."""


def blocks_for(m: int, n: int, k: int) -> Blocks:
    """Choose the blocks of a product.

    Args:
      m, n, k: its rows, columns and depth.
    """
    rows, columns, depth = BLOCK
    return fit(m, rows), fit(n, columns), fit(k, depth)


def fit(size: int, block: int) -> int:
    """Return the multiple of ``LANES``, at most a block, that covers an axis with the least beyond its end.

    Args:
      size: of the axis.
      block: the largest that is wanted.
    """
    beyond: Callable[[int], tuple[int, int]] = lambda step: (-size % step, -step)  # noqa: E731
    return min(range(LANES, block + 1, LANES), key=beyond)
