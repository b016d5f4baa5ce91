"""dot_general: the low-precision product of two arrays, an ``Operation`` of ``ops.quantized``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from jaxquant.core.blocks import block_shape
from jaxquant.core.hadamard import make_rotation, rotated_axis
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.recipe import FORWARD, Matmul, MatmulSpec, Operand, Recipe, Side, TensorSpec
from jaxquant.core.rounding import RandomKey, digest, fold
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE
from jaxquant.core.sharding import Sharding, device_parts, to_named_sharding, untransposed
from jaxquant.kernels.block_quantize.reference import Cast
from jaxquant.ops.contract import contract, multiplies_values
from jaxquant.ops.converted import check_input_scale, has_batch_scales, map_batch
from jaxquant.ops.dimensions import Axes, Dimensions, DotDimensionNumbers
from jaxquant.ops.gradients import align, with_outer, without_outer
from jaxquant.ops.implementation import check_implementation
from jaxquant.ops.operand import Observation, quantize_operand, scale_dtype
from jaxquant.ops.pieces import QuantState, check_float, check_state, initial_state, with_shards
from jaxquant.ops.prepared import QuantizedOperand, abstract_tensor, cast_all, prepare
from jaxquant.ops.quantized import Gradient, Operation, contract_converted, quantized

Array = jax.Array
DEFAULT, HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
__all__ = ["QuantState", "dot_general", "initial_state"]


def dot_general(
    lhs: Float[Array, "*lhs"],
    rhs: Float[Array, "*rhs"] | QTensor,
    dimension_numbers: DotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: RandomKey | None = None,
    out_sharding: Sharding = None,
    implementation: str | None = None,
    prepared: QuantizedOperand | None = None,
    stored: tuple[bool, bool, bool] = (False, False, False),
) -> Float[Array, "*out"]:
    """Contract an activation with a weight in the low precision of a recipe, forward and backward.

    Accepts the arguments of ``jax.lax.dot_general``; lhs is the activation, rhs the weight. The operands are quantized
    along the contraction axes of each of the three matmuls. Gradients pass straight through rounding; values that a
    clipping calibration clipped have zero gradient.

    Inside ``jax.shard_map`` a scale of the whole tensor, dynamic or delayed, covers all devices on which the operand
    varies (with ``check_vma=False``: all devices), so it equals the scale that a single device computes. A scale of a
    channel or a tile covers only the part of the operand on its device, even if the contraction axis is sharded. Each
    gradient is summed over the mesh axes along which its operand does not vary.

    Args:
      lhs: activation, any float dtype.
      rhs: weight, any float dtype, or a converted weight. The result for a converted weight is bit for bit the same;
        the gradient of lhs is computed from the dequantized weight, and the weight has no gradient.
      dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
      precision: precision of the matmuls. None means DEFAULT in the forward pass, and HIGHEST in the backward pass.
        On GPUs, fp8 matmuls use fast accumulation with DEFAULT only.
      preferred_element_type: dtype of the result, or None for the promoted dtype of the operands.
      recipe: recipe of the contraction.
      state: amax state from ``initial_state``, for a recipe with delayed scaling. ``jaxquant.state.update`` computes
        the next state from this state and its gradient.
      key: random key for stochastic rounding. None derives a key from the bits of the operands' scales and amax
        histories, or from the output gradient if there are too few scales.
      out_sharding: sharding as in ``jax.lax.dot_general``, under a mesh with axes of ``AxisType.Explicit``. Gradients
        have the sharding of their operands.
      implementation: implementation of the casts and matmuls, or None to select one; see ``ops.implementation``.
      prepared: lhs as prepared by ``share`` for several contractions, or None to quantize it here.
      stored: whether lhs, rhs and the output gradient are stored in memory rather than computed where they are
        quantized; on Hopper a kernel casts stored operands.

    Raises:
      ValueError: ``state`` does not match the recipe, tiles or shards do not divide an axis, or the implementation is
        unknown.
      TypeError: an operand is not float.
      NotImplementedError: the gradients are differentiated.
    """
    check_implementation("dot_general", implementation)
    check_float("dot_general", lhs=lhs, rhs=rhs)
    dims, place = Dimensions.of(dimension_numbers, lhs.ndim, rhs.ndim), to_named_sharding(out_sharding, lhs)
    if isinstance(rhs, QTensor) and has_batch_scales(recipe, rhs, dims):
        check_input_scale(recipe, rhs)
        inner = place and NamedSharding(place.mesh, PartitionSpec(*place.spec[len(dims.rhs_batch) :]))

        def run(lhs: Array, rhs: QTensor, key: RandomKey | None) -> Array:
            options: dict[str, Any] = {"recipe": recipe, "key": key, "implementation": implementation}
            numbers = dims.without_batch().numbers
            return dot_general(lhs, rhs, numbers, precision, preferred_element_type, out_sharding=inner, **options)

        return map_batch(run, lhs, rhs, dims, key)
    recipe = with_shards(recipe, lhs, dims.lhs_free)
    fields = {"dims": dims, "out_sharding": place, "copies": not isinstance(rhs, QTensor), "stored": stored}
    options = {"recipe": recipe, "implementation": implementation}
    op = _Dot.of(lhs, rhs, precision, preferred_element_type, **options, **fields)
    if isinstance(rhs, QTensor):
        return contract_converted(op, lhs, rhs, None, key)
    check_state(recipe, state)
    return quantized(op, lhs, rhs, None, state or {}, key, prepared)


@dataclasses.dataclass(frozen=True)
class _Dot(Operation):
    """A contraction of two arrays.

    Attributes:
      dims: dimension numbers of the forward contraction.
      out_sharding: sharding of the result, under explicit sharding.
      copies: whether GPUs may copy fp8 operands so that the contraction axes are last in memory.
      stored: whether lhs, rhs and the output gradient are stored in memory.
    """

    dims: Dimensions
    out_sharding: NamedSharding | None
    copies: bool
    stored: tuple[bool, bool, bool]

    def axes(self, side) -> tuple[Axes, Axes]:
        dims = self.dims if side == "lhs" else self.dims.swap()
        return dims.lhs_contract, dims.lhs_batch

    def prepare(self, side, x, groups, state, key) -> QuantizedOperand:
        has_values = self._multiplies_values("fwd", x, self.out_dtype)
        is_stored = self.stored[side == "rhs"]
        return prepare(x, self.recipe, side, *self.axes(side), state, key, self.implementation, has_values, is_stored)

    def _multiplies_values(self, name: Matmul, x: Array, out_dtype: str) -> bool:
        """Check whether tiled operands are multiplied as bfloat16 values; for gradients, x is the output gradient."""
        sides: tuple[Side, Side] = ("rhs", "lhs") if name == "drhs" else ("lhs", "rhs")
        specs = [spec for side in sides if (spec := self.recipe.resolve(name, side)) is not None]
        if len(specs) < 2 or any(not each.tile_size or each.codec or each.tiling != "nested" for each in specs):
            return False
        dims, first = (self.dims, self.lhs.shape) if name == "fwd" else (self._gradient_dims(name)[0], x.shape)
        second = self.lhs.shape if name == "drhs" else self.rhs.shape
        left = abstract_tensor(specs[0], first, dims.lhs_contract, dims.lhs_batch, x)
        right = abstract_tensor(specs[1], second, dims.rhs_contract, dims.rhs_batch, x)
        return multiplies_values(left, right, dims, out_dtype, self.implementation)

    def _gradient_dims(self, name: Matmul) -> tuple[Dimensions, Axes]:
        return self.dims.for_dlhs() if name == "dlhs" else self.dims.for_drhs()

    def product(self, lhs: QTensor | Array, rhs: QTensor | Array, groups: None) -> Array:
        return self._contract("fwd", lhs, rhs, self.dims, self.out_dtype, self.out_sharding)

    def _contract(
        self,
        name: Matmul,
        lhs: QTensor | Array,
        rhs: QTensor | Array,
        dims: Dimensions,
        out_dtype: str,
        place: NamedSharding | None,
        **more: Any,
    ) -> Array:
        """Multiply the prepared operands of one of the recipe's matmuls."""
        default, accumulator = DEFAULT if name == "fwd" else HIGHEST, getattr(self.recipe, name).accumulator
        more |= {"precision": self.precision, "default_precision": default, "implementation": self.implementation}
        more |= {"scale_dtype": scale_dtype(self.recipe, out_dtype), "copies": self._should_copy(lhs, rhs, place)}
        more |= {"accumulator": accumulator, "out_dtype": out_dtype, "out_sharding": place}
        specs = [spec for spec in (self.recipe.fwd.lhs, self.recipe.fwd.rhs) if isinstance(spec, TensorSpec)]
        is_per_tensor = name != "fwd" or all(spec.granularity == "per_tensor" for spec in specs)
        return contract(lhs, rhs, dims, **more, is_per_tensor=is_per_tensor)

    @property
    def shares_gradient(self) -> bool:
        return self.recipe.shares_gradient

    def quantize_gradient(self, grad, groups, state, key) -> tuple[QTensor, QTensor, Observation | None]:
        spec, axes = self.recipe.spec_of("output_grad"), self.dims.for_dlhs()[0].lhs_contract
        assert spec is not None
        return self.cast_gradient(grad, spec, axes, (), key, state=state, is_stored=self.stored[2])

    def gradient(self, name, grad: Array, shared: QTensor | None, residual: QTensor | Array, groups, key) -> Array:
        dims, order = self._gradient_dims(name)
        place = untransposed((self.lhs if name == "dlhs" else self.rhs).place.sharding, order)
        recipe, (out_dtype, keeps_dtype) = self.recipe, self._gradient_dtype(name, grad.dtype.name)
        matmul: MatmulSpec = getattr(recipe, name)
        left, residual = self._gradient_operands(name, grad, shared, residual, dims, key)
        swaps = name == "drhs" and place is None and not dims.lhs_batch and (keeps_dtype or not recipe.matches_flax)
        is_sent = False
        if name == "drhs" and matmul.accumulator == "int32":
            left, is_sent = _split_by_device(left, residual, dims)
        # The product activation · gradient has the layout of the kernel; the caller's transpose undoes this swap.
        operands = (residual, left, dims.swap()) if swaps else (left, residual, dims)
        more = {"parts_dtype": out_dtype if is_sent else "float32", "shards": matmul.shards}
        out = self._contract(name, *operands, out_dtype, place, **more)
        n = len(dims.rhs_free)
        return (out.transpose((*range(n, out.ndim), *range(n))) if swaps else out).transpose(order)

    def _gradient_dtype(self, name: Gradient, dtype: str) -> tuple[str, bool]:
        """Return the dtype of a gradient's product, and whether the product should have the layout of the kernel."""
        requests_float32 = self.recipe.is_lean or getattr(self.recipe, name).accumulator == "float32"
        keeps_dtype = name == "drhs" and self.rhs.dtype != dtype and requests_float32
        return "float32" if keeps_dtype and self.rhs.dtype == "float32" else dtype, keeps_dtype

    def cast_gradients(self, grad: Array, others: Any) -> tuple[Any, Any]:
        casts = []
        for name in get_args(Gradient):
            matmul: MatmulSpec = getattr(self.recipe, name)
            spec, residual_spec = (matmul.lhs, matmul.rhs) if name == "dlhs" else (matmul.rhs, matmul.lhs)
            residual = self.recipe.resolve(name, "rhs" if name == "dlhs" else "lhs")
            # ``align`` folds the scale of the residual into the gradient.
            folds = residual_spec == FORWARD and residual is not None and residual.granularity != "per_block"
            is_own = matmul.rotation is not None or matmul.is_late or matmul.shards > 1 or matmul.arithmetic is not None
            if not isinstance(spec, TensorSpec) or folds or is_own:
                return None, None
            dims = self._gradient_dims(name)[0]
            has_values = self._multiplies_values(name, grad, self._gradient_dtype(name, grad.dtype.name)[0])
            block = block_shape(grad.shape, spec, dims.lhs_contract, 1, dims.lhs_batch)
            casts.append(Cast(spec, block, SMALLEST_GRADIENT_SCALE, not has_values, has_values))
        made = cast_all(grad, tuple(casts), recipe=self.recipe, implementation=self.implementation, others=others)
        if made is None:
            return None, None
        first, second = (values or tensor for values, tensor in made)
        return first, second

    def input_gradient(self, grad: Array, kernel: QTensor, groups: None) -> Array:
        dims, order = self.dims.for_dlhs()
        place = untransposed(self.lhs.place.sharding, order)
        out = contract(grad, kernel, dims, out_dtype=grad.dtype.name, precision=HIGHEST, out_sharding=place)
        return out.transpose(order).astype(self.lhs.dtype)

    def _gradient_operands(
        self, name: Gradient, grad: Array, shared: QTensor | None, residual: QTensor | Array, dims: Dimensions, key
    ) -> tuple[QTensor | Array, QTensor | Array]:
        """Return the output gradient and the residual as operands of the gradient's product."""
        recipe, matmul, axes = self.recipe, getattr(self.recipe, name), dims.lhs_contract
        spec, residual_spec = (matmul.lhs, matmul.rhs) if name == "dlhs" else (matmul.rhs, matmul.lhs)
        if not isinstance(spec, TensorSpec):
            dtype = self._gradient_dtype(name, grad.dtype.name)[0]
            return grad, dequantize(residual, dtype) if isinstance(residual, QTensor) else residual
        if isinstance(residual_spec, TensorSpec) and (matmul.rotation is not None or matmul.is_late):
            shared, (grad, residual, axes) = None, self._rotate_both(grad, residual, matmul, residual_spec, dims, key)
        elif isinstance(residual, QTensor) and residual_spec == FORWARD:
            forward_spec = recipe.fwd.rhs if name == "dlhs" else recipe.fwd.lhs
            grad, residual = align(grad, residual, dims, forward_spec, is_delayed=shared is not None)
        if shared is not None:
            return shared, residual
        return self.cast_gradient(grad, spec, axes, dims.lhs_batch, key, shards=matmul.shards)[0], residual

    def _rotate_both(
        self, grad: Array, residual: QTensor | Array, matmul: MatmulSpec, spec: TensorSpec, dims: Dimensions, key
    ) -> tuple[Array, QTensor, Axes]:
        """Rotate both operands, and quantize the residual if the forward pass saved a float residual.

        Returns the operands and the axes along which the gradient is to be quantized.
        """
        left, right = dims.lhs_contract, dims.rhs_contract
        rotation = matmul.rotation if left else None  # the gradient of a product with a vector contracts no axis
        if rotation is not None:
            index = rotated_axis(tuple(grad.shape[axis] for axis in left), rotation.size)
            left, right = left[index : index + 1], right[index : index + 1]
        rotate_axis = make_rotation(rotation, None if key is None else fold(key, 2))
        grad = rotate_axis(grad, *left)
        if matmul.is_late:
            whole, unit = without_outer(residual, grad.dtype.name)
            whole = rotate_axis(whole, *right)
            own = fold(key, 3) if spec.draws and key is not None else None
            tensor, _, _ = quantize_operand(whole, spec, right, recipe=self.recipe, batch=dims.rhs_batch, key=own)
            residual = with_outer(tensor, unit)
        assert isinstance(residual, QTensor)
        return grad, residual, left

    def noise_seed(self, lhs: QuantizedOperand, rhs: QuantizedOperand, state: QuantState) -> Array | None:
        """Return a noise seed from the bits of scales and amax histories, or None if there are too few bits.

        The activation's scales (with delayed scaling: its amax) change with every batch, the weight's scales with every
        step. A seed from the output gradient would cost one more read of that gradient. Power-of-two scales change too
        rarely: the amaxes of most tensors' blocks stay between the same two powers.
        """
        if not self.recipe.is_stochastic:
            return None
        scales = [side.forward.scale for side in (lhs, rhs) if isinstance(side.forward, QTensor)]
        if not state and not (isinstance(lhs.forward, QTensor) and _is_unique(self.recipe.fwd.lhs, lhs.forward.scale)):
            return None
        scales += [] if lhs.residual.observation is None else [lhs.residual.observation.amax]
        return digest(scales + [tensor["amax_history"] for tensor in state.values()])

    def _should_copy(self, lhs: QTensor | Array, rhs: QTensor | Array, place: NamedSharding | None) -> bool:
        """Check whether copies of the 8-bit operands save time: only with delayed scaling, whose casts need no amax."""
        is_delayed = self.copies and self.recipe.is_lean and self.recipe.delayed is not None
        is_delayed = is_delayed and place is None and not self.dims.lhs_batch
        return is_delayed and all(isinstance(each, QTensor) and each.scale.size == 1 for each in (lhs, rhs))


