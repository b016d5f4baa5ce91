"""contract: the product of two operands, quantized or float, with their scales applied to the result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant import exact
from jaxquant.core.blocks import pad_blocks, repeat_scale
from jaxquant.core.float_dot import float_dot
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.core.sharding import explicit_sharding, fit_sizes, is_whole, platform_of, reshard_like, split_axes
from jaxquant.kernels.fp8_einsum import api as kernel
from jaxquant.kernels.platforms import capability_of, unless_sharded
from jaxquant.ops import block_scaled
from jaxquant.ops.byte_dot import byte_dot
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.implementation import INT8_PAYS, select_implementation
from jaxquant.ops.pieces import to_eight_bits

Array = jax.Array
Precision = jax.lax.PrecisionLike
DEQUANTIZED_MARK = "jaxquant dequantized"
"""``checkpoint_name`` of an operand that is dequantized before the matmul, because no matmul supports its tiles."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dequantized:
    """A quantized operand of a float matmul, as the bfloat16 values that a kernel wrote."""

    values: Array


def accumulator_dtype(requested: str | None, out_dtype: str) -> str:
    """Return a matmul's ``preferred_element_type``: ``requested``, or else the result's dtype (float32 for float16).

    A float16 sum of 8-bit products overflows before the scales are applied.
    """
    return requested or ("float32" if out_dtype == "float16" else out_dtype)


