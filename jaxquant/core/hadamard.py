"""hadamard: rotations of a contraction, which spread outliers: ``(x·R)·(w·R)ᵀ = x·wᵀ``, with R = diag(signs)·H/√n."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxquant.core.blocks import pad_blocks
from jaxquant.core.float_dot import float_dot
from jaxquant.core.recipe import Rotation
from jaxquant.core.rounding import RandomKey, noise
from jaxquant.core.sharding import merge_axes, split_axes, whole_axis

Array = jax.Array
SCOPE = "hadamard"
"""Name scope of the product that rotates, which is no layer's matmul."""
_FIXED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's signs."""


def rotated_axis(sizes: tuple[int, ...], run: int) -> int:
    """Choose which of several contraction axes is rotated: the last that holds a run, else the last of the longest.

    Of tokens and of features the last axis is the one that meshes seldom cut.
    """
    return max(range(len(sizes)), key=lambda axis: (min(sizes[axis], run), axis))


def draw_signs(rotation: Rotation, key: RandomKey | None) -> Array:
    """Return the signs of a rotation, float32 of its size.

    Args:
      rotation: which.
      key: random key, where the signs are fresh.
    """
    if rotation.signs == "fixed":
        return jnp.tile(jnp.array(_FIXED, jnp.float32), rotation.size // len(_FIXED))
    assert key is not None
    return jnp.where(noise(key, (rotation.size,)) < 0.5, 1.0, -1.0)


def rotate(x: Array, axis: int, signs: Array) -> Array:
    """Rotate each run of ``len(signs)`` neighbours along an axis, which zeros fill up to a multiple of that.

    Of an axis that is shorter, the runs have the least power of two that holds it. A rotation is a product with a
    matrix of ±1, which chips compute at the speed of memory; the sums are float32, scaled and rounded once to x's
    dtype.

    Args:
      x: the tensor, any float dtype.
      axis: along which.
      signs: from ``draw_signs``; a power of two of them.
    """
    if not x.shape[axis]:
        return x
    size = min(signs.shape[0], 1 << (x.shape[axis] - 1).bit_length())
    padded = pad_blocks(x, {axis: size})
    runs = whole_axis(split_axes(padded, {axis: padded.shape[axis] // size}), axis + 1)
    with jax.named_scope(SCOPE):
        matrix = (signs[:size, None] * _hadamard(size)).astype(x.dtype)
        numbers = (((axis + 1,), (0,)), ((), ()))
        out = float_dot(runs, matrix, numbers, precision="highest", preferred_element_type="float32")
        out = jnp.moveaxis((out * size**-0.5).astype(x.dtype), -1, axis + 1)
    return merge_axes(out, padded)


def rotation_of(rotation: Rotation | None, key: RandomKey | None) -> Callable[..., Array]:
    """Return the function of an operand and an axis that rotates, the operands of one matmul by the same signs.

    Args:
      rotation: which; None leaves operands as they are.
      key: random key, where the signs are fresh.
    """
    if rotation is None:
        return lambda x, *axes: x
    signs = draw_signs(rotation, key)
    return lambda x, axis: rotate(x, axis, signs)


def _hadamard(size: int) -> Array:
    """Return Sylvester's matrix: −1 where the row and the column have an odd number of ones in common."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return 1.0 - 2.0 * (jax.lax.population_count(row & column) & 1).astype(jnp.float32)
