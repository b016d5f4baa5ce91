"""Rows in groups: how operands of a matmul of groups are quantized, each group by itself.

A recipe that shares scales of experts has, of whole tensors, one for all groups: its rows are then of one group.

Shapes: M rows, C columns, G groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import compute_scale, quantize, quantize_with_scale
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.scales import SMALLEST_SCALE, absolute, power_of_two_below
from jaxquant.core.sharding import over_devices
from jaxquant.ops.operand import forward_key

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["by_group"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """Quantized rows of all groups: scale [M, 1], or [G, 1] or [G, columns] where it is the group's."""

    qvalue: Array
    scale: Array
    by_group: bool

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.qvalue[part], self.scale if self.by_group else self.scale[part], self.by_group)

    def spread(self, ids: Array) -> Array:
        """Return the scale of every row."""
        return of_rows(self.scale, ids) if self.by_group else self.scale

    def dequantize(self, ids: Array, dtype: str) -> Array:
        return (self.qvalue.astype(jnp.float32) * self.spread(ids)).astype(dtype)


class Groups(NamedTuple):
    """Rows in groups.

    Attributes:
      ids: the group of every row, [M]; G behind the last.
      sizes: rows of each group, [G].
    """

    ids: Array
    sizes: Array

    @classmethod
    def of(cls, sizes: Array, rows: int) -> Groups:
        return cls(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right"), sizes)

    def zero_others(self, rows: Array) -> Array:
        """Zero the rows behind the last group."""
        return jnp.where((self.ids < self.sizes.size)[:, None], rows, 0)


def of_rows(per_group: Array, ids: Array) -> Array:
    return jnp.take(per_group, ids, axis=0, mode="clip")


def group_amax(x: Array, ids: Array, groups: int) -> Array:
    """Return the largest magnitude of each group and column, 0 of an empty group."""
    largest = jax.ops.segment_max(absolute(x).astype(jnp.float32), ids, groups + 1, indices_are_sorted=True)
    return jnp.maximum(largest[:groups], 0)


def with_groups(recipe: Recipe, state: Any) -> Any:
    """Return state with a leading axis of groups: of one, where all share theirs."""
    return jax.tree.map(lambda x: x[None], state) if recipe.shares_experts else state


def scaling_groups(recipe: Recipe, groups: Groups) -> Groups:
    """Return groups as far as scales of whole tensors go."""
    if not recipe.shares_experts:
        return groups
    return Groups(jnp.where(groups.ids < groups.sizes.size, 0, 1), jnp.sum(groups.sizes, keepdims=True))


def quantize_rows(
    recipe: Recipe,
    x: Array,
    spec: TensorSpec,
    groups: Groups,
    contracts_rows: bool,
    key: Array | None,
    floor: float = SMALLEST_SCALE,
) -> Rows:
    """Quantize rows with scales of their own (contracting columns) or of their group (per tensor, contracting rows)."""
    if spec.granularity == "per_tensor":
        groups = scaling_groups(recipe, groups)
    ids, sizes = groups
    if spec.granularity == "per_channel" and not contracts_rows and spec.calibration.method != "fixed":
        tensor = quantize(x, spec, (1,), key=key, floor=floor)
        return Rows(tensor.qvalue, tensor.scale, False)
    by_column = spec.granularity == "per_channel" and contracts_rows and spec.calibration.method != "fixed"
    is_whole = spec.granularity == "per_tensor"  # of the parts on all devices
    amax = group_amax(x, ids, sizes.size)
    statistic = amax if by_column else amax.max(axis=1, keepdims=True)
    statistic = over_devices(jax.lax.pmax, statistic, x, recipe.expert_axes) if is_whole else statistic
    if spec.calibration.method == "rms":
        unit = power_of_two_below(statistic)  # it costs no bit, and no square overflows
        squares = jnp.square(x.astype(jnp.float32) / of_rows(unit, ids))
        total = jax.ops.segment_sum(squares, ids, sizes.size + 1, indices_are_sorted=True)[: sizes.size]
        total = total if by_column else total.sum(axis=1, keepdims=True)
        count = sizes[:, None] * (1 if by_column else x.shape[1])
        if is_whole:
            total, count = (over_devices(jax.lax.psum, each, x, recipe.expert_axes) for each in (total, count))
        statistic = jnp.sqrt(total / jnp.maximum(count, 1)) * unit
    # The statistic of one number is that number.
    own = dataclasses.replace(spec, granularity="per_channel")
    scale = compute_scale(statistic, own, (1, 1), floor).scale
    return Rows(quantize_with_scale(x, spec, of_rows(scale, ids), None, key).qvalue, scale, True)


def quantize_weights(recipe: Recipe, x: Array, spec: TensorSpec, axis: int, key: Array | None) -> QTensor:
    """Quantize each group's weight by itself, contracting an axis of it."""
    own = forward_key(x, spec, key)
    if recipe.shares_experts and spec.granularity == "per_tensor":
        return quantize(x, spec, (axis + 1,), key=own)
    keys = None if own is None else jax.random.split(own, x.shape[0])
    return jax.vmap(lambda weight, key: quantize(weight, spec, (axis,), key=key, except_axes=recipe.expert_axes))(
        x, keys
    )
