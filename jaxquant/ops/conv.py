"""conv_general_dilated: a convolution in low precision, forward and backward.

A convolution contracts all axes of the activation except the batch, and all axes of the kernel except the output
features. A scale per channel is therefore a scale per example or per output feature. Padding adds zeros, which every
symmetric quantization represents exactly.

    lhs ── quantize, per tensor or example ───────┐
    rhs ── quantize, per tensor or output feature ┴─ lax.conv_general_dilated ── scales ──► y
    grad ── fold the residual's per-channel scale in ── quantize ── jax's own transposed convolutions ──► dlhs, drhs

``lax.conv_general_dilated`` needs operands of one dtype. If the operands of a gradient differ (float8_e5m2 and
float8_e4m3fn), both are multiplied as bfloat16, in which all their values are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import ConvDimensionNumbers

from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, power_of_two_below
from jaxquant.ops import pieces
from jaxquant.ops.contract import accumulator_dtype
from jaxquant.ops.converted import check_scales
from jaxquant.ops.pieces import (
    QuantState,
    check_operands,
    check_state,
    evaluate_jaxpr,
    rescale,
    round_result,
    to_eight_bits,
)
from jaxquant.ops.prepared import QuantizedOperand, make_prepared
from jaxquant.ops.quantized import Gradient, Operation, contract_converted, quantized

Array = jax.Array


def conv_general_dilated(
    lhs: Array,
    rhs: Array | QTensor,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: RandomKey | None = None,
) -> Array:
    """Convolve an activation with a kernel in the low precision of a recipe, forward and backward.

    Accepts the arguments of ``jax.lax.conv_general_dilated``. Gradients pass straight through rounding; values that a
    clipping calibration clipped have zero gradient.

    Args:
      lhs: activation, any float dtype.
      rhs: kernel, any float dtype; a converted kernel needs no state and has no gradient.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, precision: arguments
        of ``jax.lax.conv_general_dilated``.
      batch_group_count: number 1; other numbers are not supported.
      preferred_element_type: dtype of the result, or None for the promoted dtype of the operands.
      recipe: recipe of the convolution.
      state: amax state from ``ops.initial_state``, for a recipe with delayed scaling.
      key: random key for stochastic rounding; None derives a key from the bits of the output gradient.

    Raises:
      ValueError: ``state`` does not match the recipe.
      TypeError: an operand is not float.
      NotImplementedError: a convolution does not support the recipe (``unsupported``), ``batch_group_count`` is not 1,
        or an operand is sharded on an explicit mesh.
    """
    check_operands("conv_general_dilated", lhs, rhs, recipe, unsupported(recipe))
    if batch_group_count != 1:
        raise NotImplementedError(f"conv_general_dilated does not support batch_group_count {batch_group_count}; use 1")
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    ones = (1,) * (lhs.ndim - 2)
    dilation = tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        windows = [(rhs.shape[axis] - 1) * d + 1 for axis, d in zip(numbers.rhs_spec[2:], dilation, strict=True)]
        spatial = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
        padding = jax.lax.padtype_to_pads(spatial, windows, window_strides, padding)
    recipe = pieces.with_shards(recipe, lhs, ())  # a shard count of -1 becomes 1
    pads = tuple((int(low), int(high)) for low, high in padding)
    window = _Window(tuple(window_strides), pads, tuple(lhs_dilation or ones), dilation, numbers, feature_group_count)
    op = _Conv.of(lhs, rhs, precision, preferred_element_type, recipe=recipe, window=window)
    if isinstance(rhs, QTensor):
        check_scales("conv_general_dilated", rhs, (op.feature,))
        return contract_converted(op, lhs, rhs, None, key)
    check_state(recipe, state)
    return quantized(op, lhs, rhs, None, state or {}, key)


def unsupported(recipe: Recipe) -> str:
    """Return the reason why a convolution cannot run a recipe, or "" if it can."""
    own = [spec for spec in (recipe.dlhs.rhs, recipe.drhs.lhs) if isinstance(spec, TensorSpec)]
    if any(spec.granularity != "per_tensor" and spec.calibration.method != "fixed" for spec in own):
        return "separate per-channel or block scales for the backward pass"
    specs = [spec for spec in recipe.specs.values() if isinstance(spec, TensorSpec)]
    reasons = {
        f"quantization_local_shard_count {recipe.drhs.shards}": recipe.drhs.shards > 1,
        "scales per tile or block": any(spec.granularity not in ("per_tensor", "per_channel") for spec in specs),
        "a GGML block format": any(spec.codec is not None for spec in specs),
        "rounded scales": any(spec.scale_dtype != "float32" or spec.scale_rounding != "exact" for spec in specs),
    }
    return next((reason for reason, holds in reasons.items() if holds), pieces.unsupported(recipe))


class _Window(NamedTuple):
    """Arguments of ``jax.lax.conv_general_dilated``, in its order."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    numbers: ConvDimensionNumbers
    groups: int


