"""conv_general_dilated: a convolution in low precision, forward and backward.

A convolution contracts all axes of the activation but the batch, and all axes of the kernel but the output features, so
that a scale per channel is one an example, and one an output feature. Padding adds zeros, which every symmetric
quantization keeps.

    lhs ── quantize, per tensor or example ───────┐
    rhs ── quantize, per tensor or output feature ┴─ lax.conv_general_dilated ── scales ──► y
    grad ── fold the residual's per-channel scale in ── quantize ── jax's own transposed convolutions ──► dlhs, drhs

``lax.conv_general_dilated`` takes two operands of one type. Where those of a gradient differ (float8_e5m2 by
float8_e4m3fn) both are multiplied as bfloat16, which holds every value of either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.lax import ConvDimensionNumbers

from jaxquant.core import delayed
from jaxquant.core.qtensor import ConvertedKernel, QTensor, dequantize
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import Operand, Recipe, TensorSpec
from jaxquant.core.rounding import content_key, two_keys
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, power_of_two_below
from jaxquant.core.sharding import device_key, explicit_sharding, fit_varying, varying_axes
from jaxquant.ops import pieces
from jaxquant.ops.arguments import QuantState, check_float, check_state, hashable_precision
from jaxquant.ops.contract import accumulator_dtype
from jaxquant.ops.converted import check_input_scale, check_scales, straight_through
from jaxquant.ops.gradients import first_order
from jaxquant.ops.operand import forward_key, quantize_operand
from jaxquant.ops.pieces import clip_mask, eight_bits, masked, named, scaled, shard_size

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a call is fixed while tracing."""

    recipe: Recipe
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    numbers: ConvDimensionNumbers
    groups: int
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    out_dtype: str
    precision: Any
    lhs_varies: frozenset[str]
    rhs_varies: frozenset[str]

    def convolve(self, lhs: Array, rhs: Array, dtype: str | None = None, precision: Any = None) -> Array:
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.numbers,
            self.groups,
            precision=precision if self.precision is None else self.precision,
            preferred_element_type=dtype,
        )

    @property
    def batch(self) -> int:
        """Axis of the examples in lhs."""
        return self.numbers.lhs_spec[0]

    @property
    def feature(self) -> int:
        """Axis of the output features in rhs."""
        return self.numbers.rhs_spec[0]

    def example_scale(self, scale: Array, axis: int) -> Array:
        """Lay a scale of each example out along an axis of another array of the same rank."""
        return _along(scale, self.batch, axis)

    def feature_scale(self, scale: Array, axis: int) -> Array:
        return _along(scale, self.feature, axis)


def conv_general_dilated(
    lhs: Array,
    rhs: Array | ConvertedKernel,
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
    key: Array | None = None,
) -> Array:
    """Convolve an activation with a kernel in the low precision of a recipe, forward and backward.

    Takes the arguments of ``jax.lax.conv_general_dilated``. Gradients pass straight through rounding; values cut off by
    a clipping calibration get none.

    Args:
      lhs: activation, any float dtype.
      rhs: kernel, any float dtype; a converted one needs no state and gets no gradient.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, precision: as there.
      batch_group_count: 1.
      preferred_element_type: dtype of the result, None for the promoted dtype of the operands.
      recipe: all numbers.
      state: for a recipe with delayed scaling, the amax state from ``ops.initial_state``.
      key: random key for stochastic rounding; None derives one from the output gradient's bits.

    Raises:
      ValueError: missing state, or shards of the weight gradient that do not divide the examples.
      TypeError: operands that are not float.
      NotImplementedError: tiles, asymmetric ranges or sparsity in the recipe, a batch_group_count, or an explicit mesh
        in the operands' types.
    """
    _check(lhs, rhs, recipe, batch_group_count)
    numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    ones = (1,) * (lhs.ndim - 2)
    dilation = tuple(rhs_dilation or ones)
    if isinstance(padding, str):
        windows = [(rhs.shape[axis] - 1) * d + 1 for axis, d in zip(numbers.rhs_spec[2:], dilation, strict=True)]
        spatial = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
        padding = jax.lax.padtype_to_pads(spatial, windows, window_strides, padding)
    static = _Static(
        recipe,
        tuple(window_strides),
        tuple((int(low), int(high)) for low, high in padding),
        tuple(lhs_dilation or ones),
        dilation,
        numbers,
        feature_group_count,
        jax.ShapeDtypeStruct(lhs.shape, lhs.dtype),
        jax.ShapeDtypeStruct(rhs.shape, jnp.dtype(rhs.dtype)),
        jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)).name,
        hashable_precision(precision),
        varying_axes(lhs),
        varying_axes(rhs.tensor.qvalue if isinstance(rhs, ConvertedKernel) else rhs),
    )
    if isinstance(rhs, ConvertedKernel):
        check_scales("conv_general_dilated", rhs, (static.feature,))
        check_input_scale(recipe, rhs)
        run, gradient = functools.partial(_served, static), functools.partial(_served_gradient, static)
        return straight_through(run, gradient, lhs, rhs, key)
    check_state(recipe, state)
    return _conv(static, lhs, rhs, state or {}, key)


