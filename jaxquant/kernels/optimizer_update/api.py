"""``optimizer_update`` of a parameter of any rank, sharded or not, on the platform for which it is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, NamedSharding

from jaxquant.core.sharding import explicit_sharding, platform_of
from jaxquant.kernels.optimizer_update.reference import Body, Result
from jaxquant.kernels.optimizer_update.tuning import MAX_ELEMENTS, PACKED, blocks_for
from jaxquant.kernels.platforms import is_interpretable, load_kernel, sharding_refusal

Array = jax.Array


def refusal(
    arrays: Sequence[Array], axis: int, groups: Sequence[int], sharding: NamedSharding | None = None
) -> str | None:
    """Return the reason why the kernel cannot update a parameter, or None if it can.

    Args:
      arrays: arrays with the parameter's shape, at least one.
      axis: axis of the groups, counted from the end.
      groups: sizes of the groups.
      sharding: sharding of the parameter, as in ``update``.
    """
    x, step = arrays[0], math.lcm(*groups)
    if (platform := platform_of(x)) not in ("tpu", "cpu"):
        return f"optimizer_update has no kernel for platform {platform!r}"
    if jax.config.read("jax_enable_x64"):
        return "the optimizer_update kernel uses 32-bit indices, but jax_enable_x64 is on"
    if axis == -1:
        return "the optimizer_update kernel needs another group axis than the last; set quantize_state(…, axis=…)"
    place = _sharding_of(x, sharding)
    if len({each.spec for each in map(explicit_sharding, arrays) if each is not None}) > 1:
        return "the arrays of the parameter have different shardings on a mesh with explicit axes"
    if place is None:
        if why := sharding_refusal(*arrays):
            return f"{why}; pass the sharding of the parameter to quantize_state as shardings=…"
        if platform == "cpu" and not is_interpretable(*arrays):
            return "on CPUs, the optimizer_update kernel does not support values that differ between mesh devices"
    shape = x.shape if place is None else place.shard_shape(x.shape)
    rows, tail = shape[axis], shape[axis:][1:]
    if rows % step:
        return f"a device has {rows} rows of {x.shape}, not a multiple of group size {' or '.join(map(str, groups))}"
    if len(tail) == 1 and step % PACKED:
        return f"the optimizer_update kernel needs groups of a multiple of {PACKED} rows, not of {step}"
    block, last = blocks_for(rows, tail, step, max(groups))
    if block * last * math.prod(tail[:-1]) > MAX_ELEMENTS:
        return f"optimizer_update supports up to {MAX_ELEMENTS} elements in {step} rows, but the shape is {x.shape}"
    return None


def update(
    body: Body,
    scalars: Sequence[Array],
    arrays: Sequence[Array],
    results: Sequence[Result],
    *,
    axis: int,
    step: int,
    sharding: NamedSharding | None = None,
    changes: Array | None = None,
) -> list[Array]:
    """Compute ``reference.update`` of a parameter; each device computes its shard. ``refusal`` must return None.

    Args:
      body, scalars, results, changes: arguments of the reference.
      arrays: arrays of the parameter's shape, or with fewer elements along ``axis``.
      axis: axis of the groups, counted from the end.
      step: number of rows that must be in one block.
      sharding: sharding of all arrays, for automatic mesh axes, where the types of the arrays do not contain it.
    """
    run, interpret = load_kernel("optimizer_update", "tpu").update, platform_of(arrays[0]) == "cpu"

    def local(scalars: Sequence[Array], changes: Array | None, arrays: Sequence[Array]) -> list[Array]:
        def flat(x: Array) -> Array:
            return x.reshape(math.prod(x.shape[:axis]), *x.shape[axis:])

        flattened = [flat(x) for x in arrays]
        out = run(body, scalars, flattened, results, step=step, changes=changes, interpret=interpret)
        lead = arrays[0].shape[:axis]
        return [x.reshape(*lead, *x.shape[1:]) for x in out]

    place = _sharding_of(arrays[0], sharding)
    if place is None:
        return local(scalars, changes, arrays)
    none = jax.sharding.PartitionSpec()
    return jax.shard_map(
        local, mesh=place.mesh, in_specs=(none, none, place.spec), out_specs=place.spec, check_vma=False
    )(list(scalars), changes, list(arrays))


def _sharding_of(x: Array, sharding: NamedSharding | None) -> NamedSharding | None:
    """Return the sharding of a parameter, or None if it has none or is already a device's shard (``jax.shard_map``)."""
    kinds = jax.typeof(x).sharding.mesh.axis_types
    is_part = bool(kinds) and all(kind == AxisType.Manual for kind in kinds)
    return explicit_sharding(x) or (None if is_part else sharding)
