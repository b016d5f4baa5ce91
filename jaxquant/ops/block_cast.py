"""block_cast: an operand quantized for all its matmuls out of one read, by a kernel.

An activation is read along its features by the forward pass and along the tokens by the weight's gradient; an output
gradient by both gradients. Each wants tiles along its own contraction, which XLA's program reads the operand for anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core.blocks import block_shape, is_even, scale_shape
from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Matmul, Recipe, Side, TensorSpec
from jaxquant.core.scales import SMALLEST_SCALE
from jaxquant.core.sharding import platform_of
from jaxquant.kernels.block_quantize import api as kernel
from jaxquant.kernels.block_quantize.reference import Cast
from jaxquant.kernels.platforms import capability_of
from jaxquant.ops.contract import Dequantized
from jaxquant.ops.implementation import HOPPER_CASTS_PAY, TPU_CASTS_PAY, select_implementation
from jaxquant.ops.operand import cast_dtype

Array = jax.Array


class Use(NamedTuple):
    """How one matmul reads an operand.

    Attributes:
      spec: of the operand there.
      axes, batch: its contraction and batch axes there.
      has_values: whether the matmul multiplies it dequantized, in bfloat16.
      has_elements: whether its elements and scales are wanted.
      is_turned: as ``Cast`` has it.
    """

    spec: TensorSpec
    axes: tuple[int, ...]
    batch: tuple[int, ...]
    has_values: bool
    has_elements: bool
    is_turned: bool = False


def cast_uses(
    x: Array,
    uses: Sequence[Use],
    *,
    recipe: Recipe,
    implementation: str | None,
    floor: float = SMALLEST_SCALE,
    beside: Any = (),
) -> list[tuple[Dequantized | None, QTensor | None]] | None:
    """Return an operand's values and elements for each use; None where XLA quantizes it, use by use.

    Args:
      x: the operand.
      uses: of it, in tiles.
      recipe: whose arithmetic it is.
      implementation: what computes the cast, None to pick.
      floor: scales below it become 1.
      beside: arrays of the same program, one of which may know its platform where x does not.
    """
    if any(use.spec.tile_size is None or use.spec.codec is not None for use in uses) or x.ndim < 2:
        return None
    casts = tuple(
        Cast(spec, block_shape(x.shape, spec, axes, 1, batch), floor, has_elements, has_values, is_turned)
        for spec, axes, batch, has_values, has_elements, is_turned in uses
    )

    def refused() -> str | None:
        if cast_dtype(recipe, x.dtype.name) != "float32":
            return "the block cast divides in float32"
        return kernel.refusal(x, casts)

    arrays = jax.tree.leaves((x, beside))
    reason_to_prefer = TPU_CASTS_PAY if "tpu" in map(platform_of, arrays) else None
    if capability_of(*arrays)[0] == 9 and not any(use.has_values and use.has_elements for use in uses):
        reason_to_prefer = HOPPER_CASTS_PAY
    if select_implementation("block_quantize", implementation, refused, reason_to_prefer).name == "xla":
        return None
    made = kernel.block_quantize(x, casts)
    return [(None if each.values is None else Dequantized(each.values), each.tensor) for each in made]


def abstract_tensor(
    spec: TensorSpec, shape: tuple[int, ...], axes: tuple[int, ...], batch: tuple[int, ...], beside: Array
) -> QTensor:
    """Return the types of what an operand is quantized to.

    Args:
      spec, axes, batch: as ``Use`` has them.
      shape: of the operand.
      beside: an array of the same program, on whose mesh it lies.
    """
    block = block_shape(shape, spec, axes, 1, batch)
    place = NamedSharding(jax.typeof(beside).sharding.mesh, PartitionSpec())
    types = ((shape, spec.dtype), (scale_shape(shape, block), spec.scale_dtype))
    parts = [jax.ShapeDtypeStruct(*each, sharding=place) for each in types]
    return QTensor(*parts, block=None if is_even(shape, block) else block)  # pyright: ignore[reportArgumentType]


def cast_forward(
    x: Array,
    recipe: Recipe,
    side: Side,
    axes: tuple[int, ...],
    batch: tuple[int, ...],
    has_values: bool,
    implementation: str | None,
) -> tuple[Dequantized | QTensor, QTensor | Array] | None:
    """Return an operand as the forward pass reads it, and what is kept of it; None where XLA computes them.

    Args:
      x, recipe, side, axes, batch, implementation: as ``prepared.make_prepared`` takes them.
      has_values: whether the forward pass multiplies it dequantized, in bfloat16.
    """
    name: Matmul = "drhs" if side == "lhs" else "dlhs"
    spec, own, kind = recipe.resolve("fwd", side), recipe.resolve(name, side), recipe.kept(side)
    if spec is None:
        return None
    uses = [Use(spec, axes, batch, has_values, kind == "forward" or not has_values)]
    if kind == "own":
        matmul = getattr(recipe, name)
        if matmul.rotation is not None or matmul.shards > 1 or recipe.part(name) is not recipe:
            return None
        assert own is not None
        others = tuple(axis for axis in range(x.ndim) if axis not in (*axes, *batch))
        uses.append(Use(own, others, batch, False, True))
    elif kind == "forward" and not has_values and spec.granularity == "per_block" and platform_of(x) == "gpu":
        is_last = axes[-1] == x.ndim - 1  # the backward contracts other axes, and each matmul reads its own along rows
        uses = [uses[0]._replace(is_turned=not is_last), uses[0]._replace(is_turned=is_last)]
    made = cast_uses(x, uses, recipe=recipe, implementation=implementation)
    if made is None:
        return None
    (values, tensor), (_, kept) = made[0], made[-1]
    forward = values or tensor
    assert forward is not None
    return forward, x if kind == "float" or kept is None else kept
