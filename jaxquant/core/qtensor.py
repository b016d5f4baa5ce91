"""QTensor: a quantized array, ``x ≈ (qvalue − zero_point) · scale``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxquant.core.blocks import BlocksError, Shape, apply_blocks, is_even, reshape_blocks, scale_shape
from jaxquant.core.scales import decode_scale
from jaxquant.core.tensor_spec import ScaleDtype

PARTS = ("qvalue", "scale", "zero_point", "outer_scale", "input_scale")
"""Arrays of a ``QTensor``, by their names in checkpoints."""


class Encoding(Protocol):
    """Interface of a tensor format whose bytes hold elements and scales together."""

    @property
    def elements_per_block(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    def decode_tensor(self, tensor: QTensor) -> Float[Array, "*shape"]:
        """Return the float32 array of a tensor."""
        ...


CODEC_MARK = "jaxquant codec "
"""Prefix of the ``checkpoint_name`` of an array before encoding and after decoding; the codec's name follows."""

ENCODINGS: dict[str, Encoding] = {}
"""Tensor formats by name; filled in by ``jaxquant.formats``."""


_STATIC = ("block", "codec", "dtype", "read_as")


@functools.partial(jax.tree_util.register_dataclass, data_fields=list(PARTS), meta_fields=list(_STATIC))
@dataclasses.dataclass(frozen=True)
class QTensor:
    """Quantized elements and their scales: ``x ≈ (qvalue − zero_point) · scale · outer_scale``.

    A converted parameter is a ``QTensor`` that replaces a float parameter; it has ``dtype`` and optionally
    ``input_scale``.

    Invariants, for qvalue of shape (n₁, …) and blocks of shape (b₁, …), checked by ``check``:

    - ``scale.shape = (⌈n₁ / b₁⌉, …)``, in float32, float8_e8m0fnu or float8_e4m3fn;
    - ``zero_point.shape = scale.shape``, in qvalue's dtype;
    - ``outer_scale`` is float32 and has size 1 along each axis, or the size of an axis along which tensors are stacked;
    - ``input_scale`` is float32 and has qvalue's rank;
    - if ``block`` is None, ``bᵢ = nᵢ / scale.shape[i]`` is an integer.

    Attributes:
      qvalue: elements, any shape.
      scale: scales, of qvalue's rank. Along each axis the size is 1 (shared), the size of the axis, or the number of
        blocks.
      zero_point: zero points, or None for symmetric quantization.
      outer_scale: one scale that multiplies all others, or None.
      block: static shape of a block, or None if it can be inferred from the shapes. An entry of 0 marks an
        axis of stacked layers; a loop over the layers removes the entry with the axis. Leading axes that are added
        later need no entry.
      codec: static name of a tensor format, or None if elements and scales are separate. With a codec, qvalue holds the
        bytes of the format, and the only other part is ``input_scale``. ``block`` has the sizes of the contraction
        axes, whose elements were encoded together in order, and 1 for all other axes. The bytes lie along the last
        contraction axis; the other contraction axes have size 1.
      input_scale: static scale of the activation that multiplies a converted weight, one for each stacked layer and
        batch element; None if the activation has its own scale.
      dtype: dtype name of the float weight that a converted weight replaces. Casts in the model change this
        dtype. The result of an op has the promoted dtype of the activation and this dtype.
      read_as: dtype name in which the op read the parameter when it was quantized, or None if that is not known.
    """

    qvalue: Shaped[Array, "*shape"]
    scale: Float[Array, "*counts"] = None  # pyright: ignore[reportAssignmentType]  # None only with a codec
    zero_point: Shaped[Array, "*counts"] | None = None
    outer_scale: Float[Array, "*ones"] | None = None
    block: Shape | None = None
    codec: str | None = None
    input_scale: Float[Array, "*ones"] | None = None
    dtype: str | None = None
    read_as: str | None = None

    def __jax_array__(self) -> Any:
        """Raise, because JAX operations outside of quantized layers do not support a converted parameter.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            f"a converted parameter ({self.description}) is not a float array; pass converted parameters to the model "
            "that jaxquant.maybe_quantize_model returns with checkpoint_is_quantized true, or to a quantized function"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        if self.codec is None:
            return self.qvalue.shape
        return tuple(size if size > 1 else n for size, n in zip(self.blocks, self.qvalue.shape, strict=True))

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def parts(self) -> dict[str, jax.Array]:
        """Arrays of the tensor by name; parts that are None are left out."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}

    def replace(self, change: Callable[[str, Any], Any]) -> QTensor:
        """Return a tensor with every part replaced by ``change(name, part)``."""
        return dataclasses.replace(self, **{name: change(name, part) for name, part in self.parts.items()})

    @property
    def operand(self) -> QTensor:
        """The elements and scales that an op multiplies, without ``input_scale``, ``dtype`` and ``read_as``."""
        return dataclasses.replace(self, input_scale=None, dtype=None, read_as=None)

    def float_dtype(self, name: str = "a quantized weight") -> str:
        """Return ``dtype``, or raise if it is not set.

        Args:
          name: name of the weight in the error, such as the path of a parameter.

        Raises:
          TypeError: the dtype is not set.
        """
        if self.dtype is None:
            raise TypeError(
                f"{name} ({self.description}) has no float dtype; set the dtype of the original float weight, for "
                "example with tensor.astype('bfloat16')"
            )
        return self.dtype

    @property
    def description(self) -> str:
        """Dtypes and shapes of the tensor, for errors."""
        shape = f"{self.qvalue.dtype.name} {tuple(self.qvalue.shape)}"
        if self.codec is not None:
            return f"{self.codec} in {shape}"
        return f"{shape} with scales {tuple(self.scale.shape)}{'' if self.zero_point is None else ' and zero points'}"

    @property
    def blocks(self) -> Shape:
        """Shape of a block, with one entry for each axis."""
        if self.block is not None:
            return tuple(max(1, size) for size in self._full_block)
        return _even_blocks(self.shape, self.scale.shape)

    @property
    def _full_block(self) -> Shape:
        """``block`` with one entry for each axis, 0 along axes of stacked layers; it must not be None."""
        assert self.block is not None
        block, missing = list(self.block), len(self.block) - self.ndim
        for _ in range(missing):
            block.remove(0)
        return (0,) * -missing + tuple(block)

    def astype(self, dtype: Any) -> QTensor:
        """Return the tensor with another dtype of the float array that it replaces.

        Raises:
          TypeError: the dtype is not a float dtype.
        """
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TypeError(f"QTensor.astype needs a float dtype such as bfloat16, got {jnp.dtype(dtype).name}")
        return dataclasses.replace(self, dtype=jnp.dtype(dtype).name)

    def transpose(self, order: Sequence[int]) -> QTensor:
        """Permute the axes."""
        block = None if self.block is None else tuple(self._full_block[axis] for axis in order)
        return dataclasses.replace(self.replace(lambda _, part: part.transpose(order)), block=block)

    def reshape(self, shape: Shape) -> QTensor:
        """Merge and split axes, and add and drop axes of size 1.

        Args:
          shape: new shape.

        Raises:
          BlocksError: a block would not be a block of the new shape.
        """
        old, new = self.shape, tuple(shape)
        if self.codec is not None:
            raise BlocksError(f"{self.description} in blocks of {self.blocks} cannot be reshaped to {new}")

        def change(_: str, part: Any) -> Any:
            if part.shape == old:
                return part.reshape(new)
            block = self.blocks if part.shape == self.scale.shape else _even_blocks(old, part.shape)
            return part.reshape(scale_shape(new, reshape_blocks(old, new, block)))

        block = None if self.block is None else reshape_blocks(old, new, self.blocks)
        return dataclasses.replace(self.replace(change), block=block)

    def stacked(self, sizes: Shape) -> QTensor:
        """Return the tensor with every part broadcast to the first axes, so that scans and maps can slice them.

        Args:
          sizes: sizes of those axes.

        Raises:
          NotImplementedError: several slices share a scale.
        """
        count = len(sizes)

        def broadcast(_: str, part: Any) -> Any:
            if any(n not in (1, size) for n, size in zip(part.shape, sizes, strict=False)):
                raise NotImplementedError(
                    f"a converted kernel of shape {self.shape} with scales of shape {tuple(self.scale.shape)} cannot "
                    f"be split along the first {count} axes, because several slices share a scale"
                )
            return jnp.broadcast_to(part, (*sizes, *part.shape[count:]))

        block = None if self.block is None else (*(0,) * count, *self.blocks[count:])
        return dataclasses.replace(self.replace(broadcast), block=block)

    def full_scale(self) -> Float[Array, "*counts"]:
        """Return the scales in float32, multiplied by the outer scale."""
        scale = decode_scale(self.scale)
        return scale if self.outer_scale is None else scale * self.outer_scale


