"""Structure: the steps between a parameter and its contraction that move elements and change none.

A step is known by what it does to a float array, so that it can be done to a quantized one and its scales
(``on_kernel``), and undone (``inverse``), which is how a weight that was quantized as its op reads it gets back into
the layout of its leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.core.blocks import scale_shape
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.ops.gradients import REVERSE_ONLY

Array = jax.Array
Shape = tuple[int, ...]


class BlocksError(ValueError):
    """A step cuts or mixes blocks that share a scale."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """Change the float dtype."""

    dtype: str

    def on_array(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def on_kernel(self, kernel: ConvertedKernel) -> ConvertedKernel:
        return dataclasses.replace(kernel, dtype=self.dtype)

    def inverse(self) -> Cast | None:
        return None

    def sources(self, axis: int) -> tuple[int, ...]:
        return (axis,)

    def of_slice(self, source: int, axis: int) -> Cast:
        return self

    def lifted(self, length: int) -> Cast:
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose:
    """Permute the axes."""

    order: tuple[int, ...]

    def on_array(self, x: Array) -> Array:
        return x.transpose(self.order)

    def on_kernel(self, kernel: ConvertedKernel) -> ConvertedKernel:
        block = full_block(kernel.tensor)
        block = None if block is None else tuple(block[axis] for axis in self.order)
        return _change(kernel, lambda part: part.transpose(self.order), block)

    def inverse(self) -> Transpose:
        return Transpose(tuple(map(int, np.argsort(self.order))))

    def sources(self, axis: int) -> tuple[int, ...]:
        """Return the axes that become an axis of the result."""
        return (self.order[axis],)

    def of_slice(self, source: int, axis: int) -> Transpose:
        """Return the step on an array of size 1 along ``source``, which becomes ``axis``."""
        return self

    def lifted(self, length: int) -> Transpose:
        return Transpose((0, *(axis + 1 for axis in self.order)))


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape:
    """Merge and split axes, and add and drop those of size 1."""

    old: Shape
    new: Shape

    def on_array(self, x: Array) -> Array:
        return x.reshape(self.new)

    def on_kernel(self, kernel: ConvertedKernel) -> ConvertedKernel:
        """Reshape a kernel and its scales.

        Raises:
          BlocksError: a scale would belong to elements that are no block of the new shape.
        """
        block = full_block(kernel.tensor)
        new_block = None if block is None else self._block(tuple(max(1, size) for size in block))

        def change(part: Array) -> Array:
            if part.shape == self.old:
                return part.reshape(self.new)
            blocks = kernel.tensor.blocks if part.shape == kernel.tensor.scale.shape else _even(self.old, part.shape)
            return part.reshape(scale_shape(self.new, self._block(blocks)))

        return _change(kernel, change, new_block)

    def _block(self, block: Shape) -> Shape:
        """Return the blocks of the new shape, each the same elements as one of the old."""
        found: list[int] = []
        for old, new in _groups(self.old, self.new):
            sizes, blocks = [self.old[axis] for axis in old], [block[axis] for axis in old]
            targets = [self.new[axis] for axis in new]
            whole = [axis for axis, size in enumerate(targets) if size != 1]
            kept = [(size, one) for size, one in zip(sizes, blocks, strict=True) if size != 1]
            if len(kept) == len(whole) == 1:  # the same axis, among some of size 1
                found += [kept[0][1] if axis in whole else 1 for axis in range(len(targets))]
            else:
                found += _lay(_neighbours(sizes, blocks), targets)
        return tuple(found)

    def inverse(self) -> Reshape:
        return Reshape(self.new, self.old)

    def sources(self, axis: int) -> tuple[int, ...]:
        if self.old[: axis + 1] == self.new[: axis + 1]:
            return (axis,)
        old = next(old for old, new in _groups(self.old, self.new) if axis in new)
        return tuple(each for each in old if self.old[each] != 1)

    def of_slice(self, source: int, axis: int) -> Reshape:
        old, new = list(self.old), list(self.new)
        old[source] = new[axis] = 1
        return Reshape(tuple(old), tuple(new))

    def lifted(self, length: int) -> Reshape:
        return Reshape((length, *self.old), (length, *self.new))


Step = Cast | Transpose | Reshape
IDENTITIES = frozenset(
    {"copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "reshard", "mesh_cast", "pvary", "pcast"}
    | {REVERSE_ONLY}
)
"""Primitives of one operand that change neither elements nor axes."""


def steps_of(eqn: Any) -> tuple[Step, ...] | None:
    """Return what an equation of one operand does to it; None where that is more than structure."""
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.invars) != 1 or len(eqn.outvars) != 1 or not hasattr(eqn.invars[0].aval, "shape"):
        return None
    old, out = tuple(eqn.invars[0].aval.shape), eqn.outvars[0].aval
    if name in IDENTITIES:
        return ()
    if name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating):
        return (Cast(jnp.dtype(out.dtype).name),)
    if name == "transpose":
        return (Transpose(tuple(params["permutation"])),)
    if name in ("squeeze", "expand_dims") or (name == "reshape" and params.get("dimensions") is None):
        return (Reshape(old, tuple(out.shape)),)
    if name == "broadcast_in_dim" and math.prod(old) == math.prod(out.shape):
        return (Reshape(old, tuple(out.shape)),)
    return None


def dtype_read(steps: Sequence[Step], dtype: str) -> str:
    """Return the name of the dtype of what the steps make of a leaf of a dtype."""
    return [dtype, *(step.dtype for step in steps if isinstance(step, Cast))][-1]


def sources_of(steps: Sequence[Step], axis: int) -> set[int]:
    """Return the axes of a leaf that become an axis of what the steps make of it."""
    axes = {axis}
    for step in reversed(steps):
        axes = {source for each in axes for source in step.sources(each)}
    return axes


def sliced(steps: Sequence[Step], axis: int) -> tuple[tuple[Step, ...], int]:
    """Return the steps on one slice of a leaf, and the axis of the leaf, of size 1, that becomes ``axis``.

    Args:
      steps: on the whole leaf.
      axis: of what the steps make of it.

    Raises:
      BlocksError: a step makes that axis of several.
    """
    found: list[Step] = []
    for step in reversed(steps):
        sources = step.sources(axis)
        if len(sources) != 1:
            raise BlocksError(f"axis {axis} is made of {len(sources)} axes")
        found.append(step.of_slice(sources[0], axis))
        axis = sources[0]
    return tuple(reversed(found)), axis


def full_block(tensor: QTensor) -> Shape | None:
    """Return a tensor's block with one entry an axis, 0 along axes of stacked layers; None where shapes tell it."""
    if tensor.block is None:
        return None
    block, gone = list(tensor.block), len(tensor.block) - tensor.ndim
    for _ in range(gone):
        block.remove(0)
    return (0,) * -gone + tuple(block)


