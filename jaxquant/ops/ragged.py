"""ragged_dot: a matmul of groups of rows, each with a weight of its own, in low precision forward and backward.

Group g of the rows is what ``ops.dot_general`` computes of these rows and ``rhs[g]``: its scales (per tensor: one for
each group), its quant state and its gradients are its own. Rows behind the last group give zeros and are not seen.

Shapes: M rows, K contracting, N columns, G groups.

    lhs [M, K] ── quantize, by row or by group ──┐
    rhs [G, K, N] ── quantize, by group ─────────┴─ lax.ragged_dot_general ── scales ──► y [M, N]
    grad [M, N] ── by row, for dlhs; by group (and column), for drhs
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jaxtyping import Array, Float, Int

from jaxquant.core import delayed
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import ConvertedKernel, QTensor, dequantize
from jaxquant.core.quantize import absolute, quantize_with_scale
from jaxquant.core.recipe import Operand, Recipe, TensorSpec
from jaxquant.core.rounding import content_key, two_keys
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE, power_of_two_below
from jaxquant.core.sharding import device_key, explicit_sharding, fit_varying, over_devices, varying_axes
from jaxquant.ops import arguments
from jaxquant.ops.arguments import QuantState
from jaxquant.ops.contract import accumulator_dtype
from jaxquant.ops.converted import check_input_scale, check_scales, straight_through
from jaxquant.ops.gradients import first_order
from jaxquant.ops.groups import (
    Rows,
    group_amax,
    group_of_rows,
    of_rows,
    quantize_rows,
    quantize_weights,
    scaling_groups,
    with_groups,
)
from jaxquant.ops.operand import forward_key, input_scale, scale_dtype
from jaxquant.ops.pieces import clip_mask, eight_bits, masked, named, scaled, shard_size, unsupported

_FORWARD = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_DLHS = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_DRHS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@dataclasses.dataclass(frozen=True)
class _Static:
    recipe: Recipe
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    precision: Any
    lhs_varies: frozenset[str]
    rhs_varies: frozenset[str]


def initial_state(recipe: Recipe, groups: int) -> QuantState:
    """Make the quant state of a ragged matmul: that of ``ops.dot_general`` with a leading axis of groups.

    A recipe that shares scales of experts has one state for all groups, without that axis.
    """
    state = arguments.initial_state(recipe)
    if recipe.shares_experts:
        return state
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (groups, *value.shape)), state)


def ragged_dot(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"] | ConvertedKernel,
    group_sizes: Int[Array, " G"],
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: Array | None = None,
) -> Float[Array, "M N"]:
    """Contract groups of rows with a weight each, in the low precision of a recipe, forward and backward.

    ``y[m] = lhs[m] · rhs[g]`` for the rows m of group g, and 0 for rows behind the last group.

    Args:
      lhs: activations, the rows of each group beside each other.
      rhs: weights; converted ones, of ``convert_kernel``, need no state and get no gradient.
      group_sizes: rows of each group, in order; they may be 0, and their sum at most M.
      precision, preferred_element_type: as in ``ops.dot_general``.
      recipe: all numbers.
      state: for a recipe with delayed scaling, from ``initial_state``.
      key: random key for stochastic rounding; None derives one from the output gradient's bits.

    Raises:
      ValueError: missing state, shapes that do not fit, or shards of the weight gradient that do not divide the rows.
      TypeError: operands that are not float.
      NotImplementedError: tiles, asymmetric ranges or sparsity in the recipe; an explicit mesh in the operands' types.
    """
    _check(lhs, rhs, group_sizes, recipe)
    precision = arguments.hashable_precision(precision)
    out = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)).name
    varies = [varying_axes(x) for x in (lhs, rhs.tensor.qvalue if isinstance(rhs, ConvertedKernel) else rhs)]
    static = _Static(recipe, lhs.dtype.name, jnp.dtype(rhs.dtype).name, out, precision, *varies)
    if isinstance(rhs, ConvertedKernel):
        check_input_scale(recipe, rhs)
        run, gradient = functools.partial(_served, static), functools.partial(_served_gradient, static)
        return straight_through(run, gradient, lhs, rhs, group_sizes, key)
    arguments.check_state(recipe, state, "ops.ragged.initial_state(recipe, groups)")
    return _ragged(static, lhs, rhs, group_sizes, state or {}, key)


def convert_kernel(
    recipe: Recipe, rhs: Float[Array, "G K N"], state: QuantState
) -> tuple[QTensor, Float[Array, "G 1 1"] | None]:
    """Quantize weights as the forward pass does, for serving.

    Args:
      recipe: all numbers; it must quantize weights.
      rhs: weights, in the dtype in which the op reads them.
      state: as for ``ragged_dot``.

    Returns:
      The weights and the static scale of each group's activations (or of all), None where these are scaled
      dynamically; 0 of a group that was never seen.
    """
    state = with_groups(recipe, state)
    tensor, _ = _forward_weights(recipe, rhs, state, None)
    assert isinstance(tensor, QTensor)
    scale = jax.vmap(lambda state: input_scale(recipe, state))(state) if state else input_scale(recipe, state)
    return tensor, None if scale is None else scale.reshape(-1, 1, 1)


def _check(lhs: Array, rhs: Array | ConvertedKernel, group_sizes: Array, recipe: Recipe) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or group_sizes.shape != rhs.shape[:1] or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"ragged_dot takes lhs [M, K], rhs [G, K, N] and group_sizes [G], got {lhs.shape}, {rhs.shape} and "
            f"{group_sizes.shape}"
        )
    weights = rhs.tensor.qvalue if isinstance(rhs, ConvertedKernel) else rhs
    if isinstance(rhs, ConvertedKernel):
        check_scales("ragged_dot", rhs, (0, 2))
    arguments.check_float("ragged_dot", lhs=lhs, **({} if isinstance(rhs, ConvertedKernel) else {"rhs": rhs}))
    for name, operand in (("lhs", lhs), ("rhs", weights)):
        if explicit_sharding(operand) is not None:
            raise NotImplementedError(
                f"ragged_dot {name} is split over devices in its type, by an explicit mesh; scales of groups that lie "
                "on several devices are not implemented there"
            )
    if why := unsupported(recipe):
        raise NotImplementedError(f"recipe {recipe.name!r} has {why}, which ragged_dot does not run")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(static: _Static, lhs: Array, rhs: Array, sizes: Array, state: QuantState, key: Array | None) -> Array:
    return _forward(static, lhs, rhs, sizes, state, key)[0]


@functools.partial(jax.jit, static_argnums=0)
def _forward(static: _Static, lhs: Array, rhs: Array, sizes: Array, state: QuantState, key: Array | None):
    recipe, ids = static.recipe, group_of_rows(sizes, lhs.shape[0])
    given = with_groups(recipe, state)
    left, lhs_seen = _forward_rows(static, lhs, ids, sizes, given, key)
    right, rhs_seen = _forward_weights(recipe, rhs, given, key)
    left, right = _alike(static, left, right, ids)
    out = _product(static, left, right, ids, sizes)
    kept = (
        _kept_rows(static, left, lhs, recipe.drhs.lhs, ids, sizes, key),
        _kept_weights(recipe, right, rhs, recipe.dlhs.rhs, key),
        clip_mask(lhs, recipe.fwd.lhs, QTensor(left.qvalue, left.spread(ids)) if isinstance(left, Rows) else None),
        clip_mask(rhs, recipe.fwd.rhs, right if isinstance(right, QTensor) else None),
    )
    without_bins = {name: delayed.without_bins(tensor) for name, tensor in state.items()}
    return out, (kept, sizes, without_bins, lhs_seen, rhs_seen, key)


@functools.partial(jax.jit, static_argnums=0)
def _backward(static: _Static, residuals, grad: Array):
    (lhs, rhs, lhs_mask, rhs_mask), sizes, state, lhs_seen, rhs_seen, key = residuals
    recipe, ids = static.recipe, group_of_rows(sizes, grad.shape[0])
    state = with_groups(recipe, state)
    if recipe.is_stochastic:
        key = content_key(grad) if key is None else device_key(key, grad)
    keys = (None, None) if key is None else two_keys(key)
    shared, grad_seen = None, None
    if "output_grad" in state:
        assert isinstance(recipe.dlhs.lhs, TensorSpec)
        shared, grad_seen = _delayed_rows(
            static, grad, recipe.dlhs.lhs, ids, sizes, state["output_grad"], SMALLEST_GRADIENT_SCALE
        )
    dlhs = _dlhs(static, grad, shared, rhs, ids, sizes, keys[0])
    drhs = _drhs(static, grad, shared, lhs, ids, sizes, keys[1])
    observe = jax.vmap(functools.partial(delayed.observe, spec=recipe.delayed))  # pyright: ignore[reportArgumentType]
    observations = {"input": lhs_seen, "kernel": rhs_seen, "output_grad": grad_seen}
    observed = {name: observe(old, *observations[name]) for name, old in state.items()}
    observed = {name: _only_used(new, scaling_groups(recipe, ids, sizes)[1]) for name, new in observed.items()}
    for name, new in observed.items():
        whole = varying_axes(state[name]["scale"])
        observed[name] = jax.tree.map(lambda x: fit_varying(x, whole), new)  # noqa: B023
    observed = jax.tree.map(lambda x: x[0], observed) if recipe.shares_experts else observed
    dlhs, drhs = masked(dlhs, lhs_mask, static.lhs_dtype), masked(drhs, rhs_mask, static.rhs_dtype)
    return fit_varying(dlhs, static.lhs_varies), fit_varying(drhs, static.rhs_varies), None, observed, None


def _ragged_bwd(static: _Static, residuals, grad: Array):
    dlhs, drhs, *others = _backward(static, residuals, grad)
    return *first_order(static.recipe.name, (dlhs, drhs)), *others


_ragged.defvjp(_forward, _ragged_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _served(static: _Static, lhs: Array, weight: ConvertedKernel, sizes: Array, key: Array | None) -> Array:
    ids, spec = group_of_rows(sizes, lhs.shape[0]), static.recipe.fwd.lhs
    left: Rows | Array = lhs
    if isinstance(spec, TensorSpec) and spec.scaling == "delayed":
        assert weight.input_scale is not None
        left = _rows_with_scale(static, lhs, spec, ids, weight.input_scale.reshape(-1, 1))
    elif isinstance(spec, TensorSpec):
        left = quantize_rows(static.recipe, lhs, spec, ids, sizes, False, forward_key(lhs, spec, key))
    left, right = _alike(static, left, weight.tensor, ids)
    return _product(static, left, right, ids, sizes)


@functools.partial(jax.jit, static_argnums=0)
def _served_gradient(static: _Static, grad: Array, weight: ConvertedKernel, sizes: Array, key: Array | None) -> Array:
    """Compute the gradient that the dequantized weights give."""
    ids, rhs = group_of_rows(sizes, grad.shape[0]), dequantize(weight.tensor, grad.dtype.name)
    out = jnp.where((ids < sizes.size)[:, None], _multiply(grad, rhs, sizes, _DLHS, static, None, "HIGHEST"), 0)
    return fit_varying(out, static.lhs_varies)


def _alike(static: _Static, left: Rows | Array, right: QTensor | Array, ids: Array) -> Any:
    """Return both operands quantized, or both float."""
    if isinstance(left, Rows) and isinstance(right, QTensor):
        return left, right
    left = left.dequantize(ids, static.rhs_dtype) if isinstance(left, Rows) else left
    return left, dequantize(right, static.lhs_dtype) if isinstance(right, QTensor) else right


def _product(static: _Static, left: Any, right: Any, ids: Array, sizes: Array) -> Array:
    """Multiply the forward operands, rows behind the last group giving zeros."""
    if isinstance(left, Rows):
        out = _multiply(left.qvalue, right.qvalue, sizes, _FORWARD, static, static.recipe.fwd.accumulator, "DEFAULT")
        out = scaled(static.recipe, static.out_dtype, out, left.spread(ids), of_rows(right.scale[:, 0], ids))
    else:
        out = _multiply(left, right, sizes, _FORWARD, static, None, None)
    return jnp.where((ids < sizes.size)[:, None], out, 0).astype(static.out_dtype)


@jax.named_scope("dlhs")
def _dlhs(static: _Static, grad, shared: Rows | None, rhs, ids: Array, sizes: Array, key: Array | None) -> Array:
    """Compute ``grad · rhs``, contracting N."""
    matmul = static.recipe.dlhs
    if not isinstance(matmul.lhs, TensorSpec):
        rhs = dequantize(rhs, grad.dtype.name) if isinstance(rhs, QTensor) else rhs
        out = _multiply(grad, rhs, sizes, _DLHS, static, None, "HIGHEST")
    elif not isinstance(rhs, QTensor):
        left = shared or quantize_rows(static.recipe, grad, matmul.lhs, ids, sizes, False, key, SMALLEST_GRADIENT_SCALE)
        out = _multiply(left.dequantize(ids, rhs.dtype.name), rhs, sizes, _DLHS, static, None, "HIGHEST")
    else:
        scale = rhs.scale[:, :, 0]  # [G, 1] or, of an own quantization along N, [G, K]
        if rhs.scale.shape[2] > 1:  # forward per channel: multiplied into the gradient
            unit = power_of_two_below(jnp.max(rhs.scale))  # as in dot_general.align
            grad = grad.astype(jnp.float32) * of_rows(rhs.scale[:, 0] / unit, ids)
            scale = jnp.broadcast_to(unit, (sizes.size, 1))
        left = shared or quantize_rows(static.recipe, grad, matmul.lhs, ids, sizes, False, key, SMALLEST_GRADIENT_SCALE)
        out = _multiply(left.qvalue, rhs.qvalue, sizes, _DLHS, static, matmul.accumulator, "HIGHEST")
        out = scaled(static.recipe, static.out_dtype, out, left.spread(ids), of_rows(scale, ids))
    return jnp.where((ids < sizes.size)[:, None], out, 0)


@jax.named_scope("drhs")
def _drhs(static: _Static, grad, shared: Rows | None, lhs, ids: Array, sizes: Array, key: Array | None) -> Array:
    """Compute ``lhs · grad`` of each group, contracting its rows: those of each shard by themselves."""
    if not isinstance(static.recipe.drhs.rhs, TensorSpec) or static.recipe.drhs.shards == 1:
        return _drhs_of_shard(static, grad, shared, lhs, ids, sizes, key)
    step, ends = shard_size(static.recipe, grad.shape[0], "rows of its ragged matmul"), jnp.cumsum(sizes)
    total = jnp.zeros(())
    for start in range(0, grad.shape[0], step):
        first, last = (jnp.clip(x - start, 0, step) for x in (ends - sizes, ends))
        part = slice(start, start + step)
        own, own_key = shared and shared[part], None if key is None else jax.random.fold_in(key, start)
        out = _drhs_of_shard(static, grad[part], own, lhs[part], ids[part], last - first, own_key)
        total = total + out.astype(jnp.float32)
    return total.astype(static.out_dtype)


def _drhs_of_shard(static: _Static, grad, shared: Rows | None, lhs, ids: Array, sizes, key: Array | None) -> Array:
    matmul = static.recipe.drhs
    if not isinstance(matmul.rhs, TensorSpec):
        lhs = lhs.dequantize(ids, grad.dtype.name) if isinstance(lhs, Rows) else lhs
        return _multiply(lhs, grad, sizes, _DRHS, static, None, "HIGHEST")
    if not isinstance(lhs, Rows):
        right = shared or quantize_rows(static.recipe, grad, matmul.rhs, ids, sizes, True, key, SMALLEST_GRADIENT_SCALE)
        return _multiply(lhs, right.dequantize(ids, lhs.dtype.name), sizes, _DRHS, static, None, "HIGHEST")
    if lhs.by_group:
        scale = lhs.scale
    else:  # forward by row: multiplied into the gradient
        unit = power_of_two_below(jnp.max(lhs.scale))
        grad, scale = grad.astype(jnp.float32) * (lhs.scale / unit), jnp.broadcast_to(unit, (sizes.size, 1))
    right = shared or quantize_rows(static.recipe, grad, matmul.rhs, ids, sizes, True, key, SMALLEST_GRADIENT_SCALE)
    out = _multiply(lhs.qvalue, right.qvalue, sizes, _DRHS, static, matmul.accumulator, "HIGHEST")
    return scaled(static.recipe, static.out_dtype, out, scale[:, :, None], right.scale[:, None, :])


# -- operands ----------------------------------------------------------------------------------------------------------


def _delayed_rows(
    static: _Static,
    x: Array,
    spec: TensorSpec,
    ids: Array,
    sizes: Array,
    state: delayed.TensorState,
    floor: float = SMALLEST_SCALE,
):
    """Quantize rows with the scale of their group's history. Returns them and (scale, amax) of each group."""
    own, _ = scaling_groups(static.recipe, ids, sizes)
    amax = over_devices(jax.lax.pmax, group_amax(x, own, state["scale"].shape[0]).max(axis=1), x)
    scale = _current_scale(static.recipe, state, amax, spec, floor)
    return _rows_with_scale(static, x, spec, ids, scale), (scale, amax)


