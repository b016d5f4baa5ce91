"""MLC's functions for block-scaled float8 under MLC's names, implemented with jaxquant, and MLC's presets.

A weight has MLC's format: float8 elements ``[N, K]`` and float32 ``weight_scale_inv [⌈N / b0⌉, ⌈K / b1⌉]``, which
multiplies the elements. A single row of activations stays in float, as in MLC's GEMV. Several rows are quantized in
``1 × b1`` tiles. ``docs/from/mlc.md`` lists MLC's names and the differences between the results of MLC and jaxquant.

Shapes: M rows of the input, K contracted elements, N rows of the weight, E experts, H heads. A block of the weight is
``(b0, b1)``, and G = ⌈K / b1⌉.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxquant.compat.mlc_config import quant_config, skip_reason
from jaxquant.compat.mlc_presets import PRESETS, BlockScaleQuantize, read_mlc_quantization
from jaxquant.compat.scale_layouts import ScaleLayout
from jaxquant.core.blocks import apply_blocks, block_shape, reduce_blocks, scale_shape
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, check
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import saturating_cast
from jaxquant.core.scales import largest
from jaxquant.core.sharding import platform_of
from jaxquant.export.hf import ScaleOrigin, to_recipe
from jaxquant.export.hf.fp8 import block_layer
from jaxquant.ops.contract import dequantized_dtype
from jaxquant.ops.dimensions import Dimensions, DotDimensionNumbers
from jaxquant.ops.dot_general import dot_general
from jaxquant.ops.implementation import Choice, record_choice
from jaxquant.ops.pieces import check_float
from jaxquant.ops.ragged import ragged_dot

EPSILON = 1e-10
"""Lower bound of the amax in MLC's scales. DeepSeek and DeepGEMM use 1e-4, which loses gradients below 1e-8."""

_ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
_ROWS = 8  # smallest number of rows that the matmuls of all chips support

Block = tuple[int, int]
Activation = Literal["dynamic", "static", "float"]

__all__ = [
    "EPSILON",
    "PRESETS",
    "Absorbed",
    "BlockScaleQuantize",
    "ScaleLayout",
    "block_scale_bmm",
    "block_scale_experts",
    "block_scale_linear",
    "broadcast_activation_scale",
    "group_sizes",
    "quant_config",
    "read_mlc_quantization",
    "rowwise_group_quant_fp8",
    "skip_reason",
    "split_kv_b_proj",
    "static_activation_group_quant_fp8",
]


# -- activations -------------------------------------------------------------------------------------------------------


def rowwise_group_quant_fp8(
    x: Float[Array, "*lead K"],
    group_size: int,
    dtype: str = "float8_e4m3fn",
    *,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    eps: float | None = EPSILON,
) -> tuple[Shaped[Array, "*lead K"], Float[Array, "*scales"]]:
    """Quantize groups along the last axis, each with a scale from its amax; the last group may be smaller.

    ``scale = max(amax, eps) / max(dtype)`` and ``qvalue = cast(clip(x / scale))``; both divisions are in float32. If
    ``eps`` is None, the scale is computed as in training: ``amax · (1 / max(dtype))``, or 1 for a group of zeros.

    Args:
      x: activations.
      group_size: number of elements that share a scale.
      dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
      layout: layout of the scales; ``ScaleLayout.of_mlc`` converts MLC's flags.
      eps: lower bound of the amax, or None to compute the scale as in training.

    Returns:
      Quantized elements, and scales that multiply the elements.

    Raises:
      TypeError: the activations are not float, or the dtype is not supported.

    Source: ``rowwise_group_quant_fp8`` of MLC's ``op/fp8_quantization``.
    """
    check_float("rowwise_group_quant_fp8", x=x)
    spec, axes = _tile_spec(dtype, group_size), (x.ndim - 1,)
    if eps is None:
        tensor = quantize(x, spec, axes)
        qvalue, scale = tensor.qvalue, tensor.scale
    else:
        block = block_shape(x.shape, spec, axes)
        amax = jnp.maximum(reduce_blocks(x, block, largest).astype(jnp.float32), eps)
        scale = amax / jnp.where(amax > 0, element(dtype).bound, 1.0)  # as in ``_cast``
        qvalue = _cast(x, dtype, scale, block)
    return qvalue, layout.write(jnp.broadcast_to(scale, (*x.shape[:-1], scale.shape[-1])))  # also for zero rows


