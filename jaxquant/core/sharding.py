"""Sharding of an array, read from its type: the mesh axes along which it varies, and the placement of its parts.

Inside ``jax.shard_map`` (with its default ``check_vma=True``) a type contains the mesh axes along which the devices
hold different values. Under axes of ``AxisType.Explicit`` it contains the sharding. Otherwise (one device, automatic
sharding, ``check_vma=False``) it contains neither, and the functions in this file return their argument unchanged.
Exception: ``all_reduce`` then reduces over all manual axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import AbstractDevice, AxisType, NamedSharding, PartitionSpec

from jaxquant.core.rounding import RandomKey, fold

Array = jax.Array
Sharding = NamedSharding | PartitionSpec | None


def varying_axes(x: Array) -> frozenset[str]:
    """Return the manual mesh axes along which devices hold different values of x."""
    return jax.typeof(x).manual_axis_type.varying


def _differing_axes(x: Array) -> frozenset[str]:
    """Return the manual mesh axes along which devices may hold different values of x; all if ``check_vma=False``."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)
    is_unchecked = manual and not varying_axes(jax.lax.axis_index(min(manual)))  # an axis index always varies
    return manual if is_unchecked else varying_axes(x)


def explicit_sharding(x: Array) -> NamedSharding | None:
    """Return the sharding in the type of x, or None if its mesh has no explicit axis."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def is_whole(x: Array) -> bool:
    """Return whether no compiler can shard x: it is on one device, or ``jax.shard_map`` covers all axes of its mesh.

    If the type has no mesh, automatic sharding is assumed if there are several devices.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return not may_shard(x)
    return mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def may_shard(x: Array) -> bool:
    """Return whether a compiler may shard x although its type has no mesh, because there are several devices."""
    return jax.typeof(x).sharding.mesh.empty and jax.device_count() > 1


def device_parts(x: Array, axis: int) -> int:
    """Return the number of equal parts of an axis, one on each device; 1 if neither type nor context has a mesh.

    The type contains the explicit mesh axes that shard an axis. Automatic axes are not in the type, so each of them is
    assumed to shard the axis. For an array without a mesh in its type, the mesh of the context is used. Devices outside
    that mesh take no part in the computation.
    """
    sharding = jax.typeof(x).sharding
    mesh = jax.sharding.get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    entry = _entries(sharding, x.ndim)[axis]
    names = entry if isinstance(entry, tuple) else (entry,)
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    count = math.prod(size for name, size, kind in kinds if kind == AxisType.Auto or name in names)
    return math.gcd(count, x.shape[axis]) if x.size else 1


def _device_of(x: Array) -> AbstractDevice | None:
    """Return the device of x's mesh or of the mesh in context; the result of a library's primitive may have no mesh."""
    return jax.typeof(x).sharding.mesh.abstract_device or jax.sharding.get_abstract_mesh().abstract_device


def on_device_of(shapes: Any) -> AbstractContextManager[Any]:
    """Return a context in which arrays without a mesh are computed for the device in the mesh of ``shapes``, if any."""
    meshes = [
        leaf.sharding.mesh for leaf in jax.tree.leaves(shapes) if hasattr(getattr(leaf, "sharding", None), "mesh")
    ]
    known = next((mesh.abstract_mesh for mesh in meshes if mesh.abstract_mesh.abstract_device), None)
    return nullcontext() if known is None else jax.sharding.use_abstract_mesh(known)


def platform_of(x: Array) -> str:
    """Return the platform that computes x ("cpu", "gpu", "tpu"); its mesh may describe an unattached chip."""
    device = _device_of(x) or getattr(jax.config, "jax_default_device", None) or jax.default_backend()
    return getattr(device, "platform", str(device))


