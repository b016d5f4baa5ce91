"""Where the arrays of a checkpoint lie: packed on the devices for storage, and unpacked there into given shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxquant.formats.packing import pack, unpack
from jaxquant.serving.leaves import Stored

ChooseSharding = Callable[[str, tuple[int, ...], str], Sharding]
"""(path, shape, dtype name) of an array in the model -> its sharding."""


def to_stored(stored: Stored, array: Any) -> jax.Array | np.ndarray:
    """Return an array as it is stored: as it is, or packed where it lies.

    Raises:
      TypeError: it has a shape and a dtype and no numbers.
    """
    if not isinstance(array, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{stored.path} is {type(array).__name__}, which holds no numbers; give an array")
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return np.asarray(_packer(None)(array)) if stored.is_packed else array
    if not stored.is_packed:
        return array
    given = automatic(array.sharding)
    packed: Sharding | None = given
    if _splits_bytes(stored, given):
        # Neighbours in a byte come together before they are stored: their axis is not cut.
        spec = given.spec[: array.ndim - 1] if isinstance(given, NamedSharding) else ()
        packed = NamedSharding(given.mesh, PartitionSpec(*spec)) if isinstance(given, NamedSharding) else None
    return _packer(packed)(jax.device_put(array, given))


def from_stored(stored: Stored, array: jax.Array, sharding: Sharding) -> jax.Array:
    """Return what was stored as the array of the model."""
    if stored.is_packed:
        array = _unpacker(stored.dtype, stored.shape[-1], automatic(sharding))(array)
    return jax.device_put(array, sharding)


@functools.lru_cache
def _packer(sharding: Sharding | None) -> Any:
    return jax.jit(pack, out_shardings=sharding)


@functools.lru_cache
def _unpacker(dtype: str, size: int, sharding: Sharding) -> Any:
    return jax.jit(functools.partial(unpack, dtype=dtype, size=size), out_shardings=sharding)


def choose_sharding(array: Stored, asked: Sharding | ChooseSharding | None) -> Sharding:
    """Return the sharding of one array.

    Raises:
      ValueError: it does not divide the array, or gives a device half a byte.
      TypeError: the function returned something else.
    """
    if asked is None:
        return jnp.zeros(()).sharding
    sharding = asked if isinstance(asked, Sharding) else asked(array.path, array.shape, array.dtype)
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding gave {type(sharding).__name__} for {array.path}; return a jax.sharding.Sharding")
    try:
        part = sharding.shard_shape(array.shape)
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{array.path} of shape {array.shape} does not take its sharding ({first_line(error)}); "
            "choose another for it"
        ) from None
    if array.is_packed and _splits_bytes(array, sharding):
        raise ValueError(
            f"{array.path}: its sharding cuts axis {len(array.shape) - 1} of size {array.shape[-1]} in parts of "
            f"{part[-1]} elements of {array.dtype}, which lie two to a byte; cut that axis in parts of an even size, "
            "or another axis"
        )
    return sharding


def _splits_bytes(array: Stored, sharding: Sharding) -> bool:
    part = sharding.shard_shape(array.shape)[-1]
    return part != array.shape[-1] and part % 2 == 1


def automatic(sharding: Sharding) -> Sharding:
    """Return the same cut on a mesh whose axes the compiler handles: packing has no sharding rules to spell out."""
    if not isinstance(sharding, NamedSharding) or all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return sharding
    names = sharding.mesh.axis_names
    devices: Any = sharding.mesh.devices
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def first_line(error: Exception) -> str:
    """Describe an error of another library in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:400]}" if lines else type(error).__name__