def static_activation_group_quant_fp8(
    x: Float[Array, "*lead K"], activation_scale: Float[Array, " G"], group_size: int, dtype: str = "float8_e4m3fn"
) -> Shaped[Array, "*lead K"]:
    """Quantize groups along the last axis with the given scales: ``cast(clip(x / activation_scale))``.

    Raises:
      ValueError: the number of scales is not the number of groups.
      TypeError: the activations are not float, or the dtype is not supported.
    """
    check_float("static_activation_group_quant_fp8", x=x)
    block = block_shape(x.shape, _tile_spec(dtype, group_size), (x.ndim - 1,))
    scale = broadcast_activation_scale(x, activation_scale)
    if scale.shape[-1] != (groups := scale_shape(x.shape, block)[-1]):
        raise ValueError(f"x has {groups} groups of {group_size}, but activation_scale has {activation_scale.size}")
    return _cast(x, dtype, scale, block)


def _cast(x: Array, dtype: str, scale: Array, block: tuple[int, ...]) -> Array:
    """Divide in float32, clip and round; without the ``where``, XLA:CPU would multiply by a reciprocal."""
    divide = lambda x, scale: x.astype(jnp.float32) / jnp.where(jnp.isnan(x), 1.0, scale)  # noqa: E731
    return saturating_cast(apply_blocks(divide, x, scale, block), element(dtype))


def broadcast_activation_scale(
    x: Float[Array, "*lead K"], activation_scale: Float[Array, " G"], layout: ScaleLayout = ScaleLayout.ROW_MAJOR
) -> Float[Array, "*scales"]:
    """Return the given scales of groups in a layout, repeated for every row of an activation."""
    return layout.write(jnp.broadcast_to(activation_scale, (*x.shape[:-1], activation_scale.size)))


# -- layers ------------------------------------------------------------------------------------------------------------


def block_scale_linear(
    x: Float[Array, "*lead K"],
    weight: Shaped[Array, "N K"],
    weight_scale_inv: Float[Array, "*counts"],
    block_size: Block = (128, 128),
    *,
    bias: Float[Array, " N"] | None = None,
    activation_scale: Float[Array, "*groups"] | None = None,
    quantizes_row: bool = False,
    out_dtype: str | None = None,
) -> Float[Array, "*lead N"]:
    """Compute ``x · weightᵀ + bias`` with float32 accumulation.

    Args:
      x: activations; their gradient uses the dequantized weight.
      weight, weight_scale_inv: elements of the weight, and scales that multiply the elements; there is a scale for each
        block, or a single scale.
      block_size: number of rows and columns of the weight that share a scale.
      bias: bias, which is also added if ``x`` has a single row; MLC omits the bias in this case.
      activation_scale: static scales of the groups of ``x``, or one scale. None computes the scale of each group from
        its amax.
      quantizes_row: whether a single row is quantized like several rows, so that decoding and prefill compute the same.
        MLC leaves a single row in float.
      out_dtype: dtype of the result, or None for the dtype of ``x``.

    Raises:
      ValueError: activations, scales or bias have a wrong shape; the message names the argument.
      TypeError: the weight is not float8, or ``out_dtype`` is not float.
    """
    _check_shapes(x, weight, "[N, K]", bias)
    if out_dtype is not None and not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(f"out_dtype must be float, got {out_dtype}")
    rows = x.size // max(1, x.shape[-1])
    how = "static" if activation_scale is not None else "float" if rows == 1 and not quantizes_row else "dynamic"
    kernel = _make_kernel(weight, weight_scale_inv, block_size, x.dtype.name, activation_scale)
    read = x
    if rows == 1 and how != "float":  # a matmul of one row would sum in another order
        read = jnp.pad(x.reshape(1, -1), ((0, _ROWS - 1), (0, 0)))
    numbers = (((read.ndim - 1,), (1,)), ((), ()))
    out = _multiply("block_scale_linear", how, read, kernel, numbers, block_size, out_dtype)
    out = out if read is x else out[:1].reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias.astype(out.dtype)


