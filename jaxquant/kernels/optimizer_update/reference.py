"""The meaning of ``optimizer_update``: a function of rows of groups, of all rows at once."""

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
"""(scalars, arrays) -> results. Arrays and results are [rows, *tail], or [rows / n, *tail] where n rows share a number.
Rows of one group are computed from rows of that group alone."""


class Result(NamedTuple):
    """A result of ``update``.

    Attributes:
      dtype: its dtype.
      rows: rows that share a number of it: the size of a group, or 1.
      replaces: the array whose memory it takes, by its place among the arrays; None takes new memory.
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
    """Compute ``body`` of arrays [A, rows, *tail], for each of A.

    Args:
      body: what is computed.
      scalars: of it, the same for all rows; float32.
      arrays: of it.
      results: what it returns.
      changes: where it is False, a result is the array that it replaces, or 0 where it replaces none.
    """
    made = jax.vmap(lambda *parts: tuple(body(scalars, parts)))(*arrays)
    new = [x.astype(result.dtype) for x, result in zip(made, results, strict=True)]
    if changes is None:
        return new
    old = [0 if result.replaces is None else arrays[result.replaces] for result in results]
    return [jnp.where(changes, x, y) for x, y in zip(new, old, strict=True)]
