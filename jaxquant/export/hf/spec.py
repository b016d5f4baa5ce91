"""Frozen specs of a checkpoint's weights, inputs and layers, in MAX's terms."""

from __future__ import annotations

import dataclasses
import enum


class ScaleGranularity(enum.StrEnum):
    """Elements that share a scale; ``ROWWISE`` is an output row of a weight, ``COLWISE`` is a token of an input."""

    TENSOR = "tensor"
    ROWWISE = "rowwise"
    COLWISE = "colwise"
    BLOCK = "block"


class ScaleOrigin(enum.StrEnum):
    """Whether a scale is stored with the weights (``STATIC``) or computed at run time (``DYNAMIC``)."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    is_static = property(lambda self: self is ScaleOrigin.STATIC)
    is_dynamic = property(lambda self: self is ScaleOrigin.DYNAMIC)


class QuantFormat(enum.StrEnum):
    """Family of a quantized checkpoint, as in MAX."""

    COMPRESSED_TENSORS_FP8 = "compressed-tensors-fp8"
    FBGEMM_FP8 = "fbgemm-fp8"
    BLOCKSCALED_FP8 = "blockscaled-fp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    INT8_W8A8 = "int8-w8a8"
    MODELOPT_FP8 = "modelopt-fp8"


class _Granular:
    """Base of specs with a granularity of scales. Block-wise scales require two sizes; errors have MAX's wording."""

    granularity: ScaleGranularity
    block_size: tuple[int, int] | None

    is_tensor = property(lambda self: self.granularity is ScaleGranularity.TENSOR)
    is_rowwise = property(lambda self: self.granularity is ScaleGranularity.ROWWISE)
    is_colwise = property(lambda self: self.granularity is ScaleGranularity.COLWISE)
    is_block = property(lambda self: self.granularity is ScaleGranularity.BLOCK)

    def __post_init__(self) -> None:
        if self.is_block and self.block_size is None:
            raise ValueError("block_size must be specified for block-wise scaling")
        if self.is_block and len(self.block_size or ()) != 2:
            raise ValueError(f"block_size must be a tuple of two integers, got {self.block_size}")


@dataclasses.dataclass(frozen=True)
class WeightScaleSpec(_Granular):
    """Scales of a weight.

    Attributes:
      granularity: elements that share a scale.
      dtype: name of the scales' dtype.
      block_size: rows and columns of a block.
    """

    granularity: ScaleGranularity
    dtype: str
    block_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class InputScaleSpec(_Granular):
    """Scales of an activation.

    Attributes:
      granularity: elements that share a scale.
      origin: whether scales are stored or computed.
      dtype: name of the scales' dtype.
      activation_scale_ub: upper bound of the largest magnitude that a scale covers.
      block_size: tokens and features of a block.
    """

    granularity: ScaleGranularity
    origin: ScaleOrigin
    dtype: str
    activation_scale_ub: float | None = None
    block_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OperandSpec(_Granular):
    """Quantization of one operand.

    Attributes:
      dtype: name of the element type.
      granularity: elements that share a scale.
      origin: origin of the scale, which is ``STATIC`` for weights.
      scale_dtype: name of the scales' dtype.
      block_size: block size along the free axis and along the contraction, or None if scales are not block-wise.
      outer_scale: whether the block scales are multiplied by a float32 scale of the whole tensor, as in NVFP4.
      scale_bound: largest magnitude that a dynamic scale covers (``activation_scale_ub``).
      power_of_two_scale: whether scales are rounded up to a power of two (``scale_fmt: ue8m0``, E8M0 scales).
      symmetric: whether there is no zero point.
    """

    dtype: str
    granularity: ScaleGranularity
    origin: ScaleOrigin = ScaleOrigin.STATIC
    scale_dtype: str = "float32"
    block_size: tuple[int, int] | None = None
    outer_scale: bool = False
    scale_bound: float | None = None
    power_of_two_scale: bool = False
    symmetric: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """Quantization of a linear layer of a checkpoint.

    Attributes:
      weight: spec of the weight.
      input: spec of the input, or None if the input is not quantized.
      packing: layout of the weight in the checkpoint: ``plain`` or the name of a packed layout.
    """

    weight: OperandSpec
    input: OperandSpec | None
    packing: str = "plain"

    @property
    def has_static_input(self) -> bool:
        """Return whether a scale of the input is stored."""
        return self.input is not None and self.input.origin.is_static


def block(
    dtype: str, free: int, tile: int, origin: ScaleOrigin = ScaleOrigin.STATIC, **fields: str | bool
) -> OperandSpec:
    """Return the spec of an operand with a scale for each ``free × tile`` block; ``fields`` sets further fields."""
    return OperandSpec(dtype, ScaleGranularity.BLOCK, origin, block_size=(free, tile), **fields)  # pyright: ignore[reportArgumentType]


def tensor_layer(dtype: str, origin: ScaleOrigin, power_of_two_scale: bool = False) -> LayerSpec:
    """Return the spec of a layer with one scale for the weight and one scale for the input."""
    weight = OperandSpec(dtype, ScaleGranularity.TENSOR, power_of_two_scale=power_of_two_scale)
    return LayerSpec(weight, dataclasses.replace(weight, origin=origin))


def channel_layer(scale_bound: float | None = None) -> LayerSpec:
    """Return the spec of a layer in e4m3 with a scale for each row of the weight and a dynamic scale for each token."""
    weight = OperandSpec("float8_e4m3fn", ScaleGranularity.ROWWISE)
    inputs = OperandSpec(weight.dtype, ScaleGranularity.COLWISE, ScaleOrigin.DYNAMIC, scale_bound=scale_bound)
    return LayerSpec(weight, inputs)


def mx_layer(dtype: str, packing: str, with_input: bool = True) -> LayerSpec:
    """Return the spec of a layer in an MX format: tiles of 32 elements with E8M0 scales."""
    weight = block(dtype, 1, 32, scale_dtype="float8_e8m0fnu", power_of_two_scale=True)
    return LayerSpec(weight, dataclasses.replace(weight, origin=ScaleOrigin.DYNAMIC) if with_input else None, packing)


def nvfp4_layer(packing: str, with_input: bool = True) -> LayerSpec:
    """Return the spec of a layer in NVFP4: tiles of 16 elements with e4m3 scales, and a stored float32 scale."""
    weight = block("float4_e2m1fn", 1, 16, scale_dtype="float8_e4m3fn", outer_scale=True)
    return LayerSpec(weight, weight if with_input else None, packing)