def is_tensor(node: Any) -> bool:
    """Return whether a node of a tree is a ``QTensor``."""
    return isinstance(node, QTensor)


def operand_dtype(x: Array | QTensor) -> str:
    """Return the dtype name of an operand; for a converted weight, of the float weight that it replaces."""
    return x.float_dtype() if isinstance(x, QTensor) else x.dtype.name


def _even_blocks(shape: Shape, counts: Shape) -> Shape:
    return tuple(max(1, size // max(1, n)) for size, n in zip(shape, counts, strict=True))


def mark_stacked_axes(tensor: QTensor, axes: Sequence[int]) -> QTensor:
    """Return a tensor whose ``block`` marks the axes along which layers were stacked.

    Args:
      tensor: tensor of all layers, with the block shape of one layer.
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
    *,
    input_scale: Float[Array, "*ones"] | None = None,
    dtype: Any = None,
) -> QTensor:
    """Create a ``QTensor`` and check its invariants.

    Args:
      qvalue, scale, zero_point, outer_scale, block, input_scale, dtype: fields of ``QTensor``; a parameter needs
        ``dtype``.

    Raises:
      ValueError: an invariant does not hold; names the part, its shape and the required shape.
      TypeError: a part is not an array, or an entry of the block is not an integer.
    """
    tensor = QTensor(qvalue, scale, zero_point, outer_scale, block, input_scale=input_scale)
    tensor = tensor if dtype is None else tensor.astype(dtype)
    for name, part in (("qvalue", qvalue), ("scale", scale), *tensor.parts.items()):
        if not hasattr(part, "shape") or not hasattr(part, "dtype"):
            raise TypeError(f"{name} of a QTensor must be an array, got {type(part).__name__}")
    if block is not None and not all(type(size) is int for size in block):
        raise TypeError(f"block of a QTensor must have one integer for each axis, got {block!r}")
    check(tensor)
    return tensor if block is None or not is_even(qvalue.shape, block) else dataclasses.replace(tensor, block=None)


def check(tensor: QTensor, name: str = "QTensor") -> None:
    """Check the invariants of a ``QTensor``.

    Args:
      tensor: tensor of arrays or ``jax.ShapeDtypeStruct``.
      name: name of the tensor in errors, such as the path of a leaf.

    Raises:
      ValueError: an invariant does not hold.
    """
    if tensor.codec is not None:
        _check_encoded(tensor, name)
        return
    shape, scale = tuple(tensor.shape), tuple(tensor.scale.shape)
    if len(scale) != len(shape):
        raise ValueError(f"{name} has scale of shape {scale} and qvalue of shape {shape}; make both ranks equal")
    if tensor.block is not None:
        if len(tensor.block) - tensor.block.count(0) > len(shape) or min(tensor.block, default=1) < 0:
            raise ValueError(
                f"{name} has block {tensor.block} for qvalue of shape {shape}; set one block size for each axis"
            )
        expected = scale_shape(shape, tensor.blocks)
        if scale != expected:
            raise ValueError(
                f"{name} of shape {shape} in blocks of {tensor.blocks} needs scale of shape {expected}, got {scale}"
            )
    elif any(n == 0 or (size % n and size) for size, n in zip(shape, scale, strict=True)):
        raise ValueError(
            f"{name} of shape {shape} has scale of shape {scale}, which does not split every axis into equal blocks; "
            "set block if the last block of an axis is smaller"
        )
    if tensor.scale.dtype.name not in (*get_args(ScaleDtype), "bfloat16", "float16"):
        raise ValueError(
            f"{name} has scale of dtype {tensor.scale.dtype.name}; use one of {', '.join(get_args(ScaleDtype))}"
        )
    zero, outer, input_scale = tensor.zero_point, tensor.outer_scale, tensor.input_scale
    if zero is not None and (zero.dtype, tuple(zero.shape)) != (tensor.qvalue.dtype, scale):
        raise ValueError(
            f"{name} has zero_point {zero.dtype.name}{tuple(zero.shape)}, but needs "
            f"{tensor.qvalue.dtype.name}{scale}, the dtype of qvalue and the shape of scale"
        )
    if outer is not None and not _is_outer(tuple(outer.shape), scale, shape):
        raise ValueError(f"{name} needs outer_scale of shape {(1,) * len(shape)}, got {tuple(outer.shape)}")
    if outer is not None and outer.dtype != jnp.float32:
        raise ValueError(f"{name} needs outer_scale of dtype float32, got {outer.dtype.name}")
    if input_scale is not None and (input_scale.ndim, input_scale.dtype) != (len(shape), jnp.float32):
        raise ValueError(
            f"{name} has input_scale {input_scale.dtype.name}{tuple(input_scale.shape)}, but needs float32 and "
            f"{len(shape)} axes, as many as qvalue"
        )


def _is_outer(outer: Shape, scale: Shape, shape: Shape) -> bool:
    """Return whether an outer scale has one element, or one for each layer or expert stacked along an axis."""
    sizes = zip(outer, scale, shape, strict=False)
    return len(outer) == len(shape) and all(n == 1 or n == many == size for n, many, size in sizes)


def _check_encoded(tensor: QTensor, name: str) -> None:
    encoding, stored, block = ENCODINGS.get(tensor.codec or ""), tuple(tensor.qvalue.shape), tensor.block
    if encoding is None:
        raise ValueError(f"{name} has the unknown tensor format {tensor.codec!r}; use one of {', '.join(ENCODINGS)}")
    if tensor.qvalue.dtype != jnp.uint8 or tensor.parts.keys() - {"input_scale"} != {"qvalue"}:
        raise ValueError(f"{name} in format {tensor.codec} must have only a qvalue of bytes, got {list(tensor.parts)}")
    if block is None or len(block) - block.count(0) > len(stored) or min(block, default=1) < 0:
        raise ValueError(f"{name} of {stored} bytes has block {block}; set block to the sizes of the contraction axes")
    contraction = [axis for axis, size in enumerate(tensor.blocks) if size > 1]
    count = -(-math.prod(tensor.blocks) // encoding.elements_per_block) * encoding.bytes_per_block
    expected = [1] * (len(contraction) - 1) + [count]
    if not contraction or [stored[axis] for axis in contraction] != expected:
        raise ValueError(
            f"{name} has qvalue of {stored} bytes, but contraction axes of {tensor.blocks} in format {tensor.codec} "
            f"need {count} bytes"
        )


def dequantize(tensor: QTensor, dtype: str = "float32") -> Float[Array, "*shape"]:
    """Return ``(qvalue − zero_point) · scale``, computed in float32 and rounded once to ``dtype``."""
    if tensor.codec is not None:
        return ENCODINGS[tensor.codec].decode_tensor(tensor).astype(dtype)
    values, block = tensor.qvalue, tensor.blocks
    if tensor.zero_point is not None:
        values = apply_blocks(jnp.subtract, values.astype(jnp.float32), tensor.zero_point.astype(jnp.float32), block)
    return apply_blocks(lambda x, s: (x.astype(jnp.float32) * s).astype(dtype), values, tensor.full_scale(), block)
