"""Varying mesh axes in the types of a kernel's operands and results inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxquant.core.sharding import varying_axes

Array = jax.Array


def vary_alike(*operands: Array | None) -> tuple[list[Any], Callable[..., jax.ShapeDtypeStruct]]:
    """Make operands vary along the axes of all operands. Also returns a function that builds the type of a result.

    Args:
      operands: operands of a kernel; None stands for a missing operand.
    """
    arrays = [each for each in operands if each is not None]
    axes = frozenset[str]().union(*(varying_axes(each) for each in arrays))

    def widen(x: Array) -> Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    alike = [None if each is None else widen(each) for each in operands]
    kind = jax.typeof(next(each for each in alike if each is not None)).manual_axis_type

    def result(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)

    return alike, result
