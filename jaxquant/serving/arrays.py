"""Single arrays of a checkpoint: how orbax cuts them, and reading a part of one without the rest."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding

CHUNK_BYTES = 64 * 2**20
"""Largest chunk, which is what a reader holds beside the part that it asked for."""

SLICE_BYTES = 2**20
"""A leading axis is cut in single slices only where a slice is at least this large."""

CHUNKS_AT_ONCE = 4
"""Chunks that are read side by side."""


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
    """Return ``save_args`` for every array of a tree."""
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


@functools.cache
def _context(chunks_at_once: int) -> ts.Context:
    """Bound what is in memory beside the part that was asked for: nothing is kept, few chunks are on their way."""
    limit = {"limit": chunks_at_once}
    return ts.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": limit, "data_copy_concurrency": limit}
    )


def open_array(folder: Path, name: str = "", chunks_at_once: int = CHUNKS_AT_ONCE) -> ts.TensorStore:
    """Open an array that orbax wrote, for reading.

    Args:
      folder: of the array, or with a name, of a tree of arrays in one OCDBT store.
      name: of the array in that store.
      chunks_at_once: that are read side by side.

    Raises:
      ValueError: from tensorstore, where it cannot be read.
    """
    store: Any = {"driver": "file", "path": f"{folder.resolve()}/"}
    if name:
        store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
    return ts.open(
        {"driver": "zarr", "kvstore": store}, open=True, read=True, context=_context(chunks_at_once)
    ).result()


def list_arrays(folder: Path) -> list[str]:
    """Return the names of the arrays of a tree that orbax wrote in one OCDBT store; none where there is no store.

    Raises:
      ValueError: from tensorstore, where its index cannot be read.
    """
    store: Any = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.resolve()}/"}}
    keys = ts.KvStore.open(store).result().list().result()
    return sorted(key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray"))


def shape_and_dtype(array: ts.TensorStore) -> tuple[tuple[int, ...], str]:
    """Return the shape of a stored array and its dtype by name."""
    return tuple(array.shape), np.dtype(array.dtype.numpy_dtype).name


def read_sharded(array: ts.TensorStore, sharding: Sharding) -> jax.Array:
    """Read an array onto devices, one part after the other: the host holds one part at a time.

    Parts that several devices share are read once.

    Raises:
      ValueError: from tensorstore, where it cannot be read.
    """
    shape = tuple(array.shape)
    devices: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        spans = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(spans, []).append(device)
    placed = []
    for spans, owners in devices.items():
        part = array[tuple(slice(*span) for span in spans)].read().result()
        kinds = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in owners]
        placed += [jax.block_until_ready(jax.device_put(part, kind)) for kind in kinds]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