def unsupported(recipe: Recipe) -> str:
    """Explain why a recipe's numbers make no sense for a convolution, "" where they do."""
    own = [spec for spec in (recipe.dlhs.rhs, recipe.drhs.lhs) if isinstance(spec, TensorSpec)]
    if any(spec.granularity != "per_tensor" and spec.calibration.method != "fixed" for spec in own):
        return "operands that are quantized per channel again for the backward pass"
    return pieces.unsupported(recipe)


def _check(lhs: Array, rhs: Array | ConvertedKernel, recipe: Recipe, batch_group_count: int) -> None:
    is_converted = isinstance(rhs, ConvertedKernel)
    check_float("conv_general_dilated", lhs=lhs, **({} if is_converted else {"rhs": rhs}))
    for name, operand in (("lhs", lhs), ("rhs", rhs.tensor.qvalue if is_converted else rhs)):
        if explicit_sharding(operand) is not None:
            raise NotImplementedError(
                f"conv_general_dilated {name} is split over devices in its type, by an explicit mesh; quantized "
                "convolutions of such operands are not implemented"
            )
    if batch_group_count != 1:
        raise NotImplementedError(f"conv_general_dilated batch_group_count {batch_group_count} is not quantized; use 1")
    if why := unsupported(recipe):
        raise NotImplementedError(f"recipe {recipe.name!r} has {why}, which conv_general_dilated does not run")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(static: _Static, lhs: Array, rhs: Array, state: QuantState, key: Array | None) -> Array:
    return _forward(static, lhs, rhs, state, key)[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: _Static, lhs: Array, rhs: Array, state: QuantState, key: Array | None):
    recipe = static.recipe
    left, lhs_seen = _quantize_forward(static, lhs, recipe.fwd.lhs, static.batch, state.get("input"), key)
    right, rhs_seen = _quantize_forward(static, rhs, recipe.fwd.rhs, static.feature, state.get("kernel"), key)
    out = _product(static, left, right)
    kept = (
        _kept(left, lhs, recipe.drhs.lhs, key),
        _kept(right, rhs, recipe.dlhs.rhs, key),
        clip_mask(lhs, recipe.fwd.lhs, left if isinstance(left, QTensor) else None),
        clip_mask(rhs, recipe.fwd.rhs, right if isinstance(right, QTensor) else None),
    )
    without_bins = {name: delayed.without_bins(tensor) for name, tensor in state.items()}
    return out, (kept, without_bins, lhs_seen, rhs_seen, key)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals, grad: Array):
    (lhs, rhs, lhs_mask, rhs_mask), state, lhs_seen, rhs_seen, key = residuals
    recipe, numbers = static.recipe, static.numbers
    if recipe.is_stochastic:
        key = content_key(grad) if key is None else device_key(key, grad)
    keys = (None, None) if key is None else two_keys(key)
    shared, grad_seen = None, None
    if "output_grad" in state:
        assert isinstance(recipe.dlhs.lhs, TensorSpec)
        shared, grad_seen = quantize_operand(
            grad, recipe.dlhs.lhs, (), recipe=recipe, state=state["output_grad"], floor=SMALLEST_GRADIENT_SCALE
        )

    examples, features = numbers.out_spec[:2]
    both = recipe.dlhs, recipe.drhs
    of_lhs = _Gradient(both[0].lhs, both[0].accumulator, (static.feature, features), examples, static.batch, True)
    of_rhs = _Gradient(both[1].rhs, both[1].accumulator, (static.batch, examples), features, static.feature, False)
    with jax.named_scope("dlhs"):
        dlhs = _gradient(static, of_lhs, grad, shared, rhs, keys[0])
    with jax.named_scope("drhs"):
        drhs = _by_shard(static, of_rhs, grad, shared, lhs, keys[1])
    observations = {"input": lhs_seen, "kernel": rhs_seen, "output_grad": grad_seen}
    observed = {}
    for name, old in state.items():
        assert recipe.delayed is not None
        scale, amax = observations[name]
        new = delayed.observe(old, scale, amax, recipe.delayed)
        observed[name] = {field: fit_varying(x, varying_axes(old["scale"])) for field, x in new.items()}
    dlhs, drhs = masked(dlhs, lhs_mask, static.lhs.dtype), masked(drhs, rhs_mask, static.rhs.dtype)
    return fit_varying(dlhs, static.lhs_varies), fit_varying(drhs, static.rhs_varies), observed, None


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """One of both gradients.

    Attributes:
      spec, accumulator: of the matmul.
      axes: that of the kept operand along which its scale may vary, and its place in the gradient.
      kept_axis, result_axis: that of the gradient along which its own scale may vary, and its place in the result.
      of_lhs: whether it is the activation's.
    """

    spec: Operand
    accumulator: str | None
    axes: tuple[int, int]
    kept_axis: int
    result_axis: int
    of_lhs: bool


