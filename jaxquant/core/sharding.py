"""Read an array's place on the mesh from its type: the axes along which it varies, and where its parts lie.

Inside ``jax.shard_map`` (with its default ``check_vma=True``) a type names the mesh axes along which the devices hold
different values. Under axes of ``AxisType.Explicit`` it names the sharding. Elsewhere (one device, automatic sharding,
``check_vma=False``) it says neither, and functions here return their argument; ``all_reduce`` alone combines over all
manual axes where types name none.
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
    """Return the manual mesh axes along which devices may hold different values of x: all, where types name none."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1)
    is_unchecked = manual and not varying_axes(jax.lax.axis_index(min(manual)))  # an index differs by its meaning
    return manual if is_unchecked else varying_axes(x)


def explicit_sharding(x: Array) -> NamedSharding | None:
    """Return the sharding in the type of x; None where no axis of its mesh is explicit."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def is_whole(x: Array) -> bool:
    """Check whether no compiler can cut x: on one device, or inside ``jax.shard_map`` along all axes of its mesh.

    Where the type names no mesh, automatic sharding cannot be told from a single device but by how many there are.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        return not is_untold(x)
    return mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def is_untold(x: Array) -> bool:
    """Check whether the type of x leaves open if a compiler may cut it: it names no mesh, and there are devices."""
    return jax.typeof(x).sharding.mesh.empty and jax.device_count() > 1


def device_parts(x: Array, axis: int) -> int:
    """Count the equal parts of an axis that lie on one device each; 1 if neither its type nor the context has a mesh.

    The type names the explicit mesh axes that cut an axis. It does not name automatic ones, so each of them may cut it.
    An array without a mesh in its type is on the mesh of the context. Other devices take no part in the computation.
    """
    sharding = jax.typeof(x).sharding
    mesh = jax.sharding.get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    entry = _entries(sharding, x.ndim)[axis]
    names = entry if isinstance(entry, tuple) else (entry,)
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    count = math.prod(size for name, size, kind in kinds if kind == AxisType.Auto or name in names)
    return math.gcd(count, x.shape[axis]) if x.size else 1


def _device_of(x: Array) -> AbstractDevice | None:
    """Return what computes x by its mesh, or the one around it: the result of a library's primitive may have none."""
    return jax.typeof(x).sharding.mesh.abstract_device or jax.sharding.get_abstract_mesh().abstract_device


def on_device_of(shapes: Any) -> AbstractContextManager[Any]:
    """Return a context in which what lies on no mesh is computed by the device that shapes on a mesh name, if any."""
    meshes = [
        leaf.sharding.mesh for leaf in jax.tree.leaves(shapes) if hasattr(getattr(leaf, "sharding", None), "mesh")
    ]
    known = next((mesh.abstract_mesh for mesh in meshes if mesh.abstract_mesh.abstract_device), None)
    return nullcontext() if known is None else jax.sharding.use_abstract_mesh(known)


def platform_of(x: Array) -> str:
    """Return where x is computed, as jax names platforms ("cpu", "gpu", "tpu"): of its mesh, which may be absent."""
    device = _device_of(x) or getattr(jax.config, "jax_default_device", None) or jax.default_backend()
    return getattr(device, "platform", str(device))


def device_kind_of(*arrays: Array) -> str:
    """Return what computes arrays, as devices name their kind ("NVIDIA B200"): of their mesh, which may be absent."""
    device = next(filter(None, map(_device_of, arrays)), None)
    device = device or getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
    return getattr(device, "device_kind", str(device))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where an operand lies, as its type says it. Hashable, so that it can be static in a jit."""

    varying: frozenset[str]
    sharding: NamedSharding | None

    @classmethod
    def of(cls, x: Array, beside: Array) -> Placement:
        """Read the place of x; where x has none and ``beside`` lies on an explicit mesh, x is replicated there."""
        sharding, other = explicit_sharding(x), explicit_sharding(beside)
        if sharding is None and other is not None:
            sharding = NamedSharding(other.mesh, PartitionSpec())
        return cls(varying_axes(x), sharding)


def transposed(sharding: NamedSharding | None, order: Sequence[int]) -> NamedSharding | None:
    """Return the sharding that ``transpose(order)`` turns into ``sharding``."""
    if sharding is None:
        return None
    entries = _entries(sharding, len(order))
    return _placed(sharding, (entries[order.index(axis)] for axis in range(len(order))))


def _entries(sharding: NamedSharding, ndim: int) -> list[Any]:
    """Return the mesh axes of each axis of an array."""
    return [*sharding.spec, *[None] * (ndim - len(sharding.spec))]


def _placed(sharding: NamedSharding, entries: Iterable[Any]) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def fit_varying(x: Array, wanted: frozenset[str]) -> Array:
    """Make a cotangent vary along the axes of its primal and no others.

    It is summed over the axes in which it varies and its primal does not: each device holds the share of its own part.
    """
    present = varying_axes(x)
    if present - wanted:
        x = jax.lax.psum(x, tuple(sorted(present - wanted)))
    if wanted - present:
        x = jax.lax.pcast(x, tuple(sorted(wanted - present)), to="varying")
    return x


def all_reduce(reduce, statistic: Array, x: Array, except_axes: Collection[str] = ()) -> Array:
    """Reduce a statistic of x over the devices that hold different parts of x, so that it is that of the whole.

    Args:
      reduce: ``jax.lax.pmax`` and its like.
      statistic: of the local part.
      x: the tensor.
      except_axes: axes along which there is one statistic for each device.
    """
    axes = _differing_axes(x).difference(except_axes)
    return reduce(statistic, tuple(sorted(axes))) if axes else statistic


def device_key(key: RandomKey, x: Array) -> RandomKey:
    """Return a random key that differs between devices which hold different parts of x."""
    for axis in sorted(varying_axes(x)):
        key = fold(key, jax.lax.axis_index(axis))
    return key


def named(sharding: Sharding, like: Array) -> NamedSharding | None:
    """Complete a partition spec to a sharding, on the mesh of an operand or else that of the context."""
    if not isinstance(sharding, PartitionSpec):
        return sharding
    own = explicit_sharding(like)
    return NamedSharding(jax.sharding.get_abstract_mesh() if own is None else own.mesh, sharding)


def fit_sizes(sharding: NamedSharding | None, shape: Sequence[int]) -> NamedSharding | None:
    """Leave axes of size 1 unsharded."""
    if sharding is None:
        return None
    entries = _entries(sharding, len(shape))
    return _placed(sharding, (entry if size > 1 else None for entry, size in zip(entries, shape, strict=True)))


def placed_like(x: Array, like: Array) -> Array:
    """Return x in the explicit sharding of an array of its shape, where that has one."""
    sharding = explicit_sharding(like)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def whole_axis(x: Array, axis: int) -> Array:
    """Gather one axis of x, for an operation that mixes its elements."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    entries = _entries(sharding, x.ndim)
    entries[axis] = None
    return jax.sharding.reshard(x, _placed(sharding, entries))


def split_axes(x: Array, counts: dict[int, int]) -> Array:
    """Reshape every axis of ``counts`` into (tiles, size of a tile); other axes stay.

    A sharded axis leaves its sharding to the tiles, or else to their insides, or else is gathered.
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


def broadcastable(scale: Array, x: Array) -> Array:
    """Lay a scale of x's rank out as x is, so that the two multiply in place."""
    target = explicit_sharding(x)
    if target is None or scale.ndim != x.ndim:
        return scale
    return jax.sharding.reshard(scale, fit_sizes(target, scale.shape))
