"""``QuantConfig`` with the fields, properties and errors of MAX 26.3 (``Float8Config`` in MAX 25.6)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.export.hf.spec import InputScaleSpec, QuantFormat, ScaleGranularity, WeightScaleSpec

_SCALE_ROWS, _SCALE_COLUMNS = 128, 4


def _has_format(*formats: QuantFormat) -> property:
    return property(lambda self: self.format in formats)


_METHODS = {
    **dict.fromkeys((QuantFormat.COMPRESSED_TENSORS_FP8, QuantFormat.INT8_W8A8), "compressed-tensors"),
    **dict.fromkeys((QuantFormat.NVFP4, QuantFormat.MODELOPT_FP8), "modelopt"),
    QuantFormat.FBGEMM_FP8: "fbgemm_fp8",
    QuantFormat.BLOCKSCALED_FP8: "fp8",
}
"""Value of ``quant_method`` by format, for formats whose name differs from ``quant_method``."""


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """Quantized layers of a decoder and their scales; it also has the fields of ``Float8Config`` of MAX 25.6.

    Attributes:
      input_scale: scales of the inputs, or None if the inputs stay in float.
      weight_scale: scales of the weights.
      mlp_quantized_layers: indices of the layers whose gate, up and down projections are quantized.
      attn_quantized_layers: indices of the layers whose q, k, v and o projections are quantized.
      format: family of the checkpoint.
      embedding_output_dtype: dtype name of the embedding and the output head.
      bias_dtype: dtype name of all biases, or None if there are no biases.
      can_use_fused_mlp: whether the gate and up projections can be one matmul, because their scales can be joined.
      scales_pre_interleaved: whether block scales are stored in the 5-D order; see ``interleave_scales``.
      shared_experts_weight_dtype: dtype name of shared experts that stay in float, or None.
    """

    input_scale: InputScaleSpec | None
    weight_scale: WeightScaleSpec
    mlp_quantized_layers: frozenset[int]
    attn_quantized_layers: frozenset[int]
    format: QuantFormat
    embedding_output_dtype: str | None = None
    bias_dtype: str | None = None
    can_use_fused_mlp: bool = False
    scales_pre_interleaved: bool = False
    shared_experts_weight_dtype: str | None = None

    mlp_in_float8 = property(lambda self: self.mlp_quantized_layers, doc="Older name of the layers.")
    attn_qkv_in_float8 = property(lambda self: self.attn_quantized_layers, doc="Older name of the layers.")
    is_nvfp4 = _has_format(QuantFormat.NVFP4)
    is_mxfp4 = _has_format(QuantFormat.MXFP4)
    is_fp4 = _has_format(QuantFormat.NVFP4, QuantFormat.MXFP4)
    is_mxfp8 = _has_format(QuantFormat.MXFP8)
    is_mxfp6 = _has_format(QuantFormat.MXFP6)
    is_mx = _has_format(QuantFormat.MXFP4, QuantFormat.MXFP6, QuantFormat.MXFP8)
    is_int8_w8a8 = _has_format(QuantFormat.INT8_W8A8)

    @property
    def quant_method(self) -> str:
        """Method that identifies the checkpoint in MAX 25.6."""
        return _METHODS.get(self.format, self.format.value)

    # is_static: input scales are stored. is_dynamic: they are computed at run time.
    is_static = property(lambda self: self.input_scale is not None and self.input_scale.origin.is_static)
    is_dynamic = property(lambda self: self.input_scale is not None and self.input_scale.origin.is_dynamic)

    @property
    def scales_granularity_mnk(self) -> tuple[int, int, int]:
        """Number of elements that share a scale along rows of the input, rows of the weight, and the contraction.

        -1 means all elements along the axis.

        Raises:
          ValueError: a matmul does not support the granularity, or input and weight differ along the contraction.
        """
        if self.input_scale is None:
            raise ValueError("unsupported input scale granularity: inputs are not quantized (weight only)")
        m, k_input = _granularity(self.input_scale, ScaleGranularity.COLWISE, "input")
        n, k_weight = _granularity(self.weight_scale, ScaleGranularity.ROWWISE, "weight")
        if k_input != k_weight:
            raise ValueError(
                f"k_input_granularity and k_weight_granularity must be the same, got {k_input} and {k_weight}"
            )
        return m, n, k_input

    def quantized_scales_type(self, quantized_shape: tuple[int, int], device: Any = None) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the scales of a quantized ``[M, K]`` input; K counts unpacked elements.

        Args:
          quantized_shape: (M, K).
          device: unused argument, for compatibility with MAX.

        Raises:
          ValueError: the scheme is not NVFP4, MXFP4 or tiles of 128.
        """
        rows, depth = quantized_shape
        if self.is_nvfp4:
            tiles = math.ceil(depth / 16)
            shape = (math.ceil(rows / _SCALE_ROWS), math.ceil(tiles / _SCALE_COLUMNS), 32, 4, 4)
            return jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        if self.is_mxfp4:
            return jax.ShapeDtypeStruct((rows, math.ceil(depth / 32)), jnp.float8_e8m0fnu)
        if self.input_scale is not None and self.input_scale.block_size == (1, 128):
            return jax.ShapeDtypeStruct((math.ceil(depth / 128), rows), jnp.float32)
        raise ValueError("Can not determine the quantized scales type; use NVFP4, MXFP4 or tiles of 1×128")