def _by_shard(
    static: _Static, what: _Gradient, grad: Array, shared: QTensor | None, other: QTensor | Array, key: Array | None
) -> Array:
    """Compute the weight gradient: of the examples of each shard by themselves, added in float32."""
    count = static.recipe.drhs.shards
    if count == 1 or not isinstance(what.spec, TensorSpec):
        return _gradient(static, what, grad, shared, other, key)
    size = shard_size(static.recipe, static.lhs.shape[static.batch], "examples of its convolution")
    cut = lambda x, axis, n: jax.lax.slice_in_dim(x, n * size, (n + 1) * size, axis=axis)  # noqa: E731
    shape = tuple(size if axis == static.batch else n for axis, n in enumerate(static.lhs.shape))
    part = dataclasses.replace(static, lhs=jax.ShapeDtypeStruct(shape, static.lhs.dtype))
    total = jnp.zeros(())
    for n in range(count):
        kept = other
        if isinstance(kept, QTensor):
            scale = kept.scale if kept.scale.shape[static.batch] == 1 else cut(kept.scale, static.batch, n)
            kept = QTensor(cut(kept.qvalue, static.batch, n), scale)
        else:
            kept = cut(kept, static.batch, n)
        own = None if shared is None else QTensor(cut(shared.qvalue, what.axes[1], n), shared.scale)
        own_key = None if key is None else jax.random.fold_in(key, n)
        total = total + _gradient(part, what, cut(grad, what.axes[1], n), own, kept, own_key).astype(jnp.float32)
    return total.astype(static.out_dtype)


def _gradient(
    static: _Static, what: _Gradient, grad: Array, shared: QTensor | None, other: QTensor | Array, key: Array | None
) -> Array:
    """Convolve the output's gradient with what was kept of an operand."""
    spec, highest = what.spec, jax.lax.Precision.HIGHEST

    def quantized(grad: Array, spec: TensorSpec) -> QTensor:
        axes = _others(grad.ndim, what.kept_axis)
        return shared or quantize(grad, spec, axes, key=key, floor=SMALLEST_GRADIENT_SCALE)

    if not isinstance(spec, TensorSpec) or not isinstance(other, QTensor):
        left = dequantize(quantized(grad, spec), grad.dtype.name) if isinstance(spec, TensorSpec) else grad
        other = dequantize(other, grad.dtype.name) if isinstance(other, QTensor) else other.astype(grad.dtype)
        return _transposed(static, left, other, what.of_lhs, accumulator_dtype(None, static.out_dtype), highest)
    left, scale = grad, other.scale
    if scale.size > 1:  # forward per channel: multiplied into the gradient
        unit = power_of_two_below(jnp.max(scale))  # as in dot_general.align
        left = grad.astype(jnp.float32) * _along(scale / unit, *what.axes)
        scale = unit.reshape((1,) * scale.ndim)
    tensor = quantized(left, spec)
    dtype = accumulator_dtype(what.accumulator, static.out_dtype)
    first, second = _same_type(tensor.qvalue, other.qvalue)
    out = _transposed(static, first, second, what.of_lhs, dtype, highest)
    kept_scale = _along(tensor.scale, what.kept_axis, what.result_axis)
    return scaled(static.recipe, static.out_dtype, out, kept_scale, scale)


def _conv_bwd(static: _Static, residuals, grad: Array):
    dlhs, drhs, *others = _backward(static, residuals, grad)
    return *first_order(static.recipe.name, (dlhs, drhs)), *others


