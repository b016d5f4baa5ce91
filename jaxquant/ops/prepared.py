"""prepared: an operand of a contraction as the forward pass reads it, and its residual for the backward pass.

The operand and the residual do not depend on the other operand of the contraction. An activation that several layers
read (query, key and value) is therefore prepared only once, by ``share``:

    x ── share, with the states of all layers ──► QuantizedOperand ──► dot_general(x, weight, state, prepared) in each
    layer
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core import delayed
from jaxquant.core.blocks import block_shape, is_even, scale_shape
from jaxquant.core.dtypes import element
from jaxquant.core.hadamard import draw_signs, rotate, rotated_axis
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import outside_range
from jaxquant.core.recipe import FORWARD, Matmul, Operand, Recipe, Side, TensorSpec
from jaxquant.core.rounding import RandomKey
from jaxquant.core.scales import SMALLEST_SCALE
from jaxquant.core.sharding import gather_axis, platform_of
from jaxquant.kernels.block_quantize import api as kernel
from jaxquant.kernels.block_quantize.reference import Cast
from jaxquant.kernels.platforms import capability_of
from jaxquant.ops.contract import Dequantized
from jaxquant.ops.dimensions import Axes
from jaxquant.ops.gradients import RESIDUAL_NAME
from jaxquant.ops.implementation import HOPPER_CASTS_PAY, TPU_CASTS_PAY, select_implementation
from jaxquant.ops.operand import Observation, cast_dtype, forward_key, quantize_operand
from jaxquant.ops.pieces import with_shards

Array = jax.Array


class Residual(NamedTuple):
    """Residual of an operand for the backward pass.

    Attributes:
      tensor: quantized tensor of the forward pass, a separately quantized tensor, or the float tensor.
      mask: bit mask of clipped elements, eight to a byte. None if no element can be clipped, or if the qvalues show
        which elements were clipped.
      observation: observation of delayed scaling, without the scale if ``tensor`` stores the scale.
    """

    tensor: QTensor | Array
    mask: Array | None
    observation: Observation | None


class QuantizedOperand(NamedTuple):
    """An operand as the forward pass reads it (a ``QTensor``, ``groups.Rows`` or an array), and its residual."""

    forward: Any
    residual: Residual


def make_prepared(
    x: Array,
    recipe: Recipe,
    side: Side,
    axes: Axes,
    batch: Axes,
    state: delayed.TensorState | None,
    key: RandomKey | None,
    implementation: str | None,
    has_values: bool = False,
    is_stored: bool = False,
    reads_clips: bool = True,
) -> QuantizedOperand:
    """Quantize an operand for the forward pass and for the backward pass.

    Args:
      x: operand.
      recipe: recipe of the contraction.
      side: side of the operand in the forward contraction.
      axes: contraction axes of x.
      batch: batch axes of x.
      state: quant state of the operand, for delayed scaling, or None.
      key: the caller's random key.
      implementation: implementation of the casts.
      has_values: whether the forward product reads bfloat16 values, which a kernel may write.
      is_stored: whether x is stored in memory rather than computed where it is quantized.
      reads_clips: whether qvalues of the residual may show the clipped elements, so that no mask is stored.
    """
    spec = recipe.resolve("fwd", side)
    if (made := cast_forward(x, recipe, side, axes, batch, has_values, implementation)) is not None:
        return QuantizedOperand(made[0], Residual(tag(made[1]), None, None))
    forward, other, observation = x, x, None
    more = {"batch": batch, "state": state, "implementation": implementation}
    if spec is not None:
        options = {"key": forward_key(x, spec, key), "is_stored": is_stored}
        forward, other, observation = quantize_operand(x, spec, axes, recipe=recipe, **options, **more)
    operand, kind = recipe.drhs.lhs if side == "lhs" else recipe.dlhs.rhs, recipe.residual_kind(side)
    kept = other if kind == "forward" else x
    if kind == "own":
        kept, own = _quantize_residual(x, recipe, side, axes, key, **more)
        observation = own if observation is None else observation
    elif kind == "forward" and observation is not None and spec is not None and element(spec.dtype).kind != "int":
        observation = observation._replace(scale=None)  # the tensor stores it; for integers see delayed.poison_scale
    reads = reads_clips and operand == FORWARD and reads_clip(spec)
    return QuantizedOperand(forward, Residual(tag(kept), None if reads else clip_mask(x, forward, spec), observation))


prepare = jax.jit(make_prepared, static_argnums=(1, 2, 3, 4, 7, 8, 9))
"""Jitted ``make_prepared``: a program contains it once for all operands of one shape."""


def tag(residual: Any) -> Any:
    """Attach a name to a quantized residual, for remat policies; float arrays stay as they are."""
    if isinstance(residual, Array):
        return residual
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL_NAME), residual)


def _quantize_residual(
    x: Array, recipe: Recipe, side: Side, axes: Axes, key: RandomKey | None, **more: Any
) -> tuple[QTensor, Observation | None]:
    """Quantize an operand along the backward's contraction axes now, so that the float tensor need not be saved."""
    name: Matmul = "drhs" if side == "lhs" else "dlhs"
    matmul, spec, recipe = getattr(recipe, name), recipe.resolve(name, side), recipe.for_matmul(name)
    assert spec is not None
    own, shards = forward_key(x, spec, key), matmul.shards
    axes = tuple(axis for axis in range(x.ndim) if axis not in axes and axis not in more["batch"])
    if matmul.rotation is not None and axes:  # the gradient of a product with a vector contracts no axis
        axes = (axes[rotated_axis(tuple(x.shape[axis] for axis in axes), matmul.rotation.size)],)
        x = rotate(x, axes[0], draw_signs(matmul.rotation, None))
    tensor, _, observation = quantize_operand(x, spec, axes, recipe=recipe, key=own, shards=shards, **more)
    return tensor, observation