Float8Config = QuantConfig


def _granularity(scale: InputScaleSpec | WeightScaleSpec, whole_rows: ScaleGranularity, side: str) -> tuple[int, int]:
    if scale.is_block and scale.block_size is not None:
        return scale.block_size
    if scale.granularity is whole_rows:
        return 1, -1
    if scale.is_tensor:
        return -1, -1
    raise ValueError(f"unsupported {side} scale granularity {scale.granularity}")


def fp4_packed_k(in_dim: int, config: QuantConfig | None) -> int:
    """Return the size in bytes of a weight row with ``in_dim`` elements."""
    if config is None:
        return in_dim
    return in_dim // 2 if config.is_fp4 else in_dim * 3 // 4 if config.is_mxfp6 else in_dim


def interleave_scales(scales: jax.Array) -> jax.Array:
    """Return block scales ``[M, C]`` in the order that NVIDIA's block-scaled matmuls require.

    The result has the shape ``[⌈M/128⌉, ⌈C/4⌉, 32, 4, 4]``. Scale (r, c) is at
    ``[r // 128, c // 4, r % 32, r % 128 // 32, c % 4]``; padding is 0.
    """
    rows, columns = scales.shape
    padding = [(0, -rows % _SCALE_ROWS), (0, -columns % _SCALE_COLUMNS)]
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint8) if scales.dtype.itemsize == 1 else scales
    bits = jnp.pad(bits, padding)
    blocks = bits.reshape(bits.shape[0] // _SCALE_ROWS, 4, 32, bits.shape[1] // _SCALE_COLUMNS, _SCALE_COLUMNS)
    return jax.lax.bitcast_convert_type(blocks.transpose(0, 3, 2, 1, 4), scales.dtype)


def deinterleave_scales(interleaved: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return block scales of ``shape`` from the result of ``interleave_scales``, which may be flattened to two axes.

    Raises:
      ValueError: the size of ``interleaved`` is not the size that ``shape`` requires.
    """
    rows, columns = math.ceil(shape[0] / _SCALE_ROWS), math.ceil(shape[1] / _SCALE_COLUMNS)
    if interleaved.size != rows * columns * _SCALE_ROWS * _SCALE_COLUMNS:
        raise ValueError(
            f"interleaved scales of shape {interleaved.shape} do not match scales of shape {shape}; pass "
            f"interleaved scales of shape {(rows, columns, 32, 4, 4)}"
        )
    blocks = interleaved.reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    flat = blocks.reshape(rows * _SCALE_ROWS, columns * _SCALE_COLUMNS)
    return flat[: shape[0], : shape[1]]
