"""Memory of a step on a device: its arguments by part and dtype, and the largest batch that fits."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jaxquant.aot.report import Audit, Row, memory_text

WEIGHTS = "params"
"""Part whose elements are the parameters in "bytes a parameter"."""
_GUESSES = 5  # sizes to compile before bisection, for steps whose memory is not linear in the batch


def part_names(step: Any, shapes: Sequence[Any]) -> list[str]:
    """Return the part of each leaf of a step's arguments.

    A part is an argument, by name, or a field of an argument that is a named tuple: ``params``, ``opt_state``,
    ``batch``.

    Args:
      step: function of the step.
      shapes: arguments of the step.
    """
    names = list(inspect.signature(step).parameters)
    found = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tuple(shapes)):
        index: int = getattr(path[0], "idx", 0)
        name = names[index] if index < len(names) else f"argument {index + 1}"
        found.append(path[1].name if len(path) > 1 and isinstance(path[1], GetAttrKey) else name)
    return found


def part_rows(names: Sequence[str], shapes: Any, devices: int) -> list[Row]:
    """Return the bytes on one device by part and dtype; if there are parameters, also the bytes per parameter.

    Args:
      names: part of each leaf, from ``part_names``.
      shapes: arguments of the step, with their shardings.
      devices: number of devices of the step. Bytes per parameter are a device's bytes divided by the number of
        parameters per device.
    """
    sizes: dict[tuple[str, str], int] = {}
    count = 0
    for name, leaf in zip(names, jax.tree.leaves(shapes), strict=True):
        place = getattr(leaf, "sharding", None)
        shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
        key = (name, leaf.dtype.name)
        sizes[key] = sizes.get(key, 0) + math.prod(shape) * leaf.dtype.itemsize
        count += math.prod(leaf.shape) * (name == WEIGHTS)
    rows = [{"part": part, "dtype": dtype, "bytes": size} for (part, dtype), size in sizes.items()]
    return [row | ({"bytes a parameter": row["bytes"] * devices / count} if count else {}) for row in rows]


def largest_batch(compiled: Callable[[int], Audit], unit: int) -> tuple[int, list[Row]]:
    """Find the largest batch size with which a step fits the memory, by compiling the step with a few sizes.

    The first two sizes are ``unit`` and twice ``unit``. Each further size is extrapolated: a line through the peaks of
    the smallest and the largest fitting size reaches the capacity there. The extrapolated size is limited to the range
    between the largest size known to fit and the smallest size known not to fit. Progress is printed to stderr.

    Args:
      compiled: function from a batch size to the audit of the step.
      unit: smallest batch size; all other batch sizes are multiples of ``unit``.

    Returns:
      The batch size, or 0 if not even ``unit`` fits, and a row for each compiled size.

    Raises:
      ValueError: the step needs the same memory with twice the batch, so its batch size is fixed.
    """
    fits: dict[int, int] = {}
    rows: list[Row] = []
    high = None
    while high is None or high - max(fits, default=0) > 1:
        n = _next_multiple(fits, high, rows)
        found = compiled(n * unit)
        rows.append({"batch_size": n * unit, "fits": found.fits} | found.memory)
        print(f"batch_size {n * unit}: {memory_text(found)}", file=sys.stderr, flush=True)
        if not found.fits:
            high = n
            continue
        fits[n] = found.memory["peak"]
        if len(fits) == 2 and len(set(fits.values())) == 1:
            raise ValueError(f"--largest-batch: the step ignores batch_size {n * unit}; use batch_size in --program")
    return max(fits, default=0) * unit, rows


def _next_multiple(fits: dict[int, int], high: int | None, rows: Sequence[Row]) -> int:
    """Return the next multiple of ``unit`` to compile the step with."""
    low = max(fits, default=0)
    if len(fits) < 2:
        return max(2 * low, 1)
    if high is not None and len(rows) > _GUESSES:
        return (low + high) // 2
    first = min(fits)
    slope = max(fits[low] - fits[first], 1) / (low - first)
    guess = low + int((rows[0]["capacity"] - fits[low]) / slope)
    return max(min(guess, (high or guess + 1) - 1), low + 1)
