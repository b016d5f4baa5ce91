"""Blocks: neighbours of a tensor that share a scale, and arithmetic between a tensor and the scales of its blocks.

A tensor of shape (n₁, …) with blocks of shape (b₁, …) has scales of shape (⌈n₁ / b₁⌉, …): the last block of an axis can
be smaller and has its own scale. ``b = n`` shares one scale along an axis, ``b = 1`` has one scale for each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp

from jaxquant.core.recipe import TensorSpec
from jaxquant.core.sharding import all_reduce, explicit_sharding, merge_axes, platform_of, reshard_like, split_axes

Array = jax.Array
Shape = tuple[int, ...]


def block_shape(
    shape: Shape, spec: TensorSpec, axes: Sequence[int], shards: int = 1, batch: Sequence[int] = ()
) -> Shape:
    """Compute the shape of the blocks that share a scale.

    Args:
      shape: shape of the tensor.
      spec: granularity and sizes.
      axes: contraction axes, the fastest-varying axis last.
      shards: number of blocks of the first contraction axis that are quantized separately.
      batch: batch axes, along which blocks have size 1 unless one scale covers the complete tensor.

    Raises:
      ValueError: the number of shards, or the tile size with ``tiling`` "each_axis", does not divide its axis.
    """
    if spec.calibration.method == "fixed":  # one scale per tensor
        return tuple(shape)
    block = [size if spec.granularity == "per_tensor" or axis in axes else 1 for axis, size in enumerate(shape)]
    if spec.tile_size is not None and spec.tiling == "each_axis":
        for axis in axes:
            if shape[axis] % spec.tile_size:
                raise ValueError(
                    f"tile_size {spec.tile_size} does not divide contraction axis {axis} of size {shape[axis]} "
                    f"(shape {shape}); use a divisor of {shape[axis]}, or -1 for no tiles"
                )
            block[axis] = spec.tile_size
    elif spec.tile_size is not None:
        _fill_axes(block, shape, axes, spec.tile_size)
    if spec.free_size is not None:
        free = [axis for axis in range(len(shape)) if axis not in axes and axis not in batch]
        _fill_axes(block, shape, free, spec.free_size)
    if shards > 1 and axes:
        first = axes[0]
        if shape[first] % shards:
            raise ValueError(
                f"quantization_local_shard_count {shards} does not divide contraction axis {first} of size "
                f"{shape[first]} (shape {shape}); use a divisor of {shape[first]}, or 0 for a float weight gradient"
            )
        block[first] = math.gcd(block[first], shape[first] // shards)
    return tuple(block)


def _fill_axes(block: list[int], shape: Shape, axes: Sequence[int], size: int) -> None:
    """Set the block sizes of axes so that a block has ``size`` neighbours, which fill the last axis first."""
    for axis in reversed(axes):
        block[axis] = max(1, min(size, shape[axis]))
        size = size // block[axis] if block[axis] == shape[axis] else 1


def scale_shape(shape: Shape, block: Shape) -> Shape:
    """Return the number of blocks along each axis; an empty axis that shares a scale has one block."""
    return tuple(1 if step >= size else -(-size // step) for size, step in zip(shape, block, strict=True))


def is_even(shape: Shape, block: Shape) -> bool:
    """Return whether the block shape can be inferred from the tensor and scale shapes."""
    counts = scale_shape(shape, block)
    return all(n == 1 or size == n * step for size, n, step in zip(shape, counts, block, strict=True))


def reduce_blocks(
    x: Array, block: Shape, reduction: Callable[..., Array], collective=None, except_axes: Collection[str] = ()
) -> Array:
    """Reduce each block of x to one element.

    Args:
      x: tensor; a block that is smaller than the others is padded with zeros.
      block: shape of a block.
      reduction: reduction such as ``jnp.max``.
      collective: collective such as ``jax.lax.pmax``, to reduce also over the devices that hold other parts of x.
      except_axes: mesh axes along which each device has a separate tensor.
    """
    counts = scale_shape(x.shape, block)
    tiled = {axis: n for axis, n in enumerate(counts) if n not in (1, x.shape[axis])}
    padded = pad_blocks(x, {axis: block[axis] for axis in tiled})
    axes: list[int] = []
    position = 0
    for axis, n in enumerate(counts):
        position += axis in tiled
        if (n == 1 and x.shape[axis] != 0) or axis in tiled:
            axes.append(position)
        position += 1
    split, is_grouped = _split(padded, tiled)
    if is_grouped:
        rows = split.ndim - 4
        axes = [axis for axis in axes if axis < rows] + [rows, rows + 2] * (rows in axes) + [rows + 3]
    statistic = reduction(split, axis=tuple(axes), keepdims=True) if x.size else jnp.zeros(counts, x.dtype)
    statistic = (_ungroup_rows(statistic) if is_grouped and x.size else statistic).reshape(counts)
    return statistic if collective is None else all_reduce(collective, statistic, x, except_axes)


def pad_blocks(x: Array, steps: dict[int, int]) -> Array:
    """Append zeros along axes until the size of each axis is a multiple of its step."""
    missing = [-x.shape[axis] % steps.get(axis, 1) for axis in range(x.ndim)]
    return jnp.pad(x, [(0, n) for n in missing]) if any(missing) else x


def repeat_scale(scale: Array, axis: int, size: int, step: int) -> Array:
    """Repeat the scales along an axis, so that each element of the axis has its scale."""
    return jax.lax.slice_in_dim(jnp.repeat(scale, step, axis=axis), 0, size, axis=axis)


def apply_blocks(operation: Callable[..., Array], x: Array, scale: Array, block: Shape | None = None) -> Array:
    """Compute ``operation(x, scale)`` elementwise, each element with the scale of its block.

    Args:
      operation: elementwise function such as ``jnp.multiply``.
      x: tensor.
      scale: scales, of x's rank.
      block: shape of a block, or None if it can be inferred from the shapes.
    """
    counts = {axis: n for axis, (size, n) in enumerate(zip(x.shape, scale.shape, strict=True)) if n not in (1, size)}
    if not counts:
        return operation(x, scale)
    steps = {axis: -(-x.shape[axis] // n) if block is None else block[axis] for axis, n in counts.items()}
    padded = pad_blocks(x, steps)
    expanded: list[int] = []
    for axis, n in enumerate(scale.shape):
        expanded += [n, 1] if axis in counts else [n]
    split, is_grouped = _split(padded, counts)
    scale = scale.reshape(expanded)
    result = operation(split, _group_rows(scale) if is_grouped else reshard_like(scale, split))
    result = merge_axes(_ungroup_rows(result) if is_grouped else result, padded)
    return result if padded is x else jax.lax.slice(result, (0,) * x.ndim, x.shape)


# -- on TPUs, whose vectors have 8 rows of 128 elements, blocks are split so that XLA fuses the operations on them -----
# Otherwise XLA writes every broadcast scale to memory in float32, and reads a tensor three times for its amaxes.


def _split(x: Array, counts: dict[int, int]) -> tuple[Array, bool]:
    """Split axes into blocks and elements. Also returns whether rows were moved by ``_group_rows`` (only on TPUs)."""
    split = split_axes(x, counts)
    if not counts or platform_of(x) != "tpu" or explicit_sharding(x) is not None:
        return split, False
    is_grouped = x.ndim > 1 and x.ndim - 1 in counts and split.shape[-1] == 128 and split.shape[-3] % 8 == 0
    return jax.lax.optimization_barrier(_group_rows(split) if is_grouped else split), is_grouped


def _group_rows(x: Array) -> Array:
    """Move groups of eight rows inside the blocks: (…, r, n, 128) → (…, r / 8, n, 8, 128)."""
    *outer, rows, count, inner = x.shape
    part = 1 if rows == 1 else 8
    return x.reshape(*outer, rows // part, part, count, inner).swapaxes(-3, -2)


def _ungroup_rows(x: Array) -> Array:
    """Undo ``_group_rows``."""
    *outer, eights, count, part, inner = x.shape
    return x.swapaxes(-3, -2).reshape(*outer, eights * part, count, inner)


# -- blocks of a tensor whose axes are merged or split -----------------------------------------------------------------


class BlocksError(ValueError):
    """Raised when a change of shape would split or merge blocks that share a scale."""


def reshape_blocks(old: Shape, new: Shape, block: Shape) -> Shape:
    """Return the block shape after a reshape; each block holds the same elements as before.

    Args:
      old, new: shapes of the tensor before and after.
      block: shape of a block before.

    Raises:
      BlocksError: a block of the old shape is not a block of the new shape.
    """
    found: list[int] = []
    for before, after in axis_groups(old, new):
        sizes, blocks, targets = [old[i] for i in before], [block[i] for i in before], [new[i] for i in after]
        axes = [axis for axis, size in enumerate(targets) if size != 1]
        long_blocks = [one for size, one in zip(sizes, blocks, strict=True) if size != 1]
        if len(long_blocks) == len(axes) == 1:  # the same axis, apart from axes of size 1
            found += [long_blocks[0] if axis in axes else 1 for axis in range(len(targets))]
        else:
            found += _split_block(_contiguous_size(sizes, blocks), targets)
    return tuple(found)


def axis_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Divide the axes of two shapes, in order, into the smallest groups of equal size."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        while a != b or not (left or right):
            if (a <= b and i < len(old)) or j == len(new):
                left.append(i)
                a, i = a * old[i], i + 1
            else:
                right.append(j)
                b, j = b * new[j], j + 1
        groups.append((left, right))
    return groups


def _contiguous_size(sizes: Sequence[int], blocks: Sequence[int]) -> int:
    """Return the number of elements in a block along some axes, or raise if these elements are not contiguous."""
    count, is_whole = 1, True
    for size, block in reversed(list(zip(sizes, blocks, strict=True))):
        if block > 1 and (not is_whole or size % block):
            raise BlocksError(f"axes {tuple(sizes)} in blocks of {tuple(blocks)} cannot be merged into one axis")
        count, is_whole = count * block, is_whole and block == size
    return count


def _split_block(count: int, sizes: Sequence[int]) -> list[int]:
    """Split a block of ``count`` neighbours over axes, from the last axis to the first."""
    blocks: list[int] = []
    for size in reversed(sizes):
        block = math.gcd(count, size)
        if block not in (count, size):
            raise BlocksError(f"blocks of {count} neighbours cannot be split over axes of sizes {tuple(sizes)}")
        blocks.append(block)
        count //= block
    return blocks[::-1]