def _rows_with_scale(static: _Static, x: Array, spec: TensorSpec, ids: Array, scale: Array) -> Rows:
    rows = quantize_with_scale(x, spec, of_rows(scale, ids), compute_dtype=scale_dtype(static.recipe, x.dtype.name))
    return Rows(rows.qvalue, scale, True)


def _current_scale(
    recipe: Recipe, state: delayed.TensorState, amax: Array, spec: TensorSpec, floor: float = SMALLEST_SCALE
) -> Array:
    assert recipe.delayed is not None
    one = functools.partial(delayed.current_scale, element=element(spec.dtype), spec=recipe.delayed, floor=floor)
    return jax.vmap(one)(state, amax)


def _forward_rows(static: _Static, x: Array, ids: Array, sizes: Array, state: QuantState, key: Array | None):
    spec = static.recipe.fwd.lhs
    if not isinstance(spec, TensorSpec):
        return x, None
    if spec.scaling == "delayed":
        return _delayed_rows(static, x, spec, ids, sizes, state["input"])
    return quantize_rows(static.recipe, x, spec, ids, sizes, False, forward_key(x, spec, key)), None


def _forward_weights(recipe: Recipe, x: Array, state: QuantState, key: Array | None):
    spec = recipe.fwd.rhs
    if not isinstance(spec, TensorSpec):
        return x, None
    if spec.scaling != "delayed":
        return quantize_weights(recipe, x, spec, 0, key), None
    amax = jnp.max(absolute(x), axis=(1, 2))
    amax = over_devices(jax.lax.pmax, jnp.max(amax, keepdims=True) if recipe.shares_experts else amax, x)
    scale = _current_scale(recipe, state["kernel"], amax, spec)
    compute = scale_dtype(recipe, x.dtype.name)
    return quantize_with_scale(x, spec, scale.reshape(-1, 1, 1), compute_dtype=compute), (scale, amax)