def contract(
    lhs: QTensor | Dequantized | Array,
    rhs: QTensor | Dequantized | Array,
    dims: Dimensions,
    *,
    out_dtype: str,
    accumulator: str | None = None,
    precision: Precision = None,
    default_precision: Precision = None,
    scale_dtype: str = "float32",
    out_sharding: NamedSharding | None = None,
    implementation: str | None = None,
    copies: bool = False,
    parts_dtype: str = "float32",
    shards: int = 1,
    is_per_tensor: bool = True,
) -> Array:
    """Contract two operands: ``(lhs.qvalue · rhs.qvalue) · lhs.scale · rhs.scale``, rounded once to ``out_dtype``.

    If one operand is float, the qvalues of the other operand are cast to the float dtype, in which they are exact. Some
    operands are dequantized before the matmul; see ``dequantized_dtype``. A scale that varies along a contraction axis
    (a shard, or a tile of integers) splits that axis; the partial sums are scaled and then added in ``parts_dtype``.

    Args:
      lhs, rhs: operands.
      dims: dimension numbers.
      out_dtype: dtype of the result.
      accumulator: dtype that the matmul returns, or None for the dtype of the result; int32 requires two integer
        operands.
      precision: precision as in ``lax.dot_general``.
      default_precision: precision of a quantized matmul if ``precision`` is None.
      scale_dtype: dtype in which scales are applied (float32, or the result's dtype in flax mode). The product of two
        per-tensor scales is computed in float32, rounded to the dtype that the matmul returns (float32 for int32), and
        multiplied with the result in that dtype, so that GPU libraries can scale the result inside the matmul.
      out_sharding: sharding of the result, under explicit sharding; None leaves it to ``lax.dot_general``.
      implementation: implementation of the low-precision matmul, or None to select one; see ``ops.implementation``.
      copies: whether GPUs copy fp8 operands so that the contraction axes are last; see ``byte_dot``.
      parts_dtype: dtype in which partial sums are added, and in which devices exchange them.
      shards: number of blocks of the first contraction axis that were quantized separately; each block is
        multiplied in low precision.
      is_per_tensor: whether the recipe has per-tensor scales. Finer scales multiply the result one after the other,
        even if there is only one of each: a single row then has the same bits as in a batch.
    """
    is_low = all(isinstance(side, QTensor | Dequantized) for side in (lhs, rhs))
    if (dtype := dequantized_dtype(lhs, rhs, dims, out_dtype, shards)) is not None:
        scales = [side.outer_scale for side in (lhs, rhs) if isinstance(side, QTensor) and side.outer_scale is not None]
        outer = functools.reduce(jnp.multiply, (scale.reshape(()) for scale in scales)) if scales else None
        # A float matmul accumulates in float32 and rounds once, whichever dtype it returns.
        requested = None if accumulator == "int32" or (is_low and accumulator == "float32") else accumulator
        returned = accumulator_dtype(requested, out_dtype if outer is None else "float32")

        def as_floats(lhs: Any, rhs: Any) -> Array:
            left, right = (to_float_operand(side, dtype, outer is None) for side in (lhs, rhs))
            more = {"precision": precision, "preferred_element_type": returned, "out_sharding": out_sharding}
            return float_dot(left, right, dims.numbers, **more)

        out = None
        if isinstance(lhs, QTensor) and isinstance(rhs, QTensor):
            by = block_scaled.select_matmul(lhs, rhs, dims, returned, implementation)
            by_blocks = functools.partial(block_scaled.multiply, dims=dims, out_dtype=returned, by=by)
            out = None if by == "xla" else unless_sharded(by_blocks, as_floats, lhs, rhs)
        out = as_floats(lhs, rhs) if out is None else out
        return (out if outer is None else out * outer).astype(out_dtype)
    if not (isinstance(lhs, QTensor) and isinstance(rhs, QTensor)):
        lhs, rhs = (side if isinstance(side, QTensor) else _unscaled(side) for side in (lhs, rhs))
        more = {"precision": precision, "out_sharding": out_sharding}
        product = functools.partial(_product, out_dtype=out_dtype, accumulator=accumulator or "float32", **more)
        return _one_row(product, lhs, rhs, dims)

    axes = (dims.lhs_contract, dims.rhs_contract), (dims.lhs_batch, dims.rhs_batch)
    options: dict[str, Any] = {"out_dtype": out_dtype, "accumulator": accumulator_dtype(accumulator, out_dtype)}
    refused = functools.partial(kernel.refusal, lhs, rhs, *axes, **options, scale_dtype=scale_dtype)
    is_hopper = capability_of(lhs.qvalue, rhs.qvalue)[0] == 9
    reason_to_prefer = INT8_PAYS if is_hopper and lhs.qvalue.dtype == rhs.qvalue.dtype == jnp.int8 else None
    if select_implementation("dot_general", implementation, refused, reason_to_prefer).name == "pallas":
        return kernel.einsum(lhs, rhs, *axes, **options)
    options |= {"precision": default_precision if precision is None else precision, "out_sharding": out_sharding}
    options |= {"scale_dtype": scale_dtype, "parts_dtype": parts_dtype, "is_per_tensor": is_per_tensor}
    return _product(lhs, rhs, dims, **options, copies=copies)


SMALL = 2**20
"""Number of elements below which a weight is multiplied with a single row as fast as with two."""


