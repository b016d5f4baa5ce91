"""QTensor: a quantized array, ``x ≈ (qvalue − zero_point) · scale``."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxquant.core.sharding import broadcastable, merge_axes, split_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Hold quantized elements and what multiplies them.

    Attributes:
      qvalue: the elements, any shape.
      scale: float32, the rank of qvalue. Along each axis its size is 1 (shared), the axis (one each) or a divisor of
        the axis (neighbours in a tile share one).
      zero_point: in qvalue's dtype and scale's shape, or None for symmetric quantization.
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim


INPUT_SCALE = "input_scale"
"""Name, beside a converted kernel, of the static scale of the activation."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tensor", "input_scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class Weight:
    """Hold a converted kernel on its way into an op, in place of the float one.

    Attributes:
      tensor: the quantized kernel.
      dtype: name of the float dtype in which the op would have read the float kernel; it decides the result's.
      input_scale: float32, shape (1,), the static scale of the activation, or None where the activation has its own.
    """

    tensor: QTensor
    dtype: str
    input_scale: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim


def tile_counts(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> dict[int, int]:
    """Map each axis that a scale cuts in tiles to its number of tiles."""
    pairs = enumerate(zip(shape, scale_shape, strict=True))
    return {axis: count for axis, (size, count) in pairs if count not in (1, size)}


def expand_scale(scale: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, dict[int, int]]:
    """Give a scale one broadcastable axis beside each tile axis.

    Returns:
      The scale reshaped to broadcast against ``split_axes(x, counts)`` and the counts.
    """
    counts = tile_counts(shape, scale.shape)
    expanded: list[int] = []
    for axis, size in enumerate(scale.shape):
        expanded += [size, 1] if axis in counts else [size]
    return scale.reshape(expanded), counts


def apply_scaled(operation, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Compute ``operation(x, scale)`` elementwise, with a scale that may be tiled."""
    if not tile_counts(x.shape, scale.shape):
        return operation(x, scale)
    expanded, counts = expand_scale(scale, x.shape)
    split = split_axes(x, counts)
    return merge_axes(operation(split, broadcastable(expanded, split)), x)


def dequantize(tensor: QTensor, dtype: str = "float32") -> jax.Array:
    """Return ``(qvalue − zero_point) · scale``, computed in float32 and rounded once to ``dtype``."""
    values = tensor.qvalue.astype(jnp.float32)
    if tensor.zero_point is not None:
        values = apply_scaled(jnp.subtract, values, tensor.zero_point.astype(jnp.float32))
    return apply_scaled(jnp.multiply, values, tensor.scale).astype(dtype)


def nbytes(tensor: QTensor) -> int:
    """Count the bytes of qvalue, scale and zero point; sub-byte elements are counted packed."""
    leaves = [leaf for leaf in (tensor.qvalue, tensor.scale, tensor.zero_point) if leaf is not None]
    return sum(math.ceil(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) / 8) for leaf in leaves)
