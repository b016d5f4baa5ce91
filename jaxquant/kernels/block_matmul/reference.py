"""Reference of ``matmul``, ``grouped`` and ``grouped_drhs``: sums of 128 products, each scaled and then added."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxquant.kernels import KERNEL_PREFIX

NAME = f"{KERNEL_PREFIX}block_matmul"
"""Prefix of the kernels' names, in traced and in compiled programs."""
BLOCK = 128
"""Number of elements that share a scale along the contraction; rows of a group's tile; columns of a weight's block."""


def matmul(
    lhs: Shaped[Array, "B M K"],
    rhs: Shaped[Array, "B N K"],
    lhs_scale: Float[Array, "B M T"],
    rhs_scale: Float[Array, "B columns T"],
    *,
    out_dtype: str,
) -> Float[Array, "B M N"]:
    """Compute ``out[b, m, n] = Σₜ lhs_scale[b, m, t] · rhs_scale[b, n, t] · Σₖ lhs[b, m, k] · rhs[b, n, k]``.

    The inner sum runs over the elements k of tile t. The sum of a tile's products, the product of its scales, and the
    sum of the tiles in their order are float32.

    Args:
      lhs, rhs: operands, each float8_e4m3fn or float8_e5m2; K = T · 128.
      lhs_scale: scale of each row and tile.
      rhs_scale: scale of each column and tile, or of each 128 columns (``columns`` = ⌈N / 128⌉).
      out_dtype: dtype of the result.
    """
    sides = []
    for x, scale in ((lhs, lhs_scale), (rhs, repeat_per_row(rhs_scale, rhs.shape[1]))):
        tiles = x.astype(jnp.float32).reshape(*x.shape[:2], -1, BLOCK)
        sides.append((jnp.moveaxis(tiles, 2, 0), jnp.moveaxis(scale.astype(jnp.float32), 2, 0)))

    def add(total: Array, tile: tuple[tuple[Array, Array], tuple[Array, Array]]) -> tuple[Array, None]:
        (a, left), (b, right) = tile
        part = jnp.einsum("bmk,bnk->bmn", a, b, precision=jax.lax.Precision.HIGHEST)
        return total + part * (left[:, :, None] * right[:, None, :]), None

    zero = jnp.zeros_like(lhs_scale[:, :, :1] * jnp.zeros((rhs.shape[1],), jnp.float32))
    return jax.lax.scan(add, zero, tuple(sides))[0].astype(out_dtype)


def repeat_per_row(scale: Float[Array, "B columns T"], size: int) -> Float[Array, "B size T"]:
    """Repeat the scales of blocks for each of ``size`` rows, unless each row has a scale."""
    return scale if scale.shape[1] == size else jnp.repeat(scale, BLOCK, axis=1)[:, :size]


def grouped(
    lhs: Shaped[Array, "M K"],
    rhs: Shaped[Array, "G N K"],
    lhs_scale: Float[Array, "M T"],
    rhs_scale: Float[Array, "G columns T"],
    groups: Int[Array, " tiles"],
    *,
    out_dtype: str,
) -> Float[Array, "M N"]:
    """Compute ``matmul`` of each tile of 128 rows with the rhs of its group.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, out_dtype: arguments of ``matmul``; M = tiles · 128.
      groups: group of each tile of rows, or -1 for a tile without a group, whose results are zero.
    """
    own = jnp.maximum(groups, 0)
    rows = (each.reshape(-1, BLOCK, each.shape[1]) for each in (lhs, lhs_scale))
    a, left = rows
    out = matmul(a, rhs[own], left, rhs_scale[own], out_dtype=out_dtype)
    return jnp.where((groups < 0)[:, None, None], jnp.zeros_like(out), out).reshape(lhs.shape[0], rhs.shape[1])


def grouped_drhs(
    lhs: Shaped[Array, "M K"],
    rhs: Shaped[Array, "N K"],
    lhs_scale: Float[Array, "M T"],
    rhs_scale: Float[Array, "N T"],
    starts: Int[Array, " G+1"],
    *,
    out_dtype: str,
) -> Float[Array, "G M N"]:
    """Compute ``matmul`` over the tiles of each group: ``starts[g] ≤ t < starts[g + 1]``.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, out_dtype: arguments of ``matmul``; the K axis of each group has whole tiles.
      starts: index of the first tile of each group, followed by the end of the last group.
    """
    tiles = jnp.arange(lhs_scale.shape[1])
    is_own = (tiles >= starts[:-1, None]) & (tiles < starts[1:, None])

    def one(own: Array) -> Array:
        left, right = (jnp.where(own, scale, 0.0)[None] for scale in (lhs_scale, rhs_scale))
        mask = jnp.repeat(own, BLOCK)
        a, b = (jnp.where(mask, x, jnp.zeros_like(x))[None] for x in (lhs, rhs))
        return matmul(a, b, left, right, out_dtype=out_dtype)[0]

    return jax.lax.map(one, is_own)