def dequantized_dtype(
    lhs: QTensor | Dequantized | Array,
    rhs: QTensor | Dequantized | Array,
    dims: Dimensions,
    out_dtype: str,
    shards: int = 1,
) -> str | None:
    """Return the dtype to which quantized operands of a contraction are dequantized, or None to multiply qvalues.

    A float matmul multiplies two float operands, tensor formats whose elements and scales are not separate arrays, and
    tiles. (A matmul that scales the sum of each tile would store one result per tile, and no library has such a
    matmul.) Two operands in tiles are dequantized to bfloat16 if the result is bfloat16 or if the scales have eight
    bits (exact), and to float32 otherwise; the outer scales multiply the product.

    There is one exception for tiles: if the other operand is float, and has at most half as many rows as a tile has
    elements, the weight is multiplied tile by tile. The stored weight is then read once, and the float32 sums of the
    tiles need no more bytes than a bfloat16 weight.

    Args:
      lhs, rhs, dims, out_dtype, shards: arguments of ``contract``.
    """
    if isinstance(lhs, Dequantized) or isinstance(rhs, Dequantized):
        return "bfloat16"
    sides = ((lhs, dims.lhs_contract), (rhs, dims.rhs_contract))
    tensors = [(side, axes) for side, axes in sides if isinstance(side, QTensor)]
    arrays = [side for side in (lhs, rhs) if not isinstance(side, QTensor)]
    if not tensors:
        return arrays[0].dtype.name
    has_codec = any(side.codec is not None for side, _ in tensors)
    tiles = (
        [] if has_codec else [(side.scale.shape[axis], side.blocks[axis]) for side, axes in tensors for axis in axes]
    )
    if len(tensors) == 1:
        x, free = arrays[0], dims.rhs_free if isinstance(lhs, QTensor) else dims.lhs_free
        rows = math.prod(x.shape[axis] for axis in free)
        is_after = all(count == 1 or 2 * rows <= size for count, size in tiles)
        return None if is_after and not has_codec and tensors[0][0].zero_point is None else x.dtype.name
    is_float = all(jnp.issubdtype(side.qvalue.dtype, jnp.floating) for side, _ in tensors)
    if not has_codec and not (is_float and any(count > shards for count, _ in tiles)):
        return None
    return tiles_dtype([side for side, _ in tensors], out_dtype)


def tiles_dtype(tensors: Sequence[Any], out_dtype: str) -> str:
    """Return the dtype to which two operands in tiles are dequantized; see ``dequantized_dtype``."""
    is_exact = all(isinstance(x, QTensor) and x.codec is None and x.scale.dtype.itemsize == 1 for x in tensors)
    return "bfloat16" if is_exact or out_dtype == "bfloat16" else "float32"


def multiplies_values(lhs: QTensor, rhs: QTensor, dims: Dimensions, out_dtype: str, implementation: str | None) -> bool:
    """Check whether two operands will be dequantized to bfloat16, because no matmul of blocks is selected.

    Args:
      lhs, rhs: tensors of abstract arrays.
      dims, out_dtype, implementation: arguments of ``contract``.
    """
    has_instruction = capability_of(lhs.qvalue)[0] == 10
    if has_instruction or dequantized_dtype(lhs, rhs, dims, out_dtype) != "bfloat16":
        return False
    return block_scaled.select_matmul(lhs, rhs, dims, out_dtype, implementation) == "xla"


def to_float_operand(side: QTensor | Dequantized | Array, dtype: str, keeps_outer: bool = False) -> Array:
    """Return an operand of a float matmul. Without ``keeps_outer``, the caller applies the outer scale."""
    if isinstance(side, Dequantized):
        return checkpoint_name(side.values, DEQUANTIZED_MARK)
    if not isinstance(side, QTensor):
        return side
    values = dequantize(side if keeps_outer else dataclasses.replace(side, outer_scale=None), dtype)
    return checkpoint_name(values, DEQUANTIZED_MARK)


def _unscaled(x: Any) -> QTensor:
    return QTensor(x, jnp.ones((1,) * x.ndim, jnp.float32))


def _one_row(product: Callable[..., Array], lhs: QTensor, rhs: QTensor, dims: Dimensions) -> Array:
    """Multiply a single row, with a row of zeros added below it unless the weight is small.

    GPUs and TPUs have no matmul for one row. Without the second row, XLA multiplies element by element, which takes up
    to 25 times as long (commit b55b3a5).
    """
    contract, free = dims.lhs_contract, dims.lhs_free
    is_one = not dims.lhs_batch and all(lhs.shape[axis] == 1 for axis in free)
    is_light = rhs.qvalue.dtype.itemsize > 1 or rhs.qvalue.size < SMALL
    if not is_one or is_light or not is_whole(lhs.qvalue):
        return product(lhs, rhs, dims)
    inner = Dimensions(tuple(range(1, 1 + len(contract))), dims.rhs_contract, (), (), 1 + len(contract), dims.rhs_ndim)

    def padded(x: Array, rhs: QTensor) -> Array:
        x = x.transpose((*free, *contract)).reshape(1, *(x.shape[axis] for axis in contract))
        x = jax.lax.optimization_barrier(jnp.pad(x, [(0, 1)] + [(0, 0)] * len(contract)))
        out = jax.lax.optimization_barrier(product(_unscaled(x), rhs, inner))[:1]
        return out.reshape((1,) * len(free) + out.shape[1:])

    plain = lambda x, rhs: product(_unscaled(x), rhs, dims)  # noqa: E731
    return jax.lax.platform_dependent(lhs.qvalue, rhs, cpu=plain, default=padded)


