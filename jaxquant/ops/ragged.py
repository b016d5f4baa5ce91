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
from jaxquant.core.quantize import quantize_with_scale
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE, absolute, power_of_two_below
from jaxquant.core.sharding import explicit_sharding, over_devices
from jaxquant.ops import arguments
from jaxquant.ops.arguments import QuantState
from jaxquant.ops.contract import accumulator_dtype
from jaxquant.ops.converted import check_scales
from jaxquant.ops.groups import (
    Groups,
    Rows,
    group_amax,
    of_rows,
    quantize_rows,
    quantize_weights,
    scaling_groups,
    with_groups,
)
from jaxquant.ops.operand import Observation, forward_key, input_scale, scale_dtype
from jaxquant.ops.pieces import eight_bits, scaled, shard_size, unsupported
from jaxquant.ops.prepared import Kept, Prepared, clip_mask, named
from jaxquant.ops.quantized import Operation, quantized, serve

_FORWARD = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_DLHS = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_DRHS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


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
    op = _Ragged.of(lhs, rhs, precision, preferred_element_type, recipe=recipe)
    if isinstance(rhs, ConvertedKernel):
        return serve(op, lhs, rhs, group_sizes, key)
    arguments.check_state(recipe, state, "ops.ragged.initial_state(recipe, groups)")
    return quantized(op, lhs, rhs, group_sizes, state or {}, key)


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
    tensor, _ = _forward_weights(recipe, rhs, state.get("kernel"), None)
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


