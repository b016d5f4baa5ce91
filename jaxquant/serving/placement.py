"""Reading and writing arrays of a checkpoint: packed in the file, unpacked and sharded on the devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxquant.export.safetensors import SafetensorsFile
from jaxquant.formats.packing import unpack
from jaxquant.serving.leaves import StoredArray

ChooseSharding = Callable[[str, tuple[int, ...], str], Sharding]
"""Function (path, shape, dtype name) of an array in the model -> its sharding."""


def to_stored(stored: StoredArray, array: Any) -> np.ndarray:
    """Return an array in host memory in its stored form: four-bit elements in pairs, the first in the low bits.

    Raises:
      TypeError: the array is abstract.
    """
    if not isinstance(array, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{stored.path} must be an array with data, got {type(array).__name__}; pass a jax.Array")
    array = np.asarray(array)
    if not stored.is_packed:
        return array.view(stored.stored_dtype)
    nibbles = array.view(np.uint8) & 0xF
    packed = nibbles[..., ::2].copy()
    packed[..., : array.shape[-1] // 2] |= nibbles[..., 1::2] << 4
    return packed


def read_array(stored: StoredArray, file: SafetensorsFile, sharding: Sharding) -> jax.Array:
    """Read an array onto devices; host memory holds one shard at a time. Replicated shards are read once."""
    shape, auto_sharding, mapped = stored.stored_shape, with_auto_axes(sharding), file[stored.path]
    devices: dict[Any, list[Any]] = {}
    for device, index in auto_sharding.addressable_devices_indices_map(shape).items():
        spans = tuple(shard.indices(size)[:2] for shard, size in zip(index or (), shape, strict=True))
        devices.setdefault(spans, []).append(device)
    placed = []
    for spans, owners in devices.items():
        shard = np.array(mapped[tuple(slice(*span) for span in spans)])  # no device array may alias the file
        file.release()
        shard = shard if stored.is_packed else shard.view(stored.dtype)
        kinds = [SingleDeviceSharding(device, memory_kind=auto_sharding.memory_kind) for device in owners]
        placed += [jax.block_until_ready(jax.device_put(shard, kind)) for kind in kinds]
    array = jax.make_array_from_single_device_arrays(shape, auto_sharding, placed)
    if stored.is_packed:
        array = _unpacker(stored.dtype, stored.shape[-1], auto_sharding)(array)
    return jax.device_put(array, sharding)


@functools.lru_cache
def _unpacker(dtype: str, size: int, sharding: Sharding) -> Any:
    return jax.jit(functools.partial(unpack, dtype=dtype, size=size), out_shardings=sharding)


def choose_sharding(array: StoredArray, requested: Sharding | ChooseSharding | None) -> Sharding:
    """Return the sharding of one array.

    Raises:
      ValueError: the sharding does not divide the array, or splits a byte between devices.
      TypeError: the function did not return a sharding.
    """
    if requested is None:
        return jnp.zeros(()).sharding
    sharding = requested if isinstance(requested, Sharding) else requested(array.path, array.shape, array.dtype)
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding must return a jax.sharding.Sharding, got {type(sharding).__name__} for {array.path}")
    try:
        shape = sharding.shard_shape(array.shape)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"the sharding of {array.path} is not valid for shape {array.shape} ({first_line(error)}); "
            "choose another sharding"
        ) from None
    if array.is_packed and _splits_bytes(array, sharding):
        raise ValueError(
            f"the sharding of {array.path} splits axis {len(array.shape) - 1} of size {array.shape[-1]} into shards of "
            f"{shape[-1]} elements of {array.dtype}, but one byte holds two elements; use even shards, or another axis"
        )
    return sharding


def _splits_bytes(array: StoredArray, sharding: Sharding) -> bool:
    shard_shape = sharding.shard_shape(array.shape)[-1]
    return shard_shape != array.shape[-1] and shard_shape % 2 == 1


def with_auto_axes(sharding: Sharding) -> Sharding:
    """Return the same sharding on a mesh with Auto axes, because unpacking has no explicit sharding rules."""
    if not isinstance(sharding, NamedSharding) or all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return sharding
    names = sharding.mesh.axis_names
    devices: Any = sharding.mesh.devices
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def first_line(error: Exception) -> str:
    """Return the type and first line of another library's error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__