def block_scale_experts(
    x: Float[Array, "M K"],
    weight: Shaped[Array, "E N K"],
    weight_scale_inv: Float[Array, "E n k"],
    indptr: Int[Array, "*indptr"],
    block_size: Block = (128, 128),
    *,
    quantizes_row: bool = False,
) -> Float[Array, "M N"]:
    """Multiply each row by the weight of its expert.

    Args:
      x: rows sorted by expert. For a single token: one row for all its experts, or one row for each of its experts.
      weight, weight_scale_inv: weights and scales of all experts.
      indptr: end of the rows of each expert, see ``group_sizes``. For a single token: the indices of its experts, in an
        array of shape ``[1, k]``.
      block_size: number of rows and columns of a weight that share a scale.
      quantizes_row: whether a single token is quantized like several tokens. The order of sums still differs.

    Returns:
      Array ``[M, N]``; rows that belong to no expert are zero. For a single token, array ``[k, N]``; the row of an
      expert that does not exist is NaN.

    Raises:
      ValueError: an argument has a wrong shape; the message names it.
      TypeError: the weight is not float8, or indptr is not an array of integers.
    """
    _check_shapes(x, weight, "[E, N, K]")
    if x.ndim != 2:
        raise ValueError(f"x must be [tokens, K], got shape {x.shape}")
    indptr = jnp.asarray(indptr)
    if not jnp.issubdtype(indptr.dtype, jnp.integer):
        raise TypeError(f"indptr must be an array of integers, got {indptr.dtype.name}")
    if indptr.ndim == 2:
        # Small integer types cannot represent the number of experts.
        chosen = indptr.reshape(-1).astype(jnp.promote_types(indptr.dtype, jnp.int32))
        if indptr.shape[0] != 1 or x.shape[0] not in (1, chosen.size):
            raise ValueError(f"indptr {indptr.shape} must be [1, k] for x with 1 or k rows, got {x.shape[0]} rows")
        chosen = jnp.where(chosen < 0, weight.shape[0], chosen)  # negative indices do not count from the end
        kernel = _make_kernel(weight, weight_scale_inv, block_size, x.dtype.name)
        kernel = kernel.replace(lambda _, part: jnp.take(part, chosen, axis=0))
        batch = ((0,), (0,)) if x.shape[0] == chosen.size else ((), ())
        how = "dynamic" if quantizes_row else "float"
        out = _multiply("block_scale_experts", how, x, kernel, (((1,), (2,)), batch), block_size)
        return out.reshape(chosen.size, -1)
    kernel = _make_kernel(weight, weight_scale_inv, block_size, x.dtype.name).transpose((0, 2, 1))
    record_choice("block_scale_experts", Choice("dynamic", "rows are quantized by their own amax, one grouped matmul"))
    recipe = _recipe("dynamic", weight.dtype.name, tuple(block_size))
    return ragged_dot(x, kernel, group_sizes(indptr, weight.shape[0]), recipe=recipe)


def group_sizes(indptr: Int[Array, " ends"], experts: int) -> Int[Array, " E"]:
    """Return the number of rows of each expert, from the ends of the rows ``[E]`` or from a CSR pointer ``[E + 1]``.

    Raises:
      ValueError: indptr has another shape.
    """
    if indptr.shape not in ((experts,), (experts + 1,)):
        raise ValueError(
            f"indptr has shape {indptr.shape}; for {experts} experts the shape must be ({experts},) or ({experts + 1},)"
        )
    ends = jnp.asarray(indptr).astype(jnp.int32)
    return jnp.diff(ends, prepend=0) if indptr.shape[0] == experts else jnp.diff(ends)