@dataclasses.dataclass(frozen=True)
class _Conv(Operation):
    """A convolution."""

    window: _Window

    @property
    def batch(self) -> int:
        """Axis of the examples in lhs."""
        return self.window.numbers.lhs_spec[0]

    @property
    def feature(self) -> int:
        """Axis of the output features in rhs."""
        return self.window.numbers.rhs_spec[0]

    def convolve(self, lhs: Array, rhs: Array, dtype: str | None = None, precision: Any = None) -> Array:
        precision = precision if self.precision is None else self.precision
        options = {"precision": precision, "preferred_element_type": dtype}
        return jax.lax.conv_general_dilated(lhs, rhs, *self.window, **options)

    def axes(self, side) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _other_axes(len(self.lhs.shape), self.batch if side == "lhs" else self.feature), ()

    def prepare(self, side, x, groups, state, key) -> QuantizedOperand:
        return make_prepared(x, self.recipe, side, *self.axes(side), state, key, None, reads_clips=False)

    def product(self, lhs: QTensor | Array, rhs: QTensor | Array, groups: None) -> Array:
        """Convolve the forward operands and apply their scales."""
        if isinstance(lhs, QTensor) and isinstance(rhs, QTensor):
            dtype = accumulator_dtype(self.recipe.fwd.accumulator, self.out_dtype)
            out = self.convolve(*_same_type(lhs.qvalue, rhs.qvalue), dtype, jax.lax.Precision.DEFAULT)
            examples, features = self.window.numbers.out_spec[:2]
            left, right = _move_scale(lhs.scale, self.batch, examples), _move_scale(rhs.scale, self.feature, features)
            out = rescale(self.recipe, self.out_dtype, out, left, right)
        else:
            common = jnp.promote_types(self.lhs.dtype, self.rhs.dtype)
            first, second = (_as_float(x, common.name) for x in (lhs, rhs))
            out = self.convolve(first, second, accumulator_dtype(None, self.out_dtype))
        return round_result(self.recipe, out, self.out_dtype)

    def gradient(self, name, grad: Array, shared: QTensor | None, residual, groups, key) -> Array:
        """Convolve the output gradient with the residual of an operand."""
        examples, features = self.window.numbers.out_spec[:2]
        # axis: axis of the residual along which its scale may vary; place: the same axis in the output gradient.
        # own_axis: axis of the output gradient along which its scale may vary; own_place: the same axis in the result.
        if name == "dlhs":
            spec, accumulator = self.recipe.dlhs.lhs, self.recipe.dlhs.accumulator
            axis, place, own_axis, own_place = self.feature, features, examples, self.batch
        else:
            spec, accumulator = self.recipe.drhs.rhs, self.recipe.drhs.accumulator
            axis, place, own_axis, own_place = self.batch, examples, features, self.feature

        def quantize_gradient(grad: Array, spec: TensorSpec) -> QTensor:
            axes = _other_axes(grad.ndim, own_axis)
            return shared or quantize(grad, spec, axes, key=key, floor=SMALLEST_GRADIENT_SCALE)

        if not isinstance(spec, TensorSpec) or not isinstance(residual, QTensor):
            left = _as_float(quantize_gradient(grad, spec), grad.dtype.name) if isinstance(spec, TensorSpec) else grad
            return self._convolve_transposed(name, left, _as_float(residual, grad.dtype.name), None)
        left, scale = grad, residual.scale
        if scale.size > 1:  # multiply a forward scale per channel into the gradient
            unit = power_of_two_below(jnp.max(scale))  # as in gradients.align
            left = grad.astype(jnp.float32) * _move_scale(scale / unit, axis, place)
            scale = unit.reshape((1,) * scale.ndim)
        tensor = quantize_gradient(left, spec)
        out = self._convolve_transposed(name, *_same_type(tensor.qvalue, residual.qvalue), accumulator)
        return rescale(self.recipe, self.out_dtype, out, _move_scale(tensor.scale, own_axis, own_place), scale)

    def input_gradient(self, grad: Array, kernel: QTensor, groups: None) -> Array:
        return self._convolve_transposed("dlhs", grad, dequantize(kernel, grad.dtype.name), None)

    def _convolve_transposed(self, name: Gradient, grad: Array, other: Array, accumulator: str | None) -> Array:
        """Evaluate jax's transposition of the convolution on operands of any dtype.

        The transposition is traced in float32, and consists of the convolution, reversals and reshapes.
        """
        like = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)  # noqa: E731
        of_lhs = name == "dlhs"

        def transpose(grad: Array, other: Array) -> Array:
            forward = (lambda x: self.convolve(x, other)) if of_lhs else (lambda x: self.convolve(other, x))
            return jax.linear_transpose(forward, like(self.lhs if of_lhs else self.rhs))(grad)[0]

        def compute(eqn: JaxprEqn, values: list[Any]) -> Array:
            if eqn.primitive.name != "conv_general_dilated":
                return eqn.primitive.bind(*values, **eqn.params)
            options: dict[str, Any] = dict(eqn.params)
            options["preferred_element_type"] = accumulator_dtype(accumulator, self.out_dtype)
            options["precision"] = jax.lax.Precision.HIGHEST if self.precision is None else self.precision
            options.pop("out_sharding", None)
            return jax.lax.conv_general_dilated(*values, **options)

        return evaluate_jaxpr(jax.make_jaxpr(transpose)(like(grad), like(other)).jaxpr, (grad, other), compute)


def _other_axes(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(ndim) if each != axis)


def _move_scale(scale: Array, axis: int, target: int) -> Array:
    """Move a scale that varies along at most one axis to another axis."""
    shape = [1] * scale.ndim
    shape[target] = scale.shape[axis]
    return scale.reshape(shape)


def _as_float(x: QTensor | Array, dtype: str) -> Array:
    return dequantize(x, dtype) if isinstance(x, QTensor) else x.astype(dtype)


def _same_type(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """Cast qvalues to one dtype of at least eight bits in which both are exact."""
    lhs, rhs = to_eight_bits(lhs), to_eight_bits(rhs)
    if lhs.dtype == rhs.dtype:
        return lhs, rhs
    return lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