def _product(
    lhs: QTensor,
    rhs: QTensor,
    dims: Dimensions,
    *,
    out_dtype: str,
    accumulator: str,
    precision: Precision,
    out_sharding: NamedSharding | None,
    scale_dtype: str = "float32",
    parts_dtype: str = "float32",
    copies: bool = False,
    is_per_tensor: bool = True,
) -> Array:
    """Multiply qvalues, subtract the contribution of the zero points, and scale the result; see ``contract``."""
    is_scalar = is_per_tensor and lhs.full_scale().size == rhs.full_scale().size == 1
    lhs, rhs, dims, tiles = _split_tiles(lhs, rhs, dims, accumulator == "int32")
    place = _tiled_sharding(out_sharding, lhs.qvalue, dims, tiles)

    def dot(a: Array, b: Array) -> Array:
        a, b = _cast_alike(a, b)
        sizes = [a.shape[axis] for axis in (*dims.lhs_batch, *dims.lhs_free)] + [b.shape[i] for i in dims.rhs_free]
        more = {"precision": precision, "preferred_element_type": accumulator, "out_sharding": fit_sizes(place, sizes)}
        return byte_dot(a, b, dims, **more, copies=copies)

    out = dot(lhs.qvalue, rhs.qvalue)
    lhs_zero = None if lhs.zero_point is None else _along(lhs.zero_point, lhs.shape, dims.lhs_contract + dims.lhs_batch)
    rhs_zero = None if rhs.zero_point is None else _along(rhs.zero_point, rhs.shape, dims.rhs_contract + dims.rhs_batch)
    if rhs_zero is not None:
        out = out - dot(lhs.qvalue, rhs_zero)
    if lhs_zero is not None:
        out = out - dot(lhs_zero, rhs.qvalue)
    if lhs_zero is not None and rhs_zero is not None:
        out = out + dot(lhs_zero, rhs_zero)
    is_exact = out.dtype == jnp.int32
    if is_exact or (scale_dtype == "float32" and not (is_scalar and out.dtype == out_dtype)):
        out = out.astype(jnp.float32)
    out = _rescale(out, lhs, rhs, dims, scale_dtype, is_scalar)
    if is_exact and not tiles:  # an addition of the caller must not change the rounding
        return exact.hold(out) if out_dtype == "float32" else prevent_excess_precision(out.astype(out_dtype))
    if tiles:
        # ``sum`` would add in float32 for any dtype.
        out = jax.lax.reduce(out.astype(parts_dtype), np.zeros((), parts_dtype), jax.lax.add, tuple(range(tiles)))
        out = out if out_sharding is None else jax.sharding.reshard(out, fit_sizes(out_sharding, out.shape))
    return out.astype(out_dtype)


def _tiled_sharding(
    out_sharding: NamedSharding | None, lhs: Array, dims: Dimensions, tiles: int
) -> NamedSharding | None:
    """Prepend the sharding of the operand's leading tile axes to the sharding of a result.

    Each device multiplies its own tiles. Until the partial sums are added, no other axis of the result may therefore be
    sharded along the mesh axes of the tile axes.
    """
    operand = explicit_sharding(lhs)
    if out_sharding is None or operand is None or not tiles:
        return out_sharding
    entries = [operand.spec[axis] for axis in dims.lhs_batch[:tiles]]
    taken = set(_names(entries))
    rest = (entry if taken.isdisjoint(_names([entry])) else None for entry in out_sharding.spec)
    return NamedSharding(out_sharding.mesh, PartitionSpec(*entries, *rest))


