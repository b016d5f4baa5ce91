"""Rows in groups: quantization of the operands of a ragged matmul, each group separately.

If the recipe has ``shares_experts``, all groups share one per-tensor scale, as if all rows were one group.

Shapes: M rows, C columns, G groups.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import compute_scale, quantize, quantize_with_scale
from jaxquant.core.recipe import FORWARD, Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, fold
from jaxquant.core.scales import SMALLEST_SCALE, absolute, decode_scale, power_of_two_below
from jaxquant.core.sharding import all_reduce
from jaxquant.formats import encode_tensor
from jaxquant.ops.contract import DEQUANTIZED_MARK, to_float_operand
from jaxquant.ops.gradients import without_outer
from jaxquant.ops.operand import cast_dtype

Array = jax.Array


class Rows(NamedTuple):
    """Quantized rows with one scale per group: qvalue [M, C], scale [G, 1] or [G, C].

    Rows that have one scale each are a ``QTensor`` instead.
    """

    qvalue: Array
    scale: Array

    def spread(self, ids: Array) -> Array:
        """Return the scale of every row."""
        return expand_groups(self.scale, ids)

    def dequantize(self, ids: Array, dtype: str) -> Array:
        return (self.qvalue.astype(jnp.float32) * self.spread(ids)).astype(dtype)


class Groups(NamedTuple):
    """Rows in groups.

    Attributes:
      ids: group of every row, [M]; G for rows after the last group.
      sizes: rows of each group, [G].
    """

    ids: Array
    sizes: Array

    @classmethod
    def of(cls, sizes: Array, rows: int) -> Groups:
        sizes = sizes.astype(jnp.int32)  # sums and differences of unsigned or short integers wrap around
        return cls(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right"), sizes)

    @property
    def starts(self) -> Array:
        """The first row of each group, [G]."""
        return jnp.cumsum(self.sizes) - self.sizes

    def zero_ungrouped(self, rows: Array) -> Array:
        """Zero the rows after the last group."""
        return jnp.where((self.ids < self.sizes.size)[:, None], rows, 0)

    def largest(self, amax: Array, except_axes: Collection[str]) -> Array:
        """Return the largest amax of each row's group, [M, 1, …], from the amaxes of blocks, [M, …]."""
        rows = amax.reshape(self.ids.size, -1)
        found = all_reduce(jax.lax.pmax, group_amax(rows, self.ids, self.sizes.size).max(axis=1), amax, except_axes)
        return expand_groups(found, self.ids).reshape(-1, *[1] * (amax.ndim - 1))