def share(
    x: Array,
    states: Sequence[delayed.TensorState],
    *,
    recipe: Recipe,
    axes: Axes,
    implementation: str | None = None,
    is_stored: bool = False,
) -> QuantizedOperand:
    """Prepare an activation for all contractions that read it.

    Args:
      x: activation.
      states: states of the input of each contraction, with delayed scaling; see ``delayed.merge_states``.
      recipe: recipe that ``can_share``.
      axes: contraction axes of x.
      implementation: implementation of the casts.
      is_stored: whether x is stored in memory.
    """
    recipe = with_shards(recipe, x, [axis for axis in range(x.ndim) if axis not in axes])
    return _share(x, list(states), recipe, axes, implementation, is_stored)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), inline=True)  # differentiated once
def _share(x, states, recipe, axes, implementation, is_stored):
    x, states = jax.lax.stop_gradient((x, states))
    state = delayed.merge_states(states) if states else None
    return prepare(x, recipe, "lhs", axes, (), state, None, implementation, False, is_stored)


def can_share(recipe: Recipe) -> bool:
    """Check whether an activation is quantized in the same way for all contractions (no noise, no flax mode)."""
    kinds = [spec for spec in (recipe.fwd.lhs, recipe.drhs.lhs) if isinstance(spec, TensorSpec)]
    return bool(kinds) and not recipe.matches_flax and all(spec.rounding == "nearest" for spec in kinds)


def reads_clip(operand: Operand) -> bool:
    """Check whether qvalues show which elements were clipped: those with the largest value of a fixed range.

    The gradient of elements that round up to the largest value becomes zero, too.
    """
    if not isinstance(operand, TensorSpec):
        return False
    return operand.calibration.method == "fixed" and operand.calibration.is_symmetric


def clip_mask(x: Array, tensor: QTensor | Array, operand: Operand) -> Array | None:
    """Return a bit mask of clipped elements, eight to a byte along the last axis, or None if none can be clipped."""
    if not (isinstance(operand, TensorSpec) and operand.clips and isinstance(tensor, QTensor) and x.size):
        return None
    outside = outside_range(x, operand, tensor)
    return checkpoint_name(jnp.packbits(gather_axis(outside, -1), axis=-1), RESIDUAL_NAME)


# -- one read of an operand for all its matmuls, by a kernel -----------------------------------------------------------
# The forward pass contracts the features of an activation, the weight gradient contracts its tokens; both gradients
# read the output gradient. Each matmul needs tiles along its contraction axes, for each of which XLA reads the operand.


