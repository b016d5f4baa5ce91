"""Rows in groups: how operands of a matmul of groups are quantized, each group by itself.

Shapes: M rows, C columns, G groups.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import absolute, compute_scale, quantize, quantize_with_scale
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.scales import SMALLEST_SCALE
from jaxquant.ops.operand import forward_key

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["by_group"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """Quantized rows of all groups: scale [M, 1], or [G, 1] or [G, columns] where it is the group's."""

    qvalue: Array
    scale: Array
    by_group: bool

    def spread(self, ids: Array) -> Array:
        """Return the scale of every row."""
        return of_rows(self.scale, ids) if self.by_group else self.scale

    def dequantize(self, ids: Array, dtype: str) -> Array:
        return (self.qvalue.astype(jnp.float32) * self.spread(ids)).astype(dtype)


def group_of_rows(sizes: Array, rows: int) -> Array:
    """Return the group of every row; G behind the last."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")


def of_rows(per_group: Array, ids: Array) -> Array:
    return jnp.take(per_group, ids, axis=0, mode="clip")


def group_amax(x: Array, ids: Array, groups: int) -> Array:
    """Return the largest magnitude of each group and column, 0 of an empty group."""
    largest = jax.ops.segment_max(absolute(x).astype(jnp.float32), ids, groups + 1, indices_are_sorted=True)
    return jnp.maximum(largest[:groups], 0)


def quantize_rows(
    x: Array,
    spec: TensorSpec,
    ids: Array,
    sizes: Array,
    contracts_rows: bool,
    key: Array | None,
    floor: float = SMALLEST_SCALE,
) -> Rows:
    """Quantize rows with scales of their own (contracting columns) or of their group (per tensor, contracting rows).

    Args:
      x: rows of all groups.
      spec: how.
      ids: group of each row.
      sizes: rows of each group.
      contracts_rows: whether the matmul sums over rows.
      key: random key, for stochastic rounding.
      floor: scales below it become 1.
    """
    groups = sizes.size
    if spec.granularity == "per_channel" and not contracts_rows and spec.calibration.method != "fixed":
        tensor = quantize(x, spec, (1,), key=key, floor=floor)
        return Rows(tensor.qvalue, tensor.scale, False)
    by_column = spec.granularity == "per_channel" and contracts_rows and spec.calibration.method != "fixed"
    if spec.calibration.method == "rms":
        total = jax.ops.segment_sum(jnp.square(x.astype(jnp.float32)), ids, groups + 1, indices_are_sorted=True)
        total = total[:groups] if by_column else total[:groups].sum(axis=1, keepdims=True)
        count = jnp.maximum(sizes, 1)[:, None] * (1 if by_column else x.shape[1])
        statistic = jnp.sqrt(total / count)
    else:
        statistic = group_amax(x, ids, groups)
        statistic = statistic if by_column else statistic.max(axis=1, keepdims=True)
    # The statistic of one number is that number.
    each = dataclasses.replace(spec, granularity="per_channel")
    scale = jnp.broadcast_to(compute_scale(statistic, each, (1, 1), floor).scale, statistic.shape)
    return Rows(quantize_with_scale(x, spec, of_rows(scale, ids), None, key).qvalue, scale, True)


def quantize_weights(x: Array, spec: TensorSpec, axis: int, key: Array | None) -> QTensor:
    """Quantize each group's weight by itself, contracting an axis of it."""
    own = forward_key(x, spec, key)
    keys = None if own is None else jax.random.split(own, x.shape[0])
    return jax.vmap(lambda weight, key: quantize(weight, spec, (axis,), key=key))(x, keys)
