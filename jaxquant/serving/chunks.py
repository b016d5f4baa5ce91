"""How arrays are cut in a checkpoint, so that a part of one is read without the rest."""

from __future__ import annotations

import math
from typing import Any

import jax
import orbax.checkpoint as ocp

CHUNK_BYTES = 64 * 2**20
"""Largest chunk, which is what a reader holds beside the part that it asked for."""

SLICE_BYTES = 2**20
"""A leading axis is cut in single slices only where a slice is at least this large."""


def save_args(array: Any, limit: int = CHUNK_BYTES) -> ocp.SaveArgs:
    """Choose how orbax cuts an array: in chunks of at most ``limit`` bytes, along leading axes where that is sensible.

    An array below the limit stays in one chunk (or one a device). A larger one of stacked layers or experts is cut
    into its slices, a large matrix along its longest axis.

    Args:
      array: with shape and dtype; its sharding, where it has one, is a cut that orbax makes anyway.
      limit: bytes.
    """
    sharding = getattr(array, "sharding", None)
    shape = tuple(array.shape if sharding is None else sharding.shard_shape(array.shape))
    return ocp.SaveArgs(chunk_byte_size=limit, shard_axes=_sliced_axes(shape, array.dtype.itemsize, limit))


def save_args_of(tree: Any, limit: int = CHUNK_BYTES) -> Any:
    """Give ``save_args`` for every array of a tree."""
    return jax.tree.map(lambda leaf: save_args(leaf, limit), tree)


def _sliced_axes(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Leading axes that are cut in slices of one."""
    if math.prod(shape) * itemsize <= limit:
        return ()
    axes = 0
    # Of a matrix the rows are no units that anybody reads alone.
    while axes < len(shape) - 2 and math.prod(shape[axes + 1 :]) * itemsize >= min(SLICE_BYTES, limit):
        axes += 1
        if math.prod(shape[axes:]) * itemsize <= limit:
            break
    return tuple(range(axes))