@dataclasses.dataclass(frozen=True)
class _Ragged(Operation):
    """A matmul of groups of rows."""

    def prepare(self, side, x, groups, state, key) -> Prepared:
        state = None if state is None else with_groups(self.recipe, state)
        return self._prepare_rows(x, groups, state, key) if side == "lhs" else self._prepare_weights(x, state, key)

    def _prepare_rows(self, x: Array, groups: Groups, state: delayed.TensorState | None, key: Array | None) -> Prepared:
        recipe, spec, operand = self.recipe, self.recipe.fwd.lhs, self.recipe.drhs.lhs
        forward, seen, mask = x, None, None
        if isinstance(spec, TensorSpec) and spec.scaling == "delayed":
            assert state is not None
            forward, seen = self._delayed_rows(x, spec, groups, state, SMALLEST_SCALE)
        elif isinstance(spec, TensorSpec):
            forward = quantize_rows(recipe, x, spec, groups, False, forward_key(x, spec, key))
        if isinstance(forward, Rows) and isinstance(recipe.fwd.rhs, TensorSpec):
            mask = clip_mask(x, QTensor(forward.qvalue, forward.spread(groups.ids)), spec)
        elif isinstance(forward, Rows):
            forward = forward.dequantize(groups.ids, self.rhs.dtype)
        kept = x if operand is None else forward
        if isinstance(operand, TensorSpec):
            kept = quantize_rows(recipe, x, operand, groups, True, forward_key(x, operand, key))
        return Prepared(forward, Kept(named(kept), mask, seen))

    def _prepare_weights(self, x: Array, state: delayed.TensorState | None, key: Array | None) -> Prepared:
        recipe, operand = self.recipe, self.recipe.dlhs.rhs
        forward, seen = _forward_weights(recipe, x, state, key)
        if isinstance(forward, QTensor) and not isinstance(recipe.fwd.lhs, TensorSpec):
            forward = dequantize(forward, self.lhs.dtype)
        kept = x if operand is None else forward
        if isinstance(operand, TensorSpec):
            kept = quantize_weights(recipe, x, operand, 1, key)
        return Prepared(forward, Kept(named(kept), clip_mask(x, forward, recipe.fwd.rhs), seen))

    def quantize_activation(self, x: Array, static_scale: Array | None, groups: Groups, key: Array | None) -> Rows:
        spec = self.recipe.fwd.lhs
        assert isinstance(spec, TensorSpec)
        if spec.scaling == "delayed":
            assert static_scale is not None
            return self._rows_with_scale(x, spec, groups, static_scale.reshape(-1, 1))
        return quantize_rows(self.recipe, x, spec, groups, False, forward_key(x, spec, key))

    def product(self, lhs: Any, rhs: Any, groups: Groups) -> Array:
        """Multiply the forward operands, rows behind the last group giving zeros."""
        if isinstance(lhs, Rows):
            out = self._multiply(lhs.qvalue, rhs.qvalue, groups, _FORWARD, self.recipe.fwd.accumulator, "DEFAULT")
            out = scaled(self.recipe, self.out_dtype, out, lhs.spread(groups.ids), of_rows(rhs.scale[:, 0], groups.ids))
        else:
            rhs = dequantize(rhs, self.lhs.dtype) if isinstance(rhs, QTensor) else rhs
            out = self._multiply(lhs, rhs, groups, _FORWARD, None, None)
        return groups.zero_others(out).astype(self.out_dtype)

    def quantize_gradient(self, grad, groups, state, key, part) -> tuple[Rows, Observation]:
        spec = self.recipe.spec_of("output_grad")
        assert spec is not None
        state = with_groups(self.recipe, state)
        return self._delayed_rows(grad, spec, groups, state, SMALLEST_GRADIENT_SCALE)

    def gradient(self, name, grad: Array, shared: Rows | None, residual, groups: Groups, key, part) -> Array:
        if name == "dlhs":
            return groups.zero_others(self._dlhs(grad, shared, residual, groups, key))
        if not isinstance(self.recipe.drhs.rhs, TensorSpec) or self.recipe.drhs.shards == 1:
            return self._drhs(grad, shared, residual, groups, key)
        # The rows of each shard by themselves, added in float32.
        step, (ids, sizes) = shard_size(self.recipe, grad.shape[0], "rows of its ragged matmul"), groups
        ends = jnp.cumsum(sizes)
        total = jnp.zeros(())
        for start in range(0, grad.shape[0], step):
            first, last = (jnp.clip(x - start, 0, step) for x in (ends - sizes, ends))
            rows = slice(start, start + step)
            own, own_key = shared and shared[rows], None if key is None else jax.random.fold_in(key, start)
            out = self._drhs(grad[rows], own, residual[rows], Groups(ids[rows], last - first), own_key)
            total = total + out.astype(jnp.float32)
        return total.astype(self.out_dtype)

    def _dlhs(self, grad: Array, shared: Rows | None, rhs: QTensor | Array, groups: Groups, key) -> Array:
        """Compute ``grad · rhs``, contracting N."""
        matmul = self.recipe.dlhs
        if not isinstance(matmul.lhs, TensorSpec):
            return self._float_gradient(grad, rhs, groups)
        quantize = functools.partial(quantize_rows, self.recipe, floor=SMALLEST_GRADIENT_SCALE)
        if not isinstance(rhs, QTensor):
            left = shared or quantize(grad, matmul.lhs, groups, False, key)
            return self._multiply(left.dequantize(groups.ids, rhs.dtype.name), rhs, groups, _DLHS, None, "HIGHEST")
        scale = rhs.scale[:, :, 0]  # [G, 1] or, of an own quantization along N, [G, K]
        if rhs.scale.shape[2] > 1:  # forward per channel: multiplied into the gradient
            unit = power_of_two_below(jnp.max(rhs.scale))  # as in gradients.align
            grad = grad.astype(jnp.float32) * of_rows(rhs.scale[:, 0] / unit, groups.ids)
            scale = jnp.broadcast_to(unit, (groups.sizes.size, 1))
        left = shared or quantize(grad, matmul.lhs, groups, False, key)
        out = self._multiply(left.qvalue, rhs.qvalue, groups, _DLHS, matmul.accumulator, "HIGHEST")
        return scaled(self.recipe, self.out_dtype, out, left.spread(groups.ids), of_rows(scale, groups.ids))

    def _drhs(self, grad: Array, shared: Rows | None, lhs: Rows | Array, groups: Groups, key) -> Array:
        """Compute ``lhs · grad`` of each group, contracting its rows."""
        matmul = self.recipe.drhs
        if not isinstance(matmul.rhs, TensorSpec):
            lhs = lhs.dequantize(groups.ids, grad.dtype.name) if isinstance(lhs, Rows) else lhs
            return self._multiply(lhs, grad, groups, _DRHS, None, "HIGHEST")
        quantize = functools.partial(quantize_rows, self.recipe, floor=SMALLEST_GRADIENT_SCALE)
        if not isinstance(lhs, Rows):
            right = shared or quantize(grad, matmul.rhs, groups, True, key)
            return self._multiply(lhs, right.dequantize(groups.ids, lhs.dtype.name), groups, _DRHS, None, "HIGHEST")
        scale = lhs.scale
        if not lhs.by_group:  # forward by row: multiplied into the gradient
            unit = power_of_two_below(jnp.max(lhs.scale))
            grad, scale = grad.astype(jnp.float32) * (lhs.scale / unit), jnp.broadcast_to(unit, (groups.sizes.size, 1))
        right = shared or quantize(grad, matmul.rhs, groups, True, key)
        out = self._multiply(lhs.qvalue, right.qvalue, groups, _DRHS, matmul.accumulator, "HIGHEST")
        return scaled(self.recipe, self.out_dtype, out, scale[:, :, None], right.scale[:, None, :])

    def input_gradient(self, grad: Array, kernel: QTensor, groups: Groups) -> Array:
        return groups.zero_others(self._float_gradient(grad, kernel, groups))

    def _float_gradient(self, grad: Array, rhs: QTensor | Array, groups: Groups) -> Array:
        rhs = dequantize(rhs, grad.dtype.name) if isinstance(rhs, QTensor) else rhs
        return self._multiply(grad, rhs, groups, _DLHS, None, "HIGHEST")

    def observe(self, old, scale, amax, groups):
        """Observe each group; one without rows "saw" zeros, which ``jaxquant.state.update`` reads as not used."""
        recipe = self.recipe
        assert recipe.delayed is not None
        new = jax.vmap(functools.partial(delayed.observe, spec=recipe.delayed))(with_groups(recipe, old), scale, amax)
        used = scaling_groups(recipe, groups).sizes > 0
        new = jax.tree.map(lambda x: jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, 0), new)
        return jax.tree.map(lambda x: x[0], new) if recipe.shares_experts else new

    def _delayed_rows(self, x: Array, spec: TensorSpec, groups: Groups, state, floor: float):
        """Quantize rows with the scale of their group's history, and return the scale and amax of each group."""
        own = scaling_groups(self.recipe, groups).ids
        amax = group_amax(x, own, state["scale"].shape[0]).max(axis=1)
        amax = over_devices(jax.lax.pmax, amax, x, self.recipe.expert_axes)
        scale = _current_scale(self.recipe, state, amax, spec, floor)
        return self._rows_with_scale(x, spec, groups, scale), Observation(scale, amax)

    def _rows_with_scale(self, x: Array, spec: TensorSpec, groups: Groups, scale: Array) -> Rows:
        compute = scale_dtype(self.recipe, x.dtype.name)
        return Rows(quantize_with_scale(x, spec, of_rows(scale, groups.ids), compute_dtype=compute).qvalue, scale, True)

    def _multiply(
        self, lhs: Array, rhs: Array, groups: Groups, numbers: Any, accumulator: str | None, precision: str | None
    ) -> Array:
        lhs, rhs = eight_bits(lhs), eight_bits(rhs)
        if lhs.dtype != rhs.dtype and jnp.issubdtype(lhs.dtype, jnp.floating) and lhs.dtype.itemsize > 1:
            lhs, rhs = (x.astype(jnp.promote_types(lhs.dtype, rhs.dtype)) for x in (lhs, rhs))
        default = None if precision is None else jax.lax.Precision[precision]
        return jax.lax.ragged_dot_general(
            lhs,
            rhs,
            groups.sizes,
            numbers,
            precision=default if self.precision is None else self.precision,
            preferred_element_type=accumulator_dtype(accumulator, self.out_dtype),
        )


def _current_scale(
    recipe: Recipe, state: delayed.TensorState, amax: Array, spec: TensorSpec, floor: float = SMALLEST_SCALE
) -> Array:
    assert recipe.delayed is not None
    one = functools.partial(delayed.current_scale, element=element(spec.dtype), spec=recipe.delayed, floor=floor)
    return jax.vmap(one)(state, amax)


def _forward_weights(recipe: Recipe, x: Array, state: delayed.TensorState | None, key: Array | None):
    """Quantize weights, and return the scale and amax of each group where they are scaled by past steps."""
    spec = recipe.fwd.rhs
    if not isinstance(spec, TensorSpec):
        return x, None
    if spec.scaling != "delayed":
        return quantize_weights(recipe, x, spec, 0, key), None
    assert state is not None
    amax = jnp.max(absolute(x), axis=(1, 2))
    amax = over_devices(
        jax.lax.pmax, jnp.max(amax, keepdims=True) if recipe.shares_experts else amax, x, recipe.expert_axes
    )
    scale = _current_scale(recipe, state, amax, spec)
    compute = scale_dtype(recipe, x.dtype.name)
    return quantize_with_scale(x, spec, scale.reshape(-1, 1, 1), compute_dtype=compute), Observation(scale, amax)