def _names(entries: Sequence[Any]) -> list[str]:
    """Return the mesh axes in entries of a partition spec."""
    return [name for entry in entries if entry for name in (entry if isinstance(entry, tuple) else (entry,))]


def _cast_alike(a: Array, b: Array) -> tuple[Array, Array]:
    """Cast operands to a dtype that has a matmul: the wider dtype, int8 for int4 except on TPUs, e4m3 for e2m1.

    XLA:CPU fails on products of 4-bit operands (jax 0.10 and 0.12), and XLA:GPU widens them to 32 bits.
    """
    widths = [jax.dtypes.itemsize_bits(each.dtype) for each in (a, b)]
    if max(widths) > 8:
        wide = (a, b)[widths.index(max(widths))].dtype
        return a.astype(wide), b.astype(wide)
    is_native = a.dtype == b.dtype == jnp.int4 and platform_of(a) not in ("cpu", "gpu")
    return (a, b) if is_native else (to_eight_bits(a), to_eight_bits(b))


def _along(zero_point: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """Broadcast a zero point along contraction and batch axes; a free axis that shares one zero point keeps size 1."""
    target = [shape[axis] if axis in axes else size for axis, size in enumerate(zero_point.shape)]
    return jnp.broadcast_to(zero_point, target)


def _rescale(out: Array, lhs: QTensor, rhs: QTensor, dims: Dimensions, dtype: str, is_scalar: bool) -> Array:
    """Multiply a result by the scales of both operands, in the layout of the result."""
    lhs_scale, rhs_scale = lhs.full_scale(), rhs.full_scale()
    if is_scalar:
        # The product of scalars is rounded once; then the result is multiplied once.
        return out * (lhs_scale * rhs_scale.reshape(lhs_scale.shape)).reshape(()).astype(out.dtype)
    lhs_free, rhs_free = len(dims.lhs_free), len(dims.rhs_free)
    left = _as_result(_each_free(lhs_scale, lhs, dims.lhs_free), dims.lhs_batch, dims.lhs_free, (), (1,) * rhs_free)
    right = _as_result(_each_free(rhs_scale, rhs, dims.rhs_free), dims.rhs_batch, dims.rhs_free, (1,) * lhs_free, ())
    return out * reshard_like(left, out).astype(dtype) * reshard_like(right, out).astype(dtype)


def _each_free(scale: Array, tensor: QTensor, free: tuple[int, ...]) -> Array:
    """Repeat block scales along free axes, so that each element of the result has a scale."""
    for axis in free:
        if scale.shape[axis] not in (1, tensor.shape[axis]):
            scale = repeat_scale(scale, axis, tensor.shape[axis], tensor.blocks[axis])
    return scale


def _as_result(scale: Array, batch: tuple[int, ...], free: tuple[int, ...], before, after) -> Array:
    if scale.size == 1:
        return scale.reshape(())
    kept = (*batch, *free)
    contracted = tuple(axis for axis in range(scale.ndim) if axis not in kept)
    moved = scale.transpose(kept + contracted)
    sizes = moved.shape[: len(kept)]
    return moved.reshape((*sizes[: len(batch)], *before, *sizes[len(batch) :], *after))


def _split_tiles(
    lhs: QTensor, rhs: QTensor, dims: Dimensions, is_int32: bool
) -> tuple[QTensor, QTensor, Dimensions, int]:
    """Turn the tiles of each contraction axis into leading batch axes. Returns the number of these axes last.

    If the tiles of the operands differ, an axis is split into pieces that lie within one tile of each operand. Axes
    whose int32 sums could overflow are split too.
    """
    lhs_steps, rhs_steps = {}, {}
    for left, right in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        tiled = [t.blocks[a] for t, a in ((lhs, left), (rhs, right)) if t.scale.shape[a] > 1]
        if tiled:
            lhs_steps[left] = rhs_steps[right] = math.gcd(*tiled)
    size = lambda axis: lhs_steps.get(axis, lhs.shape[axis])  # noqa: E731
    limit = _longest_sum(lhs, rhs) if is_int32 else math.inf
    while (depth := math.prod(map(size, dims.lhs_contract))) > limit:
        left, right = max(zip(dims.lhs_contract, dims.rhs_contract, strict=True), key=lambda pair: size(pair[0]))
        count = -(-size(left) // max(1, int(limit) * size(left) // depth))
        is_fixed = left in lhs_steps or lhs.zero_point is not None or rhs.zero_point is not None
        if is_fixed or explicit_sharding(lhs.qvalue) or explicit_sharding(rhs.qvalue):
            # A piece must lie within one tile, zero points would turn padding into a contribution, and a sharded axis
            # cannot be padded.
            count = next(each for each in range(count, size(left) + 1) if size(left) % each == 0)
        lhs_steps[left] = rhs_steps[right] = -(-size(left) // count)
    if not lhs_steps:
        return lhs, rhs, dims, 0
    new_lhs, lhs_place, lhs_tiles = _tile_axes(lhs, lhs_steps)
    new_rhs, rhs_place, rhs_tiles = _tile_axes(rhs, rhs_steps)
    pairs = [(a, b) for a, b in zip(dims.lhs_contract, dims.rhs_contract, strict=True) if a in lhs_steps]
    new_dims = Dimensions(
        tuple(lhs_place[axis] for axis in dims.lhs_contract),
        tuple(rhs_place[axis] for axis in dims.rhs_contract),
        tuple(lhs_tiles[a] for a, _ in pairs) + tuple(lhs_place[axis] for axis in dims.lhs_batch),
        tuple(rhs_tiles[b] for _, b in pairs) + tuple(rhs_place[axis] for axis in dims.rhs_batch),
        new_lhs.ndim,
        new_rhs.ndim,
    )
    return new_lhs, new_rhs, new_dims, len(pairs)


def _longest_sum(lhs: QTensor, rhs: QTensor) -> int:
    """Return the largest contraction size whose int32 sums cannot overflow."""
    tops = [(int(jnp.iinfo(each.qvalue.dtype).max), each.zero_point is not None) for each in (lhs, rhs)]
    reaches = [2 * top + 1 if has_zero else top for top, has_zero in tops]
    return (2**31 - 1) // ((min(reaches) + 1) * max(reaches))  # one more, because a weight reaches ``-max - 1``


def _tile_axes(tensor: QTensor, steps: dict[int, int]) -> tuple[QTensor, dict[int, int], dict[int, int]]:
    """Split axes into pieces of ``steps`` elements. Returns the tensor, and the positions of old axes and of tile axes.

    A smaller last piece is padded with zeros, which do not change a sum of products.
    """
    place, tiles, position = {}, {}, 0
    for axis in range(tensor.ndim):
        if axis in steps:
            tiles[axis] = position
            position += 1
        place[axis] = position
        position += 1
    counts = {axis: -(-tensor.shape[axis] // step) for axis, step in steps.items()}

    def cut_scale(scale: Array) -> Array:
        shape: list[int] = []
        for axis, count in counts.items():
            if scale.shape[axis] not in (1, count):
                scale = repeat_scale(scale, axis, count, tensor.blocks[axis] // steps[axis])
        for axis, size in enumerate(scale.shape):
            shape += [size, 1] if axis in steps else [size]
        return scale.reshape(shape)

    block: list[int] = []
    for axis, size in enumerate(tensor.blocks):
        block += [1, steps[axis]] if axis in steps else [size]
    parts = tensor.replace(
        lambda name, part: split_axes(pad_blocks(part, steps), counts) if name == "qvalue" else cut_scale(part)
    )
    return dataclasses.replace(parts, block=tuple(block)), place, tiles