class Slabs(NamedTuple):
    """Rows, sorted by group, in T slabs of ``step`` rows. Each group is padded with zeros to whole slabs.

    Tiles along the rows lie within a slab, and therefore within a group.

    Attributes:
      source: index of the row that is copied to each place of a slab, [T, step]; M for a place with zeros.
      groups: group of each slab, and number of slabs of each group.
    """

    source: Array
    groups: Groups

    @classmethod
    def of(cls, groups: Groups, step: int) -> Slabs:
        rows, count = groups.ids.size, groups.sizes.size
        # Upper bound of the number of slabs, for all group sizes.
        slabs = Groups.of(-(-groups.sizes // step), max(1, (rows + min(rows, count) * (step - 1)) // step))
        first = jnp.arange(slabs.ids.size) - expand_groups(slabs.starts, slabs.ids)
        place = first[:, None] * step + jnp.arange(step)[None]
        is_row = (slabs.ids < count)[:, None] & (place < expand_groups(groups.sizes, slabs.ids)[:, None])
        return cls(jnp.where(is_row, expand_groups(groups.starts, slabs.ids)[:, None] + place, rows), slabs)

    @property
    def rows(self) -> Groups:
        """The rows of all slabs, in groups."""
        return Groups(jnp.repeat(self.groups.ids, self.source.shape[1]), self.groups.sizes * self.source.shape[1])

    def copy_rows(self, rows: Array) -> Array:
        """Copy rows [M, C] to the rows [T · step, C] of all slabs."""
        if not rows.shape[0]:
            return jnp.zeros((self.source.size, rows.shape[1]), rows.dtype)
        return jnp.take(rows, self.source.ravel(), axis=0, mode="fill", fill_value=0)

    def quantize(
        self, recipe: Recipe, x: Array, spec: TensorSpec, key: RandomKey | None, floor: float = SMALLEST_SCALE
    ) -> QTensor | Rows:
        """Quantize slabs along their rows: in tiles with shape [T, step, C], or with one scale for a group's rows."""
        if spec.tile_size is None:
            return quantize_rows(recipe, x, spec, self.rows, True, key, floor)
        x = x.reshape(*self.source.shape, x.shape[1])
        whole = functools.partial(self.groups.largest, except_axes=recipe.expert_axes)
        compute = cast_dtype(recipe, x.dtype.name)
        return quantize(x, spec, (1,), key=key, batch=(0,), floor=floor, outer_amax=whole, compute_dtype=compute)


def expand_groups(per_group: Array, ids: Array) -> Array:
    return jnp.take(per_group, ids, axis=0, mode="clip")


def group_amax(x: Array, ids: Array, groups: int) -> Array:
    """Return the largest magnitude of each group and column; 0 for an empty group."""
    largest = jax.ops.segment_max(absolute(x).astype(jnp.float32), ids, groups + 1, indices_are_sorted=True)
    return jnp.maximum(largest[:groups], 0)


def with_groups(recipe: Recipe, state: Any) -> Any:
    """Return the state with a leading axis of groups, which has size 1 if all groups share one state."""
    return jax.tree.map(lambda x: x[None], state) if recipe.shares_experts else state


def scaling_groups(recipe: Recipe, groups: Groups) -> Groups:
    """Return the groups that have separate per-tensor scales."""
    if not recipe.shares_experts:
        return groups
    return Groups(jnp.where(groups.ids < groups.sizes.size, 0, 1), jnp.sum(groups.sizes, keepdims=True))


def quantize_rows(
    recipe: Recipe,
    x: Array,
    spec: TensorSpec,
    groups: Groups,
    contracts_rows: bool,
    key: RandomKey | None,
    floor: float = SMALLEST_SCALE,
) -> QTensor | Rows:
    """Quantize rows, with one scale per row, or one per group for per-tensor scales and for contracted rows."""
    if spec.granularity == "per_tensor":
        groups = scaling_groups(recipe, groups)
    compute, (ids, sizes) = cast_dtype(recipe, x.dtype.name), groups
    has_own = spec.granularity in ("per_channel", "per_tile") and spec.calibration.method != "fixed"
    if has_own and not contracts_rows:
        whole = functools.partial(groups.largest, except_axes=recipe.expert_axes) if x.size else None
        return quantize(x, spec, (1,), key=key, floor=floor, outer_amax=whole, compute_dtype=compute)
    is_whole = spec.granularity == "per_tensor"  # one scale for the parts on all devices
    amax = group_amax(x, ids, sizes.size)
    statistic = amax if has_own else amax.max(axis=1, keepdims=True)
    statistic = all_reduce(jax.lax.pmax, statistic, x, recipe.expert_axes) if is_whole else statistic
    if (average := spec.calibration.average) is not None:
        unit = power_of_two_below(statistic)  # the division is exact, and no square overflows
        each = average[0](x.astype(jnp.float32) / expand_groups(unit, ids))
        total = jax.ops.segment_sum(each, ids, sizes.size + 1, indices_are_sorted=True)[: sizes.size]
        total = total if has_own else total.sum(axis=1, keepdims=True)
        count = sizes[:, None].astype(jnp.float32) * (1 if has_own else x.shape[1])
        if is_whole:
            total, count = (all_reduce(jax.lax.psum, each, x, recipe.expert_axes) for each in (total, count))
        statistic = average[1](total / jnp.maximum(count, 1)) * unit
    # A block of one element: ``compute_scale`` uses each group's statistic as it is.
    own = dataclasses.replace(spec, granularity="per_channel", tile_size=None, free_size=None)
    scale = decode_scale(compute_scale(statistic, own, (1, 1), floor).scale)
    return Rows(quantize_with_scale(x, spec, expand_groups(scale, ids), None, key, compute).qvalue, scale)


def slab_size(recipe: Recipe, lhs: Any) -> int:
    """Return the number of rows of a slab for the weight gradient: whole tiles, EDEN vectors and rotations; 0 if none.

    Args:
      recipe: recipe of the matmul.
      lhs: residual of the activation; its forward tiles are quantized again, along the rows.
    """
    matmul = recipe.drhs
    if not isinstance(matmul.rhs, TensorSpec):
        return 0
    again = recipe.fwd.lhs if matmul.lhs == FORWARD and isinstance(lhs, QTensor) else None
    specs = [spec for spec in (matmul.lhs, matmul.rhs, again) if isinstance(spec, TensorSpec)]
    sizes = [size for spec in specs for size in (spec.tile_size, spec.micro and spec.micro.eden) if size]
    sizes += [] if matmul.rotation is None else [matmul.rotation.size]
    return math.lcm(*sizes) if sizes else 0


def quantize_weights(recipe: Recipe, x: Array, spec: TensorSpec, axis: int, key: RandomKey | None) -> QTensor:
    """Quantize each group's weight separately, for a contraction of the given axis of the weight."""
    compute = cast_dtype(recipe, x.dtype.name)
    if recipe.shares_experts and spec.granularity == "per_tensor":
        return quantize(x, spec, (axis + 1,), key=key, compute_dtype=compute)
    if (codec := spec.codec) is not None:
        return jax.vmap(lambda weight: encode_tensor(weight, codec, (axis,)))(x)
    keys = None if key is None else fold(key, jnp.arange(x.shape[0], dtype=jnp.uint32))
    more = {"except_axes": recipe.expert_axes, "compute_dtype": compute}
    own = functools.partial(quantize, spec=spec, axes=(axis,), **more)
    return jax.vmap(lambda weight, key: own(weight, key=key))(x, keys)


# -- operands: rows with scales of their groups (Rows) or their own (QTensor), slabs and weights (QTensor), arrays -----


def has_free_scales(side: Any, axis: int) -> bool:
    """Check whether the scales of a quantized operand are shared along its contraction axis."""
    if not isinstance(side, QTensor):
        return isinstance(side, Rows)
    if side.codec is not None or side.zero_point is not None:
        return False
    sizes = zip(side.scale.shape, side.shape, strict=True)
    return all(n == 1 if at == axis else n in (1, size) for at, (n, size) in enumerate(sizes))


def row_scales(rows: QTensor | Rows, groups: Groups) -> Array:
    return rows.spread(groups.ids) if isinstance(rows, Rows) else rows.full_scale()


def slice_rows(rows: Any, part: slice) -> Any:
    if isinstance(rows, Rows):
        return Rows(rows.qvalue[part], rows.scale)
    return rows.replace(lambda _, each: each[part]) if isinstance(rows, QTensor) else rows and rows[part]


def to_float(side: Any, groups: Groups, dtype: str) -> Array:
    if isinstance(side, Rows):
        return side.dequantize(groups.ids, dtype)
    return dequantize(side, dtype) if isinstance(side, QTensor) else side


def to_operand(side: Any, groups: Groups, dtype: str) -> Array:
    """Return an operand of a float matmul, without its outer scale, which multiplies the product."""
    if isinstance(side, Rows):
        return checkpoint_name(side.dequantize(groups.ids, dtype), DEQUANTIZED_MARK)
    return to_float_operand(side, dtype)


def slabs_to_rows(side: Any) -> Any:
    """Return slabs as rows, without their outer scales."""
    if not isinstance(side, QTensor):
        return side
    slabs, step, columns = side.shape
    return dataclasses.replace(side, outer_scale=None).reshape((slabs * step, columns))


def outer_scale(side: QTensor, groups: Groups, contracts_rows: bool) -> Array:
    """Return outer scales in the layout of the result: one per row, per row's weight, or per slab's group."""
    scale = side.outer_scale
    assert scale is not None
    if contracts_rows:
        return expand_groups(scale, groups.starts // side.shape[1])
    return scale if scale.ndim == 2 else expand_groups(scale[:, 0], groups.ids)


def split_outer(side: Any, groups: Groups, dtype: str) -> tuple[Array, Array | None]:
    """Return the values to quantize again, and the outer scale to apply later; see ``gradients.without_outer``."""
    return (to_float(side, groups, "float32"), None) if isinstance(side, Rows) else without_outer(side, dtype)
