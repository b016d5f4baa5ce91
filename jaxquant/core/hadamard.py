"""hadamard: rotations of a contraction, which spread outliers: ``(x·R)·(w·R)ᵀ = x·wᵀ``, with R = diag(signs)·H/√n."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxquant.core.blocks import pad_blocks
from jaxquant.core.recipe import Rotation
from jaxquant.core.sharding import merge_axes, split_axes, whole_axis

Array = jax.Array
_FIXED = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""TransformerEngine's signs."""


def rotated_axis(sizes: tuple[int, ...], run: int) -> int:
    """Choose which of several contraction axes is rotated: the last that holds a run, else the last of the longest.

    Of tokens and of features the last axis is the one that meshes seldom cut.
    """
    return max(range(len(sizes)), key=lambda axis: (min(sizes[axis], run), axis))


def draw_signs(rotation: Rotation, key: Array | None) -> Array:
    """Return the signs of a rotation, float32 of its size.

    Args:
      rotation: which.
      key: random key, where the signs are fresh.
    """
    if rotation.signs == "fixed":
        return jnp.tile(jnp.array(_FIXED, jnp.float32), rotation.size // len(_FIXED))
    assert key is not None
    return jnp.where(jax.random.bits(key, (rotation.size,), jnp.uint32) >> 31 == 0, 1.0, -1.0)


def rotate(x: Array, axis: int, signs: Array) -> Array:
    """Rotate each run of ``len(signs)`` neighbours along an axis, which zeros fill up to a multiple of that.

    Of an axis that is shorter, the runs have the least power of two that holds it. Computed in float32 by additions
    alone (the fast Walsh-Hadamard transform), rounded once to x's dtype.

    Args:
      x: the tensor, any float dtype.
      axis: along which.
      signs: from ``draw_signs``; a power of two of them.
    """
    if not x.shape[axis]:
        return x
    size = min(signs.shape[0], 1 << (x.shape[axis] - 1).bit_length())
    padded = pad_blocks(x, {axis: size})
    place = axis + 1
    runs = whole_axis(split_axes(padded, {axis: padded.shape[axis] // size}), place).astype(jnp.float32)
    runs = runs * signs[:size].reshape([size if i == place else 1 for i in range(runs.ndim)])
    half = 1
    while half < size:
        shape = runs.shape
        pairs = runs.reshape(*shape[:place], size // (2 * half), 2, half, *shape[place + 1 :])
        first, second = (jax.lax.index_in_dim(pairs, i, place + 1, keepdims=False) for i in (0, 1))
        runs = jnp.stack([first + second, first - second], place + 1).reshape(shape)
        half *= 2
    return merge_axes((runs * size**-0.5).astype(x.dtype), padded)