def _change(kernel: ConvertedKernel, change: Any, block: Shape | None) -> ConvertedKernel:
    """Apply a function to every part; an input scale of one element has no axes to move."""
    tensor = dataclasses.replace(kernel.tensor.replace(lambda _, part: change(part)), block=block)
    scale = kernel.input_scale
    if scale is not None and scale.ndim == kernel.ndim and scale.size > 1:
        scale = change(scale)
    elif scale is not None:
        scale = scale.reshape((1,) * tensor.ndim)
    return ConvertedKernel(tensor, kernel.dtype, scale)


def _even(shape: Shape, counts: Shape) -> Shape:
    return tuple(max(1, size // n) for size, n in zip(shape, counts, strict=True))


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Part the axes of two shapes into the smallest groups of equal size, in order."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        while True:
            if a == b and (left or right):
                break
            if (a <= b and i < len(old)) or j == len(new):
                left.append(i)
                a, i = a * old[i], i + 1
            else:
                right.append(j)
                b, j = b * new[j], j + 1
        groups.append((left, right))
    return groups


def _neighbours(sizes: Sequence[int], blocks: Sequence[int]) -> int:
    """Count the elements of a block of some axes, where these are neighbours in the order of the elements."""
    count, is_whole = 1, True
    for size, block in reversed(list(zip(sizes, blocks, strict=True))):
        if block > 1 and (not is_whole or size % block):
            raise BlocksError(f"scales of blocks {tuple(blocks)} of axes {tuple(sizes)} fit no merged axis")
        count, is_whole = count * block, is_whole and block == size
    return count


def _lay(count: int, sizes: Sequence[int]) -> list[int]:
    """Lay ``count`` neighbours along axes, the last one first."""
    blocks: list[int] = []
    for size in reversed(sizes):
        block = math.gcd(count, size)
        if block not in (count, size):
            raise BlocksError(f"scales of {count} neighbours fit no blocks of axes {tuple(sizes)}")
        blocks.append(block)
        count //= block
    return blocks[::-1]
