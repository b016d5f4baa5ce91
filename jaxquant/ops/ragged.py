"""ragged_dot: a matmul of groups of rows, one weight per group, in low precision forward and backward.

Group g of the result equals ``ops.dot_general`` of the group's rows and ``rhs[g]``, with separate scales (per tensor:
one for each group), quant state and gradients. Rows after the last group are
zero in the result, and are not observed.

Shapes: M rows, K contracting, N columns, G groups.

    lhs [M, K] ── quantize, by row or by group ──┐
    rhs [G, K, N] ── quantize, by group ─────────┴─ lax.ragged_dot_general ── scales ──► y [M, N]
    grad [M, N] ── by row, for dlhs; by group (and column), for drhs

For drhs, tiles along the rows begin with the first row of their group: operands are copied to ``Slabs``, in which each
group is padded with zeros to whole tiles. Operands in tiles are dequantized and multiplied as floats, or multiplied by
a kernel (``block_ragged``).
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
from jaxquant.core.float_dot import float32_on_cpus
from jaxquant.core.hadamard import make_rotation
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import quantize_with_scale
from jaxquant.core.recipe import FORWARD, Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, fold
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE, absolute, power_of_two_below
from jaxquant.core.sharding import all_reduce, platform_of
from jaxquant.kernels.platforms import unless_sharded
from jaxquant.ops import block_ragged, pieces
from jaxquant.ops.contract import accumulator_dtype, tiles_dtype
from jaxquant.ops.converted import check_scales
from jaxquant.ops.gradients import with_outer, without_outer
from jaxquant.ops.groups import (
    Groups,
    Rows,
    Slabs,
    expand_groups,
    group_amax,
    has_free_scales,
    outer_scale,
    quantize_rows,
    quantize_weights,
    row_scales,
    scaling_groups,
    slab_size,
    slabs_to_rows,
    slice_rows,
    split_outer,
    to_float,
    to_operand,
    with_groups,
)
from jaxquant.ops.implementation import check_implementation, select_implementation
from jaxquant.ops.operand import Observation, cast_dtype, forward_key, input_scale, poison_tensor
from jaxquant.ops.pieces import QuantState, rescale, round_result, to_eight_bits
from jaxquant.ops.prepared import QuantizedOperand, Residual, clip_mask, tag
from jaxquant.ops.quantized import Operation, contract_converted, quantized

_FORWARD = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_DLHS = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_DRHS = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def initial_state(recipe: Recipe, groups: int) -> QuantState:
    """Return the quant state of a ragged matmul: the state of ``ops.dot_general`` with a leading axis of groups.

    If the recipe has ``shares_experts``, all groups share one state without that axis.
    """
    state = pieces.initial_state(recipe)
    if recipe.shares_experts:
        return state
    return jax.tree.map(lambda value: jnp.broadcast_to(value, (groups, *value.shape)), state)


def ragged_dot(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"] | QTensor,
    group_sizes: Int[Array, " G"],
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: RandomKey | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Contract groups of rows with one weight per group, in the low precision of a recipe, forward and backward.

    ``y[m] = lhs[m] · rhs[g]`` for the rows m of group g, and 0 for rows after the last group.

    Args:
      lhs: activations, with the rows of each group next to each other.
      rhs: weights. Converted weights, from ``convert_kernel``, need no state and have no gradient.
      group_sizes: number of rows of each group, in order. Sizes may be 0, and their sum is at most M.
      precision, preferred_element_type: arguments of ``ops.dot_general``.
      recipe: recipe of the matmul.
      state: quant state from ``initial_state``, for a recipe with delayed scaling.
      key: random key for stochastic rounding; None derives a key from the bits of the output gradient.
      implementation: implementation of the product of operands in blocks, or None to select one
        (``ops.implementation``). XLA computes everything else.

    Raises:
      ValueError: ``state`` does not match the recipe, the shapes do not match, the implementation is unknown, or shards
        of the weight gradient do not divide the rows.
      TypeError: an operand is not float.
      NotImplementedError: a ragged matmul does not support the recipe (``unsupported``), or an operand is sharded on an
        explicit mesh.
    """
    _check(lhs, rhs, group_sizes, recipe := pieces.with_shards(recipe, lhs, (0,)))
    check_implementation("dot_general", implementation)
    op = _Ragged.of(lhs, rhs, precision, preferred_element_type, recipe=recipe, implementation=implementation)
    if isinstance(rhs, QTensor):
        return contract_converted(op, lhs, rhs, group_sizes, key)
    pieces.check_state(recipe, state, "ops.ragged.initial_state(recipe, groups)")
    return quantized(op, lhs, rhs, group_sizes, state or {}, key)


