"""Single arrays of a training checkpoint: how orbax cuts them, and reading a part of one without the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts

CHUNK_BYTES = 64 * 2**20
"""Largest chunk, which is what a reader holds beside the part that it asked for."""

SLICE_BYTES = 2**20
"""A leading axis is cut in single slices only where a slice is at least this large."""

_ONE = {"limit": 1}
_CONTEXT = ts.Context(
    {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": _ONE, "data_copy_concurrency": _ONE}
)
"""Bounds the memory beside the part that is read: nothing is cached, and one chunk is read at a time."""


def save_args(array: Any) -> ocp.SaveArgs:
    """Choose how orbax cuts an array: in chunks of at most 64 MiB, along leading axes where that is sensible.

    An array below the limit stays in one chunk (or one a device). A larger one of stacked layers or experts is cut
    into its slices, a large matrix along its longest axis.

    Args:
      array: with shape and dtype; its sharding, where it has one, is a cut that orbax makes anyway.
    """
    sharding = getattr(array, "sharding", None)
    shape = tuple(array.shape if sharding is None else sharding.shard_shape(array.shape))
    sizes, axes = [math.prod(shape[axis:]) * array.dtype.itemsize for axis in range(len(shape) + 1)], 0
    # No reader asks for single rows of a matrix.
    while sizes[axes] > CHUNK_BYTES and axes < len(shape) - 2 and sizes[axes + 1] >= SLICE_BYTES:
        axes += 1
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=tuple(range(axes)))


def open_array(folder: Path, name: str) -> ts.TensorStore:
    """Open an array of a tree that orbax wrote in one OCDBT store, for reading.

    Raises:
      ValueError: from tensorstore, where it cannot be read.
    """
    base: Any = {"driver": "file", "path": f"{folder.resolve()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True, context=_CONTEXT).result()


def list_arrays(folder: Path) -> list[str]:
    """Return the names of the arrays of a tree that orbax wrote in one OCDBT store; none where there is no store.

    Raises:
      ValueError: from tensorstore, where its index cannot be read.
    """
    store: Any = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    keys = ts.KvStore.open(store).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))