_conv.defvjp(_forward, _conv_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _served(static: _Static, lhs: Array, weight: ConvertedKernel, key: Array | None) -> Array:
    left, spec = lhs, static.recipe.fwd.lhs
    if isinstance(spec, TensorSpec):
        left, _ = quantize_operand(
            lhs,
            spec,
            _others(lhs.ndim, static.batch),
            recipe=static.recipe,
            static_scale=None if spec.scaling == "dynamic" else weight.input_scale,
            key=forward_key(lhs, spec, key),
        )
    return _product(static, left, weight.tensor)


@functools.partial(jax.jit, static_argnums=0)
def _served_gradient(static: _Static, grad: Array, weight: ConvertedKernel, key: Array | None) -> Array:
    """Compute the gradient that the dequantized kernel gives."""
    dtype = accumulator_dtype(None, static.out_dtype)
    kernel = dequantize(weight.tensor, grad.dtype.name)
    out = _transposed(static, grad, kernel, True, dtype, jax.lax.Precision.HIGHEST)
    return fit_varying(out, static.lhs_varies)


def _product(static: _Static, left: QTensor | Array, right: QTensor | Array) -> Array:
    """Convolve the forward operands and apply their scales."""
    numbers = static.numbers
    if isinstance(left, QTensor) and isinstance(right, QTensor):
        dtype = accumulator_dtype(static.recipe.fwd.accumulator, static.out_dtype)
        first, second = _same_type(left.qvalue, right.qvalue)
        out = static.convolve(first, second, dtype, jax.lax.Precision.DEFAULT)
        out = scaled(
            static.recipe,
            static.out_dtype,
            out,
            static.example_scale(left.scale, numbers.out_spec[0]),
            static.feature_scale(right.scale, numbers.out_spec[1]),
        )
    else:
        common = jnp.promote_types(static.lhs.dtype, static.rhs.dtype)
        left_float, right_float = (
            dequantize(x, common.name) if isinstance(x, QTensor) else x.astype(common) for x in (left, right)
        )
        out = static.convolve(left_float, right_float, accumulator_dtype(None, static.out_dtype))
    return out.astype(static.out_dtype)


def _transposed(static: _Static, grad: Array, other: Array, of_lhs: bool, dtype: str, precision: Any) -> Array:
    """Run the program of jax's transposition of the convolution, on operands of any dtype.

    It is traced in float32 and consists of the convolution and of reversals and reshapes beside it.
    """
    like = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)  # noqa: E731

    def transpose(grad: Array, other: Array) -> Array:
        forward = (lambda x: static.convolve(x, other)) if of_lhs else (lambda x: static.convolve(other, x))
        return jax.linear_transpose(forward, like(static.lhs if of_lhs else static.rhs))(grad)[0]

    jaxpr = jax.make_jaxpr(transpose)(like(grad), like(other)).jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.invars, (grad, other), strict=True))
    for eqn in jaxpr.eqns:
        ins = [atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            asked = precision if static.precision is None else static.precision
            options: dict[str, Any] = dict(eqn.params) | {"preferred_element_type": dtype, "precision": asked}
            options.pop("out_sharding", None)
            known[eqn.outvars[0]] = jax.lax.conv_general_dilated(*ins, **options)
        else:
            known[eqn.outvars[0]] = eqn.primitive.bind(*ins, **eqn.params)
    return known[jaxpr.outvars[0]]


# -- operands ----------------------------------------------------------------------------------------------------------


def _others(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(ndim) if each != axis)


def _along(scale: Array, axis: int, target: int) -> Array:
    """Lay a scale that varies along one axis at most out along another axis."""
    shape = [1] * scale.ndim
    shape[target] = scale.shape[axis]
    return scale.reshape(shape)


def _same_type(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """Bring qvalues into one type of at least eight bits that holds both."""
    lhs, rhs = eight_bits(lhs), eight_bits(rhs)
    if lhs.dtype == rhs.dtype:
        return lhs, rhs
    return lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)


def _quantize_forward(
    static: _Static, x: Array, spec: Operand, kept: int, state: delayed.TensorState | None, key: Array | None
):
    if not isinstance(spec, TensorSpec):
        return x, None
    key = forward_key(x, spec, key)
    return quantize_operand(x, spec, _others(x.ndim, kept), recipe=static.recipe, state=state, key=key)


def _kept(forward: QTensor | Array, x: Array, operand: Operand, key: Array | None) -> QTensor | Array:
    """Choose what backward keeps of a forward operand, as in ``ops.dot_general``."""
    if operand is None:
        return x
    if isinstance(operand, TensorSpec):  # per tensor: no axis keeps a scale of its own
        forward = quantize(x, operand, tuple(range(x.ndim)), key=forward_key(x, operand, key))
    return named(forward) if isinstance(forward, QTensor) else forward