def convert_kernel(recipe: Recipe, rhs: Float[Array, "G K N"], state: QuantState) -> QTensor:
    """Quantize weights as the forward pass does, for serving.

    Args:
      recipe: recipe of the matmul; it must quantize weights.
      rhs: weights, in the dtype in which the op reads them.
      state: quant state as in ``ragged_dot``.

    Returns:
      The quantized weights. If activations are not scaled dynamically, ``input_scale`` is the static scale of each
      group's activations (or of all groups), and 0 for a group that was never observed.
    """
    state = with_groups(recipe, state)
    tensor, _ = _forward_weights(recipe, rhs, state.get("kernel"), None)
    assert isinstance(tensor, QTensor)
    scale = jax.vmap(lambda state: input_scale(recipe, state))(state) if state else input_scale(recipe, state)
    return dataclasses.replace(tensor, input_scale=None if scale is None else scale.reshape(-1, 1, 1))


def unsupported(recipe: Recipe) -> str:
    """Return the reason why a ragged matmul cannot run a recipe, or "" if it can."""
    names = ("fwd_lhs", "dlhs_lhs", "drhs_lhs", "drhs_rhs")
    rows = [spec for name in names if isinstance(spec := recipe.specs[name], TensorSpec)]
    along_tokens = [recipe.resolve("drhs", "lhs"), recipe.resolve("drhs", "rhs")]
    reasons = {
        "activations or gradients in blocks of several rows": any(spec.free_size for spec in rows),
        "a second, per-tensor scale of activations or gradients": any(s.outer_scale and not s.micro for s in rows),
        "quantization_local_shard_count above 1 with a weight gradient in tiles": recipe.drhs.shards > 1
        and any(spec is not None and spec.tile_size for spec in along_tokens),
        "average calibration of tiles along the rows": any(
            spec is not None and spec.tile_size and spec.calibration.average for spec in along_tokens
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), pieces.unsupported(recipe))


def _check(lhs: Array, rhs: Array | QTensor, group_sizes: Array, recipe: Recipe) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or group_sizes.shape != rhs.shape[:1] or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"ragged_dot requires lhs [M, K], rhs [G, K, N] and group_sizes [G], got shapes {lhs.shape}, "
            f"{rhs.shape} and {group_sizes.shape}"
        )
    spec = recipe.fwd.rhs
    if isinstance(rhs, QTensor) and not (isinstance(spec, TensorSpec) and (spec.tile_size or spec.codec)):
        check_scales("ragged_dot", rhs, (0, 2))
    pieces.check_operands("ragged_dot", lhs, rhs, recipe, unsupported(recipe))