def cast_all(
    x: Array, casts: tuple[Cast, ...], *, recipe: Recipe, implementation: str | None, others: Any = ()
) -> list[tuple[Dequantized | None, QTensor | None]] | None:
    """Return the bfloat16 values and the tensor of each cast, or None if XLA computes the casts separately.

    Args:
      x: operand.
      casts: casts of the operand.
      recipe: recipe whose arithmetic applies.
      implementation: implementation of the casts, or None to select one.
      others: arrays of the same program, whose platform is used if x has none.
    """
    if any(cast.spec.tile_size is None or cast.spec.codec is not None for cast in casts) or x.ndim < 2:
        return None

    def refused() -> str | None:
        if cast_dtype(recipe, x.dtype.name) != "float32":
            return "the block_quantize kernel divides only in float32"
        return kernel.refusal(x, casts)

    arrays = jax.tree.leaves((x, others))
    reason_to_prefer = TPU_CASTS_PAY if "tpu" in map(platform_of, arrays) else None
    if capability_of(*arrays)[0] == 9 and not any(cast.has_values and cast.has_elements for cast in casts):
        reason_to_prefer = HOPPER_CASTS_PAY
    if select_implementation("block_quantize", implementation, refused, reason_to_prefer).name == "xla":
        return None
    made = kernel.block_quantize(x, casts)
    return [(None if each.values is None else Dequantized(each.values), each.tensor) for each in made]


def abstract_tensor(spec: TensorSpec, shape: Axes, axes: Axes, batch: Axes, like: Array) -> QTensor:
    """Return the quantized operand as abstract arrays.

    Args:
      spec: spec of the operand.
      shape: shape of the operand.
      axes, batch: contraction and batch axes of the operand.
      like: array of the same program, whose mesh is used.
    """
    block = block_shape(shape, spec, axes, 1, batch)
    place = NamedSharding(jax.typeof(like).sharding.mesh, PartitionSpec())
    types = ((shape, spec.dtype), (scale_shape(shape, block), spec.scale_dtype))
    parts = [jax.ShapeDtypeStruct(*each, sharding=place) for each in types]
    return QTensor(*parts, block=None if is_even(shape, block) else block)  # pyright: ignore[reportArgumentType]


def cast_forward(
    x: Array, recipe: Recipe, side: Side, axes: Axes, batch: Axes, has_values: bool, implementation: str | None
) -> tuple[Dequantized | QTensor, QTensor | Array] | None:
    """Return the operand of the forward pass and the residual, or None if XLA computes both.

    Args:
      x, recipe, side, axes, batch, implementation: arguments of ``make_prepared``.
      has_values: whether the forward pass multiplies the operand dequantized, in bfloat16.
    """
    name: Matmul = "drhs" if side == "lhs" else "dlhs"
    spec, own, kind = recipe.resolve("fwd", side), recipe.resolve(name, side), recipe.residual_kind(side)
    if spec is None:
        return None
    cast = Cast(spec, block_shape(x.shape, spec, axes, 1, batch), SMALLEST_SCALE)
    casts = [cast._replace(has_values=has_values, has_elements=kind == "forward" or not has_values)]
    if kind == "own":
        matmul = getattr(recipe, name)
        if matmul.rotation is not None or matmul.shards > 1 or recipe.for_matmul(name) is not recipe:
            return None
        assert own is not None
        others = tuple(axis for axis in range(x.ndim) if axis not in (*axes, *batch))
        casts.append(Cast(own, block_shape(x.shape, own, others, 1, batch), SMALLEST_SCALE))
    elif kind == "forward" and not has_values and spec.granularity == "per_block" and platform_of(x) == "gpu":
        is_last = axes[-1] == x.ndim - 1  # the backward contracts other axes, and each matmul reads its own copy
        casts = [cast._replace(is_transposed=not is_last), cast._replace(is_transposed=is_last)]
    made = cast_all(x, tuple(casts), recipe=recipe, implementation=implementation)
    if made is None:
        return None
    (values, tensor), (_, kept) = made[0], made[-1]
    forward = values or tensor
    assert forward is not None
    return forward, x if kind == "float" or kept is None else kept