def device_kind_of(*arrays: Array) -> str:
    """Return the device kind that computes arrays ("NVIDIA B200"); their mesh may describe an unattached chip."""
    device = next(filter(None, map(_device_of, arrays)), None)
    device = device or getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
    return getattr(device, "device_kind", str(device))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Varying axes and explicit sharding of an operand. Hashable, so that it can be static in a jit."""

    varying: frozenset[str]
    sharding: NamedSharding | None

    @classmethod
    def of(cls, x: Array, like: Array) -> Placement:
        """Return the placement of x; x is replicated if it has none and ``like`` is on an explicit mesh."""
        sharding, other = explicit_sharding(x), explicit_sharding(like)
        if sharding is None and other is not None:
            sharding = NamedSharding(other.mesh, PartitionSpec())
        return cls(varying_axes(x), sharding)


def untransposed(sharding: NamedSharding | None, order: Sequence[int]) -> NamedSharding | None:
    """Return the sharding that ``transpose(order)`` converts to ``sharding``."""
    if sharding is None:
        return None
    entries = _entries(sharding, len(order))
    return _placed(sharding, (entries[order.index(axis)] for axis in range(len(order))))


def _entries(sharding: NamedSharding, ndim: int) -> list[Any]:
    """Return the mesh axes of each axis of an array."""
    return [*sharding.spec, *[None] * (ndim - len(sharding.spec))]


def _placed(sharding: NamedSharding, entries: Iterable[Any]) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def fit_varying(x: Array, expected: frozenset[str]) -> Array:
    """Make a cotangent vary along exactly the mesh axes of its primal.

    Sums over the axes along which only the cotangent varies, because each device holds only a partial sum.
    """
    present = varying_axes(x)
    if present - expected:
        x = jax.lax.psum(x, tuple(sorted(present - expected)))
    if expected - present:
        x = jax.lax.pcast(x, tuple(sorted(expected - present)), to="varying")
    return x


def all_reduce(reduce, statistic: Array, x: Array, except_axes: Collection[str] = ()) -> Array:
    """Reduce a statistic of x over the devices that hold different parts of x.

    Args:
      reduce: collective such as ``jax.lax.pmax``.
      statistic: statistic of the local part.
      x: tensor.
      except_axes: mesh axes along which each device has a separate statistic.
    """
    axes = _differing_axes(x).difference(except_axes)
    return reduce(statistic, tuple(sorted(axes))) if axes else statistic


def device_key(key: RandomKey, x: Array) -> RandomKey:
    """Return a random key that differs between devices that hold different parts of x."""
    for axis in sorted(varying_axes(x)):
        key = fold(key, jax.lax.axis_index(axis))
    return key


def to_named_sharding(sharding: Sharding, like: Array) -> NamedSharding | None:
    """Convert a partition spec to a sharding, on the mesh of an operand or otherwise of the context."""
    if not isinstance(sharding, PartitionSpec):
        return sharding
    own = explicit_sharding(like)
    return NamedSharding(jax.sharding.get_abstract_mesh() if own is None else own.mesh, sharding)


def fit_sizes(sharding: NamedSharding | None, shape: Sequence[int]) -> NamedSharding | None:
    """Return a sharding that does not shard axes of size 1."""
    if sharding is None:
        return None
    entries = _entries(sharding, len(shape))
    return _placed(sharding, (entry if size > 1 else None for entry, size in zip(entries, shape, strict=True)))


def placed_like(x: Array, like: Array) -> Array:
    """Return x with the explicit sharding of an array of its shape, if that array has one."""
    sharding = explicit_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def gather_axis(x: Array, axis: int) -> Array:
    """Gather one axis of x, for an operation that mixes its elements."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    entries = _entries(sharding, x.ndim)
    entries[axis] = None
    return jax.sharding.reshard(x, _placed(sharding, entries))


def split_axes(x: Array, counts: dict[int, int]) -> Array:
    """Reshape every axis of ``counts`` into (number of tiles, size of a tile). Other axes do not change.

    The sharding of an axis moves to its tiles if possible, otherwise to the elements of a tile; otherwise the axis is
    gathered.
    """
    sharding = explicit_sharding(x)
    parts = [[counts[axis], size // counts[axis]] if axis in counts else [size] for axis, size in enumerate(x.shape)]
    place = None
    if sharding is not None:
        spec: list = []
        for entry, sizes in zip(_entries(sharding, x.ndim), parts, strict=True):
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            devices = math.prod(sharding.mesh.shape[name] for name in names)
            holder = next((i for i, size in enumerate(sizes) if size % devices == 0), None)
            spec += [entry if i == holder else None for i in range(len(sizes))]
        place = _placed(sharding, spec)
    return jax.lax.reshape(x, [size for sizes in parts for size in sizes], out_sharding=place)


def merge_axes(x: Array, like: Array) -> Array:
    """Reshape x to the shape and sharding of ``like``: the inverse of ``split_axes``."""
    return jax.lax.reshape(x, like.shape, out_sharding=explicit_sharding(like))


def reshard_like(scale: Array, x: Array) -> Array:
    """Reshard a scale along the axes of x, so that their product needs no communication."""
    target = explicit_sharding(x)
    if target is None or scale.ndim != x.ndim:
        return scale
    return jax.sharding.reshard(scale, fit_sizes(target, scale.shape))
