"""Hadamard rotations of a contraction, which spread outliers: ``(x·R)·(w·R)ᵀ = x·wᵀ``, with R = diag(signs)·H/√n."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxquant.core.blocks import pad_blocks
from jaxquant.core.float_dot import float_dot
from jaxquant.core.recipe import Rotation
from jaxquant.core.rounding import RandomKey, noise
from jaxquant.core.sharding import gather_axis, merge_axes, split_axes

Array = jax.Array
SCOPE = "hadamard"
"""Name scope of the matmul that rotates, to distinguish it from a layer's matmul."""
_FIXED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's signs."""


def rotated_axis(sizes: tuple[int, ...], run: int) -> int:
    """Select the contraction axis to rotate: the last axis with at least ``run`` elements, or else the longest axis.

    The last axis is preferred because meshes seldom shard the last token axis or the last feature axis.
    """
    return max(range(len(sizes)), key=lambda axis: (min(sizes[axis], run), axis))


def draw_signs(rotation: Rotation, key: RandomKey | None) -> Array:
    """Return the signs of a rotation, a float32 array of its size.

    Args:
      rotation: rotation.
      key: random key, needed for fresh signs.
    """
    if rotation.signs == "fixed":
        return jnp.tile(jnp.array(_FIXED, jnp.float32), rotation.size // len(_FIXED))
    assert key is not None
    return jnp.where(noise(key, (rotation.size,)) < 0.5, 1.0, -1.0)


def rotate(x: Array, axis: int, signs: Array) -> Array:
    """Rotate each run of ``len(signs)`` neighbours along an axis; the axis is padded with zeros.

    For a shorter axis, the run is the smallest power of two that holds the axis. A rotation is a product with a matrix
    of ±1, which is bound by memory bandwidth; the sums are float32, and are scaled and rounded once to x's dtype.

    Args:
      x: tensor of any float dtype.
      axis: axis to rotate.
      signs: result of ``draw_signs``; the length must be a power of two.
    """
    if not x.shape[axis]:
        return x
    size = min(signs.shape[0], 1 << (x.shape[axis] - 1).bit_length())
    padded = pad_blocks(x, {axis: size})
    runs = gather_axis(split_axes(padded, {axis: padded.shape[axis] // size}), axis + 1)
    with jax.named_scope(SCOPE):
        matrix = (signs[:size, None] * _hadamard(size)).astype(x.dtype)
        numbers = (((axis + 1,), (0,)), ((), ()))
        out = float_dot(runs, matrix, numbers, precision="highest", preferred_element_type="float32")
        out = jnp.moveaxis((out * size**-0.5).astype(x.dtype), -1, axis + 1)
    return merge_axes(out, padded)


def make_rotation(rotation: Rotation | None, key: RandomKey | None) -> Callable[..., Array]:
    """Return a function of (operand, axis) that rotates all operands of a matmul by the same signs.

    Args:
      rotation: rotation, or None to return operands unchanged.
      key: random key, needed for fresh signs.
    """
    if rotation is None:
        return lambda x, *axes: x
    signs = draw_signs(rotation, key)
    return lambda x, axis: rotate(x, axis, signs)


def _hadamard(size: int) -> Array:
    """Return Sylvester's matrix: −1 if row and column index have an odd number of one bits in common."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return 1.0 - 2.0 * (jax.lax.population_count(row & column) & 1).astype(jnp.float32)