_ENOUGH = {"float32": 16, "float8_e4m3fn": 512}
"""Scale dtype -> number of dynamic scales whose bits give each step and layer a different key."""


def _is_unique(spec: Operand, scale: Array) -> bool:
    """Check whether an activation has dynamic scales, and enough of them to identify its values."""
    if not isinstance(spec, TensorSpec) or spec.scaling != "dynamic" or spec.calibration.method == "fixed":
        return False
    is_power_of_two = spec.scale_dtype == "float32" and spec.scale_rounding != "exact"
    return not is_power_of_two and scale.size >= _ENOUGH.get(spec.scale_dtype, math.inf)


def _split_by_device(left: QTensor | Array, right: QTensor | Array, dims: Dimensions) -> tuple[QTensor | Array, bool]:
    """Return the left operand with one scale per device along the contraction, and whether devices send scaled sums.

    Each device then scales its partial sum, and sends it in the gradient's dtype; the partial sums of a single integer
    matmul would be sent in int32. An axis with several scales is not split again. If these scales do not correspond to
    the devices, partial sums stay float32.
    """
    for axis, other in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        if not (isinstance(left, QTensor) and isinstance(right, QTensor)):
            break
        if (count := max(device_parts(left.qvalue, axis), device_parts(right.qvalue, other))) > 1:
            if left.scale.shape[axis] == right.scale.shape[other] == 1:
                block = tuple(size // count if i == axis else size for i, size in enumerate(left.blocks))
                left = dataclasses.replace(left, scale=jnp.repeat(left.scale, count, axis), block=block)
            return left, {left.scale.shape[axis], right.scale.shape[other]} <= {1, count}
    return left, False