def _kept_rows(static: _Static, left, lhs: Array, operand: Operand, ids: Array, sizes: Array, key: Array | None):
    """Choose what backward keeps of the activation, as in ``ops.dot_general``."""
    if operand is None:
        return lhs
    if isinstance(operand, TensorSpec):
        left = quantize_rows(static.recipe, lhs, operand, ids, sizes, True, forward_key(lhs, operand, key))
    return _named(left)


def _kept_weights(recipe: Recipe, right, rhs: Array, operand: Operand, key: Array | None):
    if operand is None:
        return rhs
    return _named(quantize_weights(recipe, rhs, operand, 1, key) if isinstance(operand, TensorSpec) else right)


def _named(kept: Any) -> Any:
    return named(kept) if isinstance(kept, (Rows, QTensor)) else kept


def _only_used(observed: delayed.TensorState, sizes: Array) -> delayed.TensorState:
    """Leave out what a group without rows "saw": zeros, which ``jaxquant.state.update`` reads as not used."""
    return jax.tree.map(lambda x: jnp.where((sizes > 0).reshape(-1, *[1] * (x.ndim - 1)), x, 0), observed)


# -- matmuls -----------------------------------------------------------------------------------------------------------


def _multiply(
    lhs: Array, rhs: Array, sizes: Array, numbers: Any, static: _Static, accumulator: str | None, precision: str | None
) -> Array:
    lhs, rhs = eight_bits(lhs), eight_bits(rhs)
    if lhs.dtype != rhs.dtype and jnp.issubdtype(lhs.dtype, jnp.floating) and lhs.dtype.itemsize > 1:
        lhs, rhs = (x.astype(jnp.promote_types(lhs.dtype, rhs.dtype)) for x in (lhs, rhs))
    default = None if precision is None else jax.lax.Precision[precision]
    return jax.lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        numbers,
        precision=default if static.precision is None else static.precision,
        preferred_element_type=accumulator_dtype(accumulator, static.out_dtype),
    )
