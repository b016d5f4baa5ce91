"""Reference of ``optimizer_update``: a function that works on groups of rows, applied to all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxquant.kernels import KERNEL_PREFIX

Array = jax.Array
NAME = f"{KERNEL_PREFIX}optimizer_update"
"""Name of the kernels in traced and in compiled programs."""

Body = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""Function of (scalars, arrays) that returns results. Arrays and results are [rows, *tail], or [rows / n, *tail] if n
rows share a value. The result rows of a group depend only on the rows of that group."""


class Result(NamedTuple):
    """A result of ``update``.

    Attributes:
      dtype: dtype of the result.
      rows: number of input rows for each row of the result: the group size for group statistics, otherwise 1.
      replaces: index of the array whose memory the result reuses, or None for new memory.
    """

    dtype: str
    rows: int = 1
    replaces: int | None = None


def update(
    body: Body,
    scalars: Sequence[Array],
    arrays: Sequence[Array],
    results: Sequence[Result],
    changes: Array | None = None,
) -> list[Array]:
    """Compute ``body`` of arrays [A, rows, *tail], for each index of A.

    Args:
      body: function to compute.
      scalars: float32 scalars for ``body``, the same for all rows.
      arrays: arrays for ``body``.
      results: results of ``body``.
      changes: mask; where it is False, a result is the array that it replaces, or 0 if the result replaces no array.
    """
    made = jax.vmap(lambda *parts: tuple(body(scalars, parts)))(*arrays)
    new = [x.astype(result.dtype) for x, result in zip(made, results, strict=True)]
    if changes is None:
        return new
    old = [0 if result.replaces is None else arrays[result.replaces] for result in results]
    return [jnp.where(changes, x, y) for x, y in zip(new, old, strict=True)]
