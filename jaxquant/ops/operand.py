"""Quantization of one operand: array, spec and state in; QTensor and observation out.

Training, serving, conversion, calibration and health checks all call ``quantize_operand``.

    x ── amax ──┬─► scale: from this step (dynamic), from past steps (delayed), or given (static)
                │                     │
                └─► Observation       └── cast ──► QTensor
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxquant.core import delayed
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import quantize, quantize_with_scale
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, content_key, fold
from jaxquant.core.scales import SMALLEST_SCALE, absolute
from jaxquant.core.sharding import all_reduce, device_key, varying_axes
from jaxquant.formats import encode_tensor
from jaxquant.kernels.platforms import capability_of
from jaxquant.kernels.quantize import api as kernel
from jaxquant.ops.byte_dot import row_major
from jaxquant.ops.implementation import STORED_CASTS_PAY, select_implementation

Array = jax.Array


class Observation(NamedTuple):
    """Scale and amax of an operand that was quantized with delayed scaling.

    Attributes:
      scale: scale that the operand was quantized with, float32 of shape (1,). None if the residual's tensor stores the
        scale.
      amax: largest magnitude of the operand, a scalar.
    """

    scale: Float[Array, 1] | None
    amax: Float[Array, ""]


def scale_dtype(recipe: Recipe, dtype: str) -> str:
    """Return the dtype of scales in arithmetic: the tensor's own dtype in flax mode, float32 otherwise.

    Args:
      recipe: recipe whose delayed scaling selects flax mode.
      dtype: dtype name of the operand or result.
    """
    return dtype if recipe.matches_flax else "float32"


def cast_dtype(recipe: Recipe, dtype: str) -> str:
    """Return the dtype in which an operand is divided by its scale.

    Args:
      recipe: recipe whose arithmetic and delayed scaling select the dtype.
      dtype: dtype name of the operand.
    """
    return dtype if recipe.is_lean and dtype == "bfloat16" else scale_dtype(recipe, dtype)


def quantize_operand(
    x: Float[Array, "*shape"],
    spec: TensorSpec,
    axes: Sequence[int],
    *,
    recipe: Recipe,
    batch: Sequence[int] = (),
    state: delayed.TensorState | None = None,
    static_scale: Float[Array, "*ones"] | None = None,
    key: RandomKey | None = None,
    shards: int = 1,
    floor: float = SMALLEST_SCALE,
    implementation: str | None = None,
    is_stored: bool = False,
) -> tuple[QTensor, QTensor, Observation | None]:
    """Quantize an operand of a contraction: ``cast(clip(d(x / d(scale))))`` with a float32 scale.

    d rounds to ``cast_dtype``: bfloat16 if x is bfloat16 and the recipe's arithmetic is lean; the operand's dtype in
    flax mode; float32 otherwise.

    Args:
      x: operand, any float dtype.
      spec: operand spec of the recipe.
      axes: contraction axes of x, fastest-varying last.
      recipe: recipe that the spec belongs to.
      batch: batch axes of x.
      state: quant state of the operand before this step. Required if the spec uses delayed scaling.
      static_scale: one scale for the whole operand, or one for each tile along its contraction axis. This scale
        overrides the scaling of the spec (with ``outer_scale``: only the outer scale), and no observation is returned.
      key: random key for stochastic rounding.
      shards: number of blocks along the first contraction axis that are quantized separately.
      floor: scales below this value are replaced by 1.
      implementation: implementation of the cast, or None to select one; see ``ops.implementation``.
      is_stored: whether x is stored in memory rather than computed where it is quantized.

    Returns:
      The quantized operand; the same operand for a contraction along its other axes, which on Hopper may be a copy
      with those axes last in memory; and the observation if the spec uses delayed scaling (otherwise None).

    Raises:
      ValueError: a required scale, state or key is missing, or tiles or shards do not divide the axis.
    """
    if spec.codec is not None:
        return _unobserved(encode_tensor(x, spec.codec, axes))
    compute = cast_dtype(recipe, x.dtype.name)
    is_cast = is_stored and spec.scaling == "delayed" and spec.rounding == "nearest"
    split = _first_axis(x, axes, batch) if is_cast else None
    cast = functools.partial(_cast, spec=spec, compute=compute, key=key, implementation=implementation, split=split)
    if static_scale is not None and spec.outer_scale:
        outer = static_scale.reshape((1,) * x.ndim)
        return _unobserved(row_major(quantize(x, spec, axes, key=key, batch=batch, compute_dtype=compute, outer=outer)))
    if static_scale is not None and static_scale.size > 1:
        return _unobserved(row_major(_cast_tiles(x, spec, axes, static_scale, compute)))
    if static_scale is not None:
        return _unobserved(cast(x, static_scale)[0])
    if spec.scaling == "static":
        raise ValueError(
            f"recipe {recipe.name!r} needs a static scale for an array of shape {x.shape}, but the model has no scale "
            "for the array; convert or import the model with its scales"
        )
    if spec.scaling == "dynamic":
        select_implementation(
            "quantize", implementation, lambda: "XLA computes the amax of a dynamic scale together with the cast"
        )
        more = {"shards": shards, "batch": batch, "floor": floor, "compute_dtype": compute}
        more["except_axes"] = recipe.expert_axes
        return _unobserved(row_major(quantize(x, spec, axes, key=key, **more)))
    if state is None or recipe.delayed is None:
        raise ValueError(f"recipe {recipe.name!r} uses delayed scaling and needs quant state; pass the state from init")
    whole = varying_axes(state["scale"]).union(recipe.expert_axes)
    if delayed.is_warm(state):
        scale = delayed.current_scale(state, jnp.zeros(()), element(spec.dtype), recipe.delayed, floor=floor)
        tensor, other, kernel_amax = cast(x, scale)
        if 0 in axes:
            tensor, other = other, tensor  # the copy has the contraction last
        amax = all_reduce(jax.lax.pmax, _amax(x, recipe) if kernel_amax is None else kernel_amax, x, except_axes=whole)
        if kernel_amax is not None:
            return poison_tensor(tensor, amax, spec), poison_tensor(other, amax, spec), Observation(scale, amax)
    else:
        amax = all_reduce(jax.lax.pmax, _amax(x, recipe), x, except_axes=whole)
        scale = delayed.current_scale(state, amax, element(spec.dtype), recipe.delayed, floor=floor)
        # Without a history the scale depends on the amax of x. As for dynamic scales, XLA:GPU must not fuse the cast
        # into the producer of x.
        why = "without an amax history, XLA computes the amax together with the cast"
        tensor, _, _ = cast(jax.lax.optimization_barrier(x), scale, refusal=why)
    if recipe.is_lean and varying_axes(tensor.qvalue) == varying_axes(amax):
        # Compute the cast and the amax in one read of x: without a barrier, XLA fuses the amax with another consumer
        # of x and reads x twice. A barrier gives its outputs the same varying axes, so there is none if the amax is
        # reduced over devices and the cast is not.
        qvalue, amax = jax.lax.optimization_barrier((tensor.qvalue, amax))
        tensor = dataclasses.replace(tensor, qvalue=qvalue)
    tensor = poison_tensor(tensor, amax, spec)
    return tensor, tensor, Observation(scale, amax)


def _unobserved(tensor: QTensor) -> tuple[QTensor, QTensor, None]:
    """Return (tensor, the same tensor for the other axes, no observation)."""
    return tensor, tensor, None


def poison_tensor(tensor: QTensor, amax: Array, spec: TensorSpec) -> QTensor:
    """Set the scales of an integer tensor to NaN if its input has NaN or infinity; see ``delayed.poison_scale``."""
    return dataclasses.replace(tensor, scale=delayed.poison_scale(tensor.scale, amax, element(spec.dtype)))


def _first_axis(x: Array, axes: Sequence[int], batch: Sequence[int]) -> int | None:
    """Return the axis that is first in the memory of the transposed copy, or None if a copy saves no time.

    Hopper's 8-bit matmuls read operands whose contraction axes are last in memory. One matmul reads the stored tensor,
    the other matmuls read the copy. A forward pass without a backward pass writes a copy that no matmul reads. There
    are no copies on other GPUs, on which the kernel was not measured, or on TPUs, which can read both layouts.
    """
    first, last = tuple(range(len(axes))), tuple(range(x.ndim - len(axes), x.ndim))
    if batch or not 0 < len(axes) < x.ndim or tuple(sorted(axes)) not in (first, last) or capability_of(x)[0] != 9:
        return None
    return len(axes) if tuple(sorted(axes)) == first else last[0]


def _cast(
    x: Array,
    scale: Float[Array, 1],
    *,
    spec: TensorSpec,
    compute: str,
    key: RandomKey | None,
    implementation: str | None,
    split: int | None,
    refusal: str | None = None,
) -> tuple[QTensor, QTensor, Array | None]:
    """Quantize with a known scale. Returns the tensor, its copy (``_first_axis``), and the amax of a kernel or None."""
    scale = scale.reshape((1,) * x.ndim)

    def refused() -> str | None:
        if refusal is not None:
            return refusal
        if spec.reciprocal or spec.scale_rounding != "exact" or spec.scale_dtype != "float32":
            return "the quantize kernel supports exact float32 scales, not rounded scales or reciprocals"
        if spec.rounding != "nearest":
            return f"the quantize kernel rounds to nearest, but the recipe's rounding is {spec.rounding!r}"
        return kernel.refusal(x, scale, dtype=spec.dtype, compute_dtype=compute, split=split)

    reason_to_prefer = None if split is None else STORED_CASTS_PAY
    if select_implementation("quantize", implementation, refused, reason_to_prefer).name == "xla":
        tensor = row_major(quantize_with_scale(x, spec, scale, key=key, compute_dtype=compute))
        return tensor, tensor, None
    q, copy, amax = kernel.quantize(x, scale, dtype=spec.dtype, compute_dtype=compute, split=split)
    return QTensor(q, scale), QTensor(copy, scale), amax.astype(x.dtype)


def _cast_tiles(x: Array, spec: TensorSpec, axes: Sequence[int], scale: Array, compute: str) -> QTensor:
    """Quantize with one known scale for each tile along the contraction axis, shared by all rows.

    Raises:
      ValueError: the number of scales is not the number of tiles.
    """
    axis, step = axes[-1], spec.tile_size or 1
    if len(axes) > 1 or scale.size != -(-x.shape[axis] // step):
        raise ValueError(
            f"got {scale.size} static scales for an array of shape {x.shape} in tiles of {step} along contraction axes "
            f"{tuple(axes)}; pass one scale, or one scale for each tile of a single axis"
        )
    block = tuple(step if i == axis else max(1, size) for i, size in enumerate(x.shape))
    scale = scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return quantize_with_scale(x, spec, scale, compute_dtype=compute, block=block)


def _amax(x: Array, recipe: Recipe) -> Array:
    if not x.size:
        return jnp.zeros((), x.dtype)
    return jnp.max(jnp.abs(x) if recipe.matches_flax else absolute(x))  # flax has no NaN handling


def forward_key(x: Array, spec: TensorSpec | None, key: RandomKey | None) -> RandomKey | None:
    """Return the random key of a forward operand, or None if its rounding is deterministic.

    The key is derived from the values of x and, if given, the caller's key.

    Args:
      x: operand.
      spec: spec of the operand, or None if it stays in float.
      key: the caller's key.
    """
    if spec is None or not spec.draws:
        return None
    own = content_key(x)
    return own if key is None else fold(device_key(key, x), *own)


def quantize_kernel(
    kernel: Array,
    axes: Sequence[int],
    *,
    recipe: Recipe,
    state: Mapping[str, Any] | None = None,
    batch: Sequence[int] = (),
) -> QTensor:
    """Quantize a kernel for conversion, with the same result as the forward pass of ``dot_general``.

    Args:
      kernel: float kernel, in the dtype in which the op reads it. If the recipe has sparsity, the mask is already
        applied.
      axes: contraction axes of the kernel.
      recipe: recipe of the layer; it must quantize weights.
      state: quant state of the layer, for recipes with delayed scaling.
      batch: batch axes of the kernel.
    """
    spec = recipe.resolve("fwd", "rhs")
    assert spec is not None
    of_kernel = None if spec.scaling != "delayed" or state is None else state["kernel"]
    return quantize_operand(
        kernel, spec, axes, recipe=recipe, batch=batch, state=of_kernel, key=forward_key(kernel, spec, None)
    )[0]


def input_scale(recipe: Recipe, state: Mapping[str, Any]) -> Array | None:
    """Return the static scale of the activation, shape (1,), or None if the recipe scales it dynamically.

    The scale is 0 if no activation was observed yet: training would use the activation's own amax, which is not a
    static scale.

    Args:
      recipe: recipe of the layer.
      state: quant state of the layer.

    Raises:
      ValueError: the recipe uses a static activation scale.
    """
    spec = recipe.resolve("fwd", "lhs")
    if spec is not None and spec.scaling == "static":
        raise ValueError(
            f"recipe {recipe.name!r} uses a static activation scale, which only an imported checkpoint has; to "
            "convert a float model, use a recipe with dynamic or delayed scaling"
        )
    if spec is None or spec.scaling != "delayed":
        return None
    assert recipe.delayed is not None
    scale = delayed.current_scale(state["input"], jnp.zeros(()), element(spec.dtype), recipe.delayed)
    if recipe.matches_flax:
        return scale
    return jnp.where(delayed.has_history(state["input"]), scale, 0.0)