@dataclasses.dataclass(frozen=True)
class _Ragged(Operation):
    """A matmul of groups of rows."""

    def prepare(self, side, x, groups, state, key) -> QuantizedOperand:
        state = None if state is None else with_groups(self.recipe, state)
        return self._prepare_rows(x, groups, state, key) if side == "lhs" else self._prepare_weights(x, state, key)

    def _prepare_rows(
        self, x: Array, groups: Groups, state: delayed.TensorState | None, key: RandomKey | None
    ) -> QuantizedOperand:
        recipe, spec = self.recipe, self.recipe.fwd.lhs
        forward, observation, mask = x, None, None
        if isinstance(spec, TensorSpec) and spec.scaling == "delayed":
            assert state is not None
            forward, observation = self._delayed_rows(x, spec, groups, state, SMALLEST_SCALE)
        elif isinstance(spec, TensorSpec):
            forward = quantize_rows(recipe, x, spec, groups, False, _forward_key(x, spec, groups, key))
        if forward is not x:
            own = QTensor(forward.qvalue, forward.spread(groups.ids)) if isinstance(forward, Rows) else forward
            mask = clip_mask(x, own, spec)
        residual = {"forward": forward, "float": x}.get(recipe.residual_kind("lhs"))
        if residual is None:
            residual = self._quantize_residual_rows(x, groups, key)
        return QuantizedOperand(forward, Residual(tag(residual), mask, observation))

    def _quantize_residual_rows(self, x: Array, groups: Groups, key: RandomKey | None) -> QTensor | Rows:
        """Quantize rows for the weight gradient, in slabs if it has tiles."""
        recipe, matmul = self.recipe, self.recipe.drhs
        spec = recipe.resolve("drhs", "lhs")
        assert spec is not None
        own = _forward_key(x, spec, groups, key)
        if not (step := slab_size(self.recipe, None)):
            return quantize_rows(recipe, x, spec, groups, True, own)
        slabs = Slabs.of(groups, step)
        return slabs.quantize(recipe, make_rotation(matmul.rotation, None)(slabs.copy_rows(x), 0), spec, own)

    def _prepare_weights(self, x: Array, state: delayed.TensorState | None, key: RandomKey | None) -> QuantizedOperand:
        recipe, matmul = self.recipe, self.recipe.dlhs
        forward, observation = _forward_weights(recipe, x, state, key)
        residual = {"forward": forward, "float": x}.get(recipe.residual_kind("rhs"))
        if residual is None:
            spec = recipe.resolve("dlhs", "rhs")
            assert spec is not None
            rotated = make_rotation(matmul.rotation, None)(x, 2)
            residual = quantize_weights(recipe, rotated, spec, 1, forward_key(x, spec, key))
        return QuantizedOperand(forward, Residual(tag(residual), clip_mask(x, forward, recipe.fwd.rhs), observation))

    def quantize_activation(self, x: Array, static_scale: Array | None, groups: Groups, key: RandomKey | None) -> Any:
        spec = self.recipe.fwd.lhs
        assert isinstance(spec, TensorSpec)
        if spec.scaling == "delayed":
            assert static_scale is not None
            return self._rows_with_scale(x, spec, groups, static_scale.reshape(-1, 1))
        return quantize_rows(self.recipe, x, spec, groups, False, _forward_key(x, spec, groups, key))

    def product(self, lhs: Any, rhs: Any, groups: Groups) -> Array:
        """Multiply the forward operands; rows after the last group are zero."""
        if has_free_scales(lhs, 1) and has_free_scales(rhs, 1):
            out = self._multiply(lhs.qvalue, rhs.qvalue, groups, _FORWARD, self.recipe.fwd.accumulator, "DEFAULT")
            right = expand_groups(rhs.full_scale()[:, 0], groups.ids)
            out = rescale(self.recipe, self.out_dtype, out, row_scales(lhs, groups), right)
        else:
            out = self._multiply_floats(lhs, rhs, groups, _FORWARD, self.out_dtype)
        return round_result(self.recipe, groups.zero_ungrouped(out), self.out_dtype)

    def quantize_gradient(self, grad, groups, state, key) -> tuple[Rows, Rows, Observation]:
        spec = self.recipe.spec_of("output_grad")
        assert spec is not None
        state = with_groups(self.recipe, state)
        rows, observation = self._delayed_rows(grad, spec, groups, state, SMALLEST_GRADIENT_SCALE)
        return rows, rows, observation

    def gradient(self, name, grad: Array, shared: Rows | None, residual, groups: Groups, key) -> Array:
        if name == "dlhs":
            return groups.zero_ungrouped(self._dlhs(grad, shared, residual, groups, key))
        if not isinstance(self.recipe.drhs.rhs, TensorSpec) or self.recipe.drhs.shards == 1:
            return self._drhs(grad, shared, residual, groups, key)
        # Multiply the rows of each shard separately, and add the results in float32.
        count, (ids, sizes) = self.recipe.drhs.shards, groups
        if grad.shape[0] % count:
            raise ValueError(
                f"quantization_local_shard_count {count} of recipe {self.recipe.name!r} does not divide the "
                f"{grad.shape[0]} rows of a ragged matmul; use a divisor of {grad.shape[0]}"
            )
        total, step = jnp.zeros(()), grad.shape[0] // count
        for start in range(0, grad.shape[0], step):
            first, last = (jnp.clip(x - start, 0, step) for x in (groups.starts, groups.starts + sizes))
            rows = slice(start, start + step)
            left, right = (slice_rows(side, rows) for side in (residual, shared))
            own_key = None if key is None else fold(key, start)
            out = self._drhs(grad[rows], right, left, Groups(ids[rows], last - first), own_key)
            total = total + out.astype(jnp.float32)
        return total.astype(self.out_dtype)

    def _dlhs(self, grad: Array, shared: Rows | None, rhs: QTensor | Array, groups: Groups, key) -> Array:
        """Compute ``grad · rhs``, contracting N."""
        matmul, forward, dtype = self.recipe.dlhs, self.recipe.fwd.rhs, grad.dtype.name
        if not isinstance(matmul.lhs, TensorSpec):
            return self._float_gradient(grad, rhs, groups)
        rotate_axis = make_rotation(matmul.rotation, None if key is None else fold(key, 2))
        grad = rotate_axis(grad, 1)
        again = matmul.rhs if matmul.is_late else None
        if isinstance(rhs, QTensor) and matmul.rhs == FORWARD and rhs.scale.shape[2] > 1:
            assert isinstance(forward, TensorSpec)
            if has_free_scales(rhs, 1):  # multiply a scale per channel into the gradient
                scale = rhs.full_scale()
                unit = power_of_two_below(jnp.max(scale))  # as in gradients.align
                grad = grad.astype(jnp.float32) * expand_groups(scale[:, 0] / unit, groups.ids)
                rhs = QTensor(rhs.qvalue, jnp.broadcast_to(unit, (rhs.shape[0], 1, 1)))
            elif forward.granularity != "per_block":  # quantize forward tiles again, along N
                again = dataclasses.replace(forward, rounding="nearest")
        if isinstance(again, TensorSpec):
            whole, unit = without_outer(rhs, dtype)
            own = fold(key, 3) if again.draws and key is not None else None
            rhs = with_outer(quantize_weights(self.recipe, rotate_axis(whole, 2), again, 1, own), unit)
        left = shared or quantize_rows(self.recipe, grad, matmul.lhs, groups, False, key, SMALLEST_GRADIENT_SCALE)
        if not (has_free_scales(left, 1) and has_free_scales(rhs, 2)):
            return self._multiply_floats(left, rhs, groups, _DLHS, dtype)
        assert isinstance(rhs, QTensor)
        out = self._multiply(left.qvalue, rhs.qvalue, groups, _DLHS, matmul.accumulator, "HIGHEST")
        right = expand_groups(rhs.full_scale()[:, :, 0], groups.ids)  # [M, 1], or [M, K] if quantized along N
        return rescale(self.recipe, self.out_dtype, out, row_scales(left, groups), right)

    def _drhs(self, grad: Array, shared: Rows | None, lhs: Any, groups: Groups, key) -> Array:
        """Compute ``lhs · grad`` of each group, contracting the group's rows."""
        recipe, matmul, spec = self.recipe, self.recipe.drhs, self.recipe.drhs.rhs
        if not grad.shape[0]:
            return jnp.zeros(self.rhs.shape, self.out_dtype)
        if not isinstance(spec, TensorSpec):
            return self._multiply(to_float(lhs, groups, grad.dtype.name), grad, groups, _DRHS, None, "HIGHEST")
        dtype, floor = grad.dtype.name, SMALLEST_GRADIENT_SCALE
        if matmul.lhs == FORWARD and isinstance(lhs, QTensor) and has_free_scales(lhs, 1):
            # multiply a forward scale per row into the gradient
            scale = lhs.full_scale()
            unit = power_of_two_below(jnp.max(groups.zero_ungrouped(scale)))
            grad = grad.astype(jnp.float32) * (scale / unit)
            lhs = Rows(lhs.qvalue, jnp.broadcast_to(unit, (groups.sizes.size, 1)))
        if step := slab_size(self.recipe, lhs):
            return self._drhs_in_slabs(grad, lhs, Slabs.of(groups, step), groups, dtype, key)
        right = shared or quantize_rows(recipe, grad, spec, groups, True, key, floor)
        if not isinstance(lhs, Rows):
            return self._multiply_floats(lhs, right, groups, _DRHS, self.out_dtype)
        assert isinstance(right, Rows)
        out = self._multiply(lhs.qvalue, right.qvalue, groups, _DRHS, matmul.accumulator, "HIGHEST")
        return rescale(recipe, self.out_dtype, out, lhs.scale[:, :, None], right.scale[:, None, :])

    def _drhs_in_slabs(self, grad: Array, lhs: Any, slabs: Slabs, groups: Groups, dtype: str, key) -> Array:
        """Compute the weight gradient of operands in tiles along the tokens; tiles begin with a group's first row."""
        recipe, matmul, rows = self.recipe, self.recipe.drhs, slabs.rows
        rotate_axis = make_rotation(matmul.rotation, None if key is None else fold(key, 2))
        assert isinstance(matmul.rhs, TensorSpec)
        right = slabs.quantize(recipe, rotate_axis(slabs.copy_rows(grad), 0), matmul.rhs, key, SMALLEST_GRADIENT_SCALE)
        again = matmul.lhs if matmul.is_late else None
        if matmul.lhs == FORWARD and isinstance(lhs, QTensor):
            assert isinstance(recipe.fwd.lhs, TensorSpec)
            again = dataclasses.replace(recipe.fwd.lhs, rounding="nearest")
        if isinstance(again, TensorSpec):
            whole, unit = split_outer(lhs, groups, dtype)
            own = fold(key, 3) if again.draws and key is not None else None
            unit = None if unit is None else jnp.take(unit, slabs.source[:, :1], axis=0, mode="clip")
            lhs = slabs.quantize(recipe, rotate_axis(slabs.copy_rows(whole), 0), again, own)
            lhs = with_outer(lhs, unit) if isinstance(lhs, QTensor) else lhs
        elif isinstance(lhs, Rows) and matmul.lhs == FORWARD:
            lhs = Rows(slabs.copy_rows(lhs.qvalue), lhs.scale)
        elif not isinstance(lhs, (QTensor, Rows)):
            lhs = slabs.copy_rows(lhs)
        is_wide = self.rhs.dtype == "float32" and matmul.accumulator == "float32"
        return self._multiply_floats(lhs, right, rows, _DRHS, "float32" if is_wide else dtype)

    def input_gradient(self, grad: Array, kernel: QTensor, groups: Groups) -> Array:
        return groups.zero_ungrouped(self._float_gradient(grad, kernel, groups))

    def _float_gradient(self, grad: Array, rhs: QTensor | Array, groups: Groups) -> Array:
        return self._multiply(grad, to_float(rhs, groups, grad.dtype.name), groups, _DLHS, None, "HIGHEST")

    def observe(self, old, scale, amax, groups):
        """Observe each group. A group without rows returns zeros, which ``jaxquant.state.update`` reads as unused."""
        recipe = self.recipe
        assert recipe.delayed is not None
        new = jax.vmap(functools.partial(delayed.observe, spec=recipe.delayed))(with_groups(recipe, old), scale, amax)
        sizes = scaling_groups(recipe, groups).sizes
        used = all_reduce(jax.lax.pmax, sizes, sizes, recipe.expert_axes) > 0  # as all devices observe the same amax
        new = jax.tree.map(lambda x: jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, 0), new)
        return jax.tree.map(lambda x: x[0], new) if recipe.shares_experts else new

    def _delayed_rows(self, x: Array, spec: TensorSpec, groups: Groups, state, floor: float):
        """Quantize rows with the scale of their group's history. Also returns the scale and amax of each group."""
        own = scaling_groups(self.recipe, groups).ids
        amax = group_amax(x, own, state["scale"].shape[0]).max(axis=1)
        amax = all_reduce(jax.lax.pmax, amax, x, self.recipe.expert_axes)
        scale = _current_scale(self.recipe, state, amax, spec, floor)
        rows = self._rows_with_scale(x, spec, groups, scale)
        rows = rows._replace(scale=delayed.poison_scale(scale, amax[:, None], element(spec.dtype)))
        return rows, Observation(scale, amax)

    def _rows_with_scale(self, x: Array, spec: TensorSpec, groups: Groups, scale: Array) -> Rows:
        compute = cast_dtype(self.recipe, x.dtype.name)
        return Rows(quantize_with_scale(x, spec, expand_groups(scale, groups.ids), compute_dtype=compute).qvalue, scale)

    def _multiply_floats(self, lhs: Any, rhs: Any, groups: Groups, numbers: Any, out_dtype: str) -> Array:
        """Multiply operands as floats if one is float or in tiles; outer scales multiply the product.

        The dtypes are the same as in ``contract``, except for integers in tiles: these become float32 here, while a
          dense
        matmul adds the sums of tiles. Two operands in blocks are multiplied by our kernel, if the kernel is selected.
        """
        sides, precision = (lhs, rhs), None
        arrays = [side for side in sides if not isinstance(side, (QTensor, Rows))]
        low = [side for side in sides if isinstance(side, QTensor)]
        if arrays:
            dtype, precision = arrays[0].dtype.name, None if numbers is _FORWARD else "HIGHEST"
        elif any(jnp.issubdtype(side.qvalue.dtype, jnp.integer) for side in sides):
            dtype, precision = "float32", "HIGHEST"
        else:
            dtype = tiles_dtype(sides, out_dtype)
        outer = [
            outer_scale(side, groups, numbers is _DRHS)
            for side in low
            if side.codec is None and side.outer_scale is not None
        ]
        left, right = map(slabs_to_rows, sides) if numbers is _DRHS else sides
        returned = accumulator_dtype(None, "float32" if outer else out_dtype)

        def as_floats(lhs: Any, rhs: Any, groups: Groups) -> Array:
            lhs, rhs = (to_operand(side, groups, dtype) for side in (lhs, rhs))
            return self._multiply(lhs, rhs, groups, numbers, returned, precision)

        if not arrays and block_ragged.select_matmul(left, right, numbers, returned, self.implementation) == "pallas":
            by_blocks = functools.partial(block_ragged.multiply, numbers=numbers, out_dtype=returned)
            out = unless_sharded(by_blocks, as_floats, left, right, groups)
        else:
            out = as_floats(left, right, groups)
        return out * functools.reduce(jnp.multiply, outer) if outer else out

    def _multiply(
        self, lhs: Array, rhs: Array, groups: Groups, numbers: Any, accumulator: str | None, precision: str | None
    ) -> Array:
        lhs, rhs = to_eight_bits(lhs), to_eight_bits(rhs)
        if lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
            select_implementation("dot_general", self.implementation, lambda: "ragged_dot_general has no kernel")
        if lhs.dtype != rhs.dtype and jnp.issubdtype(lhs.dtype, jnp.floating) and lhs.dtype.itemsize > 1:
            lhs, rhs = (x.astype(jnp.promote_types(lhs.dtype, rhs.dtype)) for x in (lhs, rhs))
        requested = self.precision if precision is None or self.precision is not None else jax.lax.Precision[precision]
        if lhs.dtype.itemsize < 4 and platform_of(lhs) != "gpu":
            requested = None  # products are exact, and XLA's grouped matmul for TPUs compiles with no other precision
        dtype = accumulator_dtype(accumulator, self.out_dtype)

        def dot(lhs: Array, rhs: Array) -> Array:
            return jax.lax.ragged_dot_general(
                lhs, rhs, groups.sizes, numbers, precision=requested, preferred_element_type=dtype
            )

        return float32_on_cpus(dot, lhs, rhs, dtype)


