"""Block sizes of one program of ``matmul``."""

from __future__ import annotations

from collections.abc import Callable

Blocks = tuple[int, int, int]
"""Rows, columns and depth of a block."""

LANES = 128
BLOCK: Blocks = (1024, 1024, 1024)
"""Best of four sizes on v5e and v6e by number of instruction bundles; see benchmarks/results/kernels-tpu.md."""
VMEM_BYTES = 40 * 2**20
"""VMEM limit of a program: two blocks of each operand and of a float32 result, and the sums. Chips have 64 MiB."""


def blocks_for(m: int, n: int, k: int) -> Blocks:
    """Return the blocks of a product.

    Args:
      m, n, k: rows, columns and depth of the product.
    """
    rows, columns, depth = BLOCK
    return best_block_size(m, rows), best_block_size(n, columns), best_block_size(k, depth)


def best_block_size(size: int, block: int) -> int:
    """Return the multiple of ``LANES``, at most ``block``, that covers an axis with the least padding.

    Args:
      size: size of the axis.
      block: largest block size.
    """
    beyond: Callable[[int], tuple[int, int]] = lambda step: (-size % step, -step)  # noqa: E731
    return min(range(LANES, block + 1, LANES), key=beyond)