# -- latent attention --------------------------------------------------------------------------------------------------


class Absorbed(NamedTuple):
    """Two parts of ``kv_b_proj`` for latent attention that applies them to queries and results (``block_scale_bmm``).

    Attributes:
      w_uk: elements ``[H, C, nope]`` for queries, with blocks ``(b1, b0)``; C is ``kv_lora_rank``.
      w_uk_scale_inv: scales ``[H, C / b1, nope / b0]`` of ``w_uk``.
      w_uv: elements ``[H, v, C]`` for results, with blocks ``(b0, b1)``.
      w_uv_scale_inv: scales ``[H, v / b0, C / b1]`` of ``w_uv``.
    """

    w_uk: Shaped[Array, "H C nope"]
    w_uk_scale_inv: Float[Array, "H c n"]
    w_uv: Shaped[Array, "H v C"]
    w_uv_scale_inv: Float[Array, "H w c"]


def split_kv_b_proj(
    weight: Shaped[Array, "rows C"],
    weight_scale_inv: Float[Array, "r c"],
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    block_size: Block = (128, 128),
) -> Absorbed:
    """Split ``kv_b_proj`` into ``w_uk`` and ``w_uv``; elements and scales do not change.

    Args:
      weight, weight_scale_inv: elements and scales of ``kv_b_proj``. Each head has ``qk_nope_head_dim`` rows of keys
        and then ``v_head_dim`` rows of values.
      num_heads, qk_nope_head_dim, v_head_dim: number of heads, and sizes of the parts of a head.
      block_size: number of rows and columns of the weight that share a scale.

    Raises:
      ValueError: the blocks do not divide a size, or the weight has another shape; the message names the size.
    """
    _check_block(block_size)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [rows, C], got shape {weight.shape}")
    rank, head = weight.shape[1], qk_nope_head_dim + v_head_dim
    if weight.shape[0] != num_heads * head:
        raise ValueError(
            f"kv_b_proj has {weight.shape[0]} rows, not num_heads {num_heads} times (qk_nope_head_dim "
            f"{qk_nope_head_dim} + v_head_dim {v_head_dim})"
        )
    sizes = {"qk_nope_head_dim": qk_nope_head_dim, "v_head_dim": v_head_dim, "kv_lora_rank": rank}
    for (name, size), step in zip(sizes.items(), (block_size[0], block_size[0], block_size[1]), strict=True):
        if size % step:
            raise ValueError(
                f"{name} {size} is not a multiple of {step} (kv_b_proj has blocks of {block_size}), so w_uk and w_uv "
                "would share scales; multiply by kv_b_proj without split_kv_b_proj"
            )
    tensor = _make_kernel(weight, weight_scale_inv, block_size, "bfloat16").operand

    def split(part: Array, step: int) -> tuple[Array, Array]:
        heads = part.reshape(num_heads, head // step, -1)
        return heads[:, : qk_nope_head_dim // step].swapaxes(1, 2), heads[:, qk_nope_head_dim // step :]

    (w_uk, w_uv), (uk_scale, uv_scale) = split(tensor.qvalue, 1), split(tensor.scale, block_size[0])
    return Absorbed(w_uk, uk_scale, w_uv, uv_scale)


def block_scale_bmm(
    x: Float[Array, "H M K"],
    weight: Shaped[Array, "H N K"],
    weight_scale_inv: Float[Array, "H n k"],
    block_size: Block = (128, 128),
) -> Float[Array, "H M N"]:
    """Compute ``x[h] · weight[h]ᵀ`` for every head, with activations in ``1 × b1`` tiles, as MLC's ``quantized_bmm``.

    Args:
      x: activations, with the heads first.
      weight, weight_scale_inv: weights and scales of all heads, for example from ``split_kv_b_proj``.
      block_size: number of rows and columns of a weight that share a scale.

    Raises:
      ValueError: an argument has a wrong shape; the message names it.
      TypeError: the weight is not float8.
    """
    _check_shapes(x, weight, "[H, N, K]")
    if x.ndim != 3 or x.shape[0] != weight.shape[0]:
        raise ValueError(f"x {x.shape} must be [H, M, K] with as many heads as weight {weight.shape}")
    kernel = _make_kernel(weight, weight_scale_inv, block_size, x.dtype.name)
    return _multiply("block_scale_bmm", "dynamic", x, kernel, (((2,), (2,)), ((0,), (0,))), block_size)


# -- shared code ------------------------------------------------------------------------------------------------------


def _tile_spec(dtype: str, group_size: int) -> TensorSpec:
    if dtype not in _ELEMENTS:
        raise TypeError(f"dtype must be {' or '.join(_ELEMENTS)}, got {dtype!r}")
    return TensorSpec(dtype, "per_tile", tile_size=group_size)


def _check_shapes(x: Array, weight: Array, axes: str, bias: Array | None = None) -> None:
    """Check that a weight has the given axes, that the last axis of ``x`` is K, and that a bias has N elements."""
    if weight.ndim != len(axes.split()):
        raise ValueError(f"weight must be {axes}, got shape {weight.shape}")
    if x.shape[-1:] != weight.shape[-1:]:
        raise ValueError(f"the last axis of x {x.shape} must equal K of weight {axes} = {weight.shape}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {weight.shape[:1]}, got {bias.shape}")


def _check_block(block_size: Block) -> None:
    if not isinstance(block_size, Sequence) or len(block_size) != 2:
        raise TypeError(f"block_size must be (rows, columns) of a block, got {block_size}")


@functools.cache
def _recipe(how: Activation, dtype: str, block_size: Block) -> Recipe:
    """Return the recipe of a scheme, converted like the config of a checkpoint."""
    layer = block_layer(dtype, block_size, ScaleOrigin.STATIC if how == "static" else ScaleOrigin.DYNAMIC)
    recipe = to_recipe(layer, f"block scale, {how} activations")
    return recipe if how != "float" else to_recipe(dataclasses.replace(layer, input=None), recipe.name)


def _make_kernel(
    weight: Array, scale: Array, block_size: Block, dtype: str, activation_scale: Array | None = None
) -> QTensor:
    """Return a weight and its scales as a converted kernel, after checking dtypes and shapes."""
    _check_block(block_size)
    if not weight.dtype.name.startswith("float8"):
        raise TypeError(f"weight must be float8, got {weight.dtype.name}")
    block = (*(1,) * (weight.ndim - 2), *block_size)
    scale = jnp.broadcast_to(scale, scale_shape(weight.shape, block)) if scale.size == 1 else scale
    static = None if activation_scale is None else activation_scale.astype(jnp.float32).reshape(1, -1)
    kernel = QTensor(weight, scale, block=block, input_scale=static, dtype=dtype)
    check(kernel, "weight with weight_scale_inv")
    return kernel


def _multiply(
    name: str,
    how: Activation,
    x: Array,
    kernel: QTensor,
    numbers: DotDimensionNumbers,
    block_size: Block,
    out_dtype: str | None = None,
) -> Array:
    dims = Dimensions.of(numbers, x.ndim, kernel.ndim)
    record_choice(name, Choice(how, _describe_choice(how, x, kernel, dims, out_dtype or x.dtype.name)))
    recipe = _recipe(how, kernel.qvalue.dtype.name, tuple(block_size))
    return dot_general(x, kernel, numbers, preferred_element_type=out_dtype, recipe=recipe)


def _describe_choice(how: Activation, x: Array, kernel: QTensor, dims: Dimensions, out_dtype: str) -> str:
    """Describe how the activation is quantized, or how the weight is dequantized, for ``choices_made``."""
    if how != "float":
        return f"rows are quantized by {'static scales' if how == 'static' else 'their own amax'}"
    is_few = dequantized_dtype(x, kernel.operand, dims, out_dtype) is None
    way = "each block's float32 sum is scaled" if is_few else "the weight is dequantized first"
    return f"one row on {platform_of(x)}: {way}"