def _forward_key(x: Array, spec: TensorSpec, groups: Groups, key: RandomKey | None) -> RandomKey | None:
    """Return the random key of a forward operand, independent of rows after the last group."""
    return forward_key(groups.zero_ungrouped(x) if spec.draws else x, spec, key)


def _current_scale(
    recipe: Recipe, state: delayed.TensorState, amax: Array, spec: TensorSpec, floor: float = SMALLEST_SCALE
) -> Array:
    assert recipe.delayed is not None
    one = functools.partial(delayed.current_scale, element=element(spec.dtype), spec=recipe.delayed, floor=floor)
    return jax.vmap(one)(state, amax)


def _forward_weights(recipe: Recipe, x: Array, state: delayed.TensorState | None, key: RandomKey | None):
    """Quantize weights. Also returns the scale and amax of each group if the recipe uses delayed scaling."""
    spec = recipe.fwd.rhs
    if not isinstance(spec, TensorSpec):
        return x, None
    if spec.scaling != "delayed":
        return quantize_weights(recipe, x, spec, 0, forward_key(x, spec, key)), None
    assert state is not None
    amax = jnp.max(absolute(x), axis=(1, 2))
    amax = all_reduce(
        jax.lax.pmax, jnp.max(amax, keepdims=True) if recipe.shares_experts else amax, x, recipe.expert_axes
    )
    scale = _current_scale(recipe, state, amax, spec)
    compute = cast_dtype(recipe, x.dtype.name)
    tensor = quantize_with_scale(x, spec, scale.reshape(-1, 1, 1), compute_dtype=compute)
    return poison_tensor(tensor, amax.reshape(-1, 1, 1), spec), Observation(scale, amax)
