"""QTensor: a quantized array, ``x ≈ (qvalue − zero_point) · scale``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxquant.core.blocks import Shape, apply_blocks, is_even, scale_shape
from jaxquant.core.scales import decode_scale

PARTS = ("qvalue", "scale", "zero_point", "outer_scale")
"""Arrays of a ``QTensor``, by the names under which they are stored."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=list(PARTS), meta_fields=["block"])
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Hold quantized elements and what multiplies them: ``x ≈ (qvalue − zero_point) · scale · outer_scale``.

    Invariants, for qvalue of shape (n₁, …) and blocks of shape (b₁, …), which ``check`` checks:

    - ``scale.shape = (⌈n₁ / b₁⌉, …)``, of float32, float8_e8m0fnu or float8_e4m3fn;
    - ``zero_point.shape = scale.shape``, in qvalue's dtype;
    - ``outer_scale.shape = (1, …)``, of float32;
    - where ``block`` is None, ``bᵢ = nᵢ / scale.shape[i]`` is whole.

    Attributes:
      qvalue: the elements, any shape.
      scale: of qvalue's rank. Along each axis its size is 1 (shared), the axis (one each) or the number of blocks.
      zero_point: None for symmetric quantization.
      outer_scale: one scale above all others, or None.
      block: shape of a block, static; None where the shapes tell it. Axes along which layers are stacked have 0 in it,
        which a loop over them takes away with the axis; axes that were added in front need none.
    """

    qvalue: Shaped[Array, "*shape"]
    scale: Float[Array, "*counts"]
    zero_point: Shaped[Array, "*counts"] | None = None
    outer_scale: Float[Array, "*ones"] | None = None
    block: Shape | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def parts(self) -> dict[str, jax.Array]:
        """The arrays that it has, by name."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}

    @classmethod
    def of_parts(cls, parts: Mapping[str, Any], block: Shape | None = None) -> QTensor:
        """Build from what ``parts`` gave; a leaf may be whatever stands in for an array."""
        return cls(**{name: parts.get(name) for name in PARTS}, block=block)  # pyright: ignore[reportArgumentType]

    def replace(self, change: Callable[[str, Any], Any]) -> QTensor:
        """Return one whose parts are ``change(name, part)``."""
        return self.of_parts({name: change(name, part) for name, part in self.parts.items()}, self.block)

    @property
    def blocks(self) -> Shape:
        """Shape of a block, one entry an axis."""
        if self.block is not None:
            block, gone = list(self.block), len(self.block) - self.ndim
            for _ in range(gone):
                block.remove(0)
            return (1,) * -gone + tuple(max(1, size) for size in block)
        return tuple(max(1, size // n) for size, n in zip(self.shape, self.scale.shape, strict=True))

    def full_scale(self) -> Float[Array, "*counts"]:
        """Return the scales in float32, the outer one multiplied in."""
        scale = decode_scale(self.scale)
        return scale if self.outer_scale is None else scale * self.outer_scale


def stacked_blocks(tensor: QTensor, axes: Sequence[int]) -> QTensor:
    """Return a tensor that knows along which of its axes layers were stacked.

    Args:
      tensor: of all layers, with the block of one.
      axes: positions of the stacked axes, ascending.
    """
    if tensor.block is None:
        return tensor
    block = list(tensor.block)
    for axis in axes:
        block.insert(axis, 0)
    return dataclasses.replace(tensor, block=tuple(block))


def make_qtensor(
    qvalue: Shaped[Array, "*shape"],
    scale: Float[Array, "*counts"],
    zero_point: Shaped[Array, "*counts"] | None = None,
    outer_scale: Float[Array, "*ones"] | None = None,
    block: Shape | None = None,
) -> QTensor:
    """Make a ``QTensor`` by hand, with its invariants checked.

    Args:
      qvalue, scale, zero_point, outer_scale, block: as in ``QTensor``.

    Raises:
      ValueError: an invariant does not hold; names the part, its shape and the one that would fit.
    """
    tensor = QTensor(qvalue, scale, zero_point, outer_scale, block)
    check(tensor)
    return tensor if block is None or not is_even(qvalue.shape, block) else dataclasses.replace(tensor, block=None)


def check(tensor: QTensor, name: str = "QTensor") -> None:
    """Check the invariants of a ``QTensor``.

    Args:
      tensor: of arrays or ``jax.ShapeDtypeStruct``.
      name: what errors call it, such as the path of a leaf.

    Raises:
      ValueError: an invariant does not hold.
    """
    shape, scale = tuple(tensor.shape), tuple(tensor.scale.shape)
    if len(scale) != len(shape):
        raise ValueError(f"{name} has scales of shape {scale} for elements of shape {shape}; give both the same rank")
    if tensor.block is not None:
        if len(tensor.block) - tensor.block.count(0) > len(shape) or min(tensor.block, default=1) < 0:
            raise ValueError(
                f"{name} has blocks of shape {tensor.block} for elements of shape {shape}; give one size an axis"
            )
        wanted = scale_shape(shape, tensor.blocks)
        if scale != wanted:
            raise ValueError(
                f"{name} of shape {shape} in blocks of {tensor.blocks} has scales of shape {scale}, not {wanted}"
            )
    elif any(n == 0 or (size % n and size) for size, n in zip(shape, scale, strict=True)):
        raise ValueError(
            f"{name} of shape {shape} has scales of shape {scale}, which cut no axis into equal blocks; say the "
            "shape of a block where the last one is smaller"
        )
    if tensor.scale.dtype not in (jnp.float32, jnp.float8_e8m0fnu, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{name} has scales of {tensor.scale.dtype.name}; use float32, float8_e8m0fnu or float8_e4m3fn"
        )
    zero, outer = tensor.zero_point, tensor.outer_scale
    if zero is not None and (zero.dtype, tuple(zero.shape)) != (tensor.qvalue.dtype, scale):
        raise ValueError(
            f"{name} has a zero_point of {zero.dtype.name}{tuple(zero.shape)}; a QTensor has it in the dtype "
            f"of qvalue and the shape of scale, {tensor.qvalue.dtype.name}{scale}"
        )
    if outer is not None and (math.prod(outer.shape) != 1 or len(outer.shape) != len(shape)):
        raise ValueError(f"{name} has an outer_scale of shape {tuple(outer.shape)}, not {(1,) * len(shape)}")


INPUT_SCALE = "input_scale"
"""Name, beside a converted kernel, of the static scale of the activation."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tensor", "input_scale"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class ConvertedKernel:
    """Hold a converted kernel on its way into an op, in place of the float one.

    Attributes:
      tensor: the quantized kernel.
      dtype: name of the float dtype in which the op would have read the float kernel; it decides the result's.
      input_scale: float32, shape (1,), the static scale of the activation, or None where the activation has its own.
    """

    tensor: QTensor
    dtype: str
    input_scale: Float[Array, 1] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim


def dequantize(tensor: QTensor, dtype: str = "float32") -> Float[Array, "*shape"]:
    """Return ``(qvalue − zero_point) · scale``, computed in float32 and rounded once to ``dtype``."""
    values, block = tensor.qvalue.astype(jnp.float32), tensor.blocks
    if tensor.zero_point is not None:
        values = apply_blocks(jnp.subtract, values, tensor.zero_point.astype(jnp.float32), block)
    return apply_blocks(jnp.multiply, values, tensor.full_scale(), block).astype(dtype)


def nbytes(tensor: QTensor) -> int:
    """Count the bytes of all parts; sub-byte elements are counted packed."""
    return sum(math.ceil(part.size * jax.dtypes.itemsize_bits(part.dtype) / 8) for part in tensor.parts.values())
