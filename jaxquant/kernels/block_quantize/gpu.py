"""``block_quantize`` on Hopper: one read of x writes elements, scales and values of every block shape (Mosaic GPU).

A program casts a strip of tiles. While it casts one tile, TMA loads the next tile and stores results. Blocks along the
rows of x are cast from its transposed view in shared memory, and their results are transposed in memory: a matmul that
contracts these rows reads them in this layout.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.rounding import saturating_cast_in_kernel
from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.block_quantize.reference import Blocks, Cast, kernel_name, stored_scale
from jaxquant.kernels.block_quantize.tuning import ROWS, STRIP, TILE

_REGISTERS, _ACROSS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
_MAGNITUDE = 0x7FFFFFFF
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_NOT_FINITE = 255


def block_quantize(x: Float[Array, "M N"], casts: tuple[Cast, ...], *, interpret: bool = False) -> tuple[Blocks, ...]:
    """Compute ``reference.block_quantize`` of matrices of whole tiles. The scale of a block with NaN is NaN.

    Args:
      x, casts: arguments of the reference.
      interpret: whether to run without a GPU.
    """
    M, N = x.shape
    shapes, rings = [], {}
    for cast in casts:
        sizes = (N, M) if is_transposed(cast) else (M, N)
        size = _block_size(cast)
        if cast.has_elements:
            shapes.append((sizes, cast.spec.dtype))
            rings[cast.spec.dtype, size] = None
            counts = (sizes[0] // TILE, sizes[1] // TILE) if _is_square(cast) else (sizes[1] // size, sizes[0])
            shapes.append((counts, jnp.float32))
        if cast.has_values:
            shapes.append((sizes, jnp.bfloat16))
            rings["bfloat16", size] = None
    places = {key: n for n, key in enumerate(rings)}
    steps = math.gcd(N // TILE, STRIP)
    out = mosaic_gpu.call(
        functools.partial(_kernel, casts=casts, places=places, steps=steps),
        (x,),
        shapes,
        scratch_types=[_ring(*each) for each in rings],
        grid=(M // TILE, N // TILE // steps),
        grid_names=("rows", "strip"),
        # Only square blocks need this memory (for the amax of a tile). Without it, a multiprocessor runs two programs.
        reduction_bytes=mosaic_gpu.REDUCTION_BYTES if any(map(_is_square, casts)) else 0,
        interpret=interpret,
        kernel_name=kernel_name(casts),
    )
    made = iter(out)
    return tuple(_results(cast, made) for cast in casts)


def is_transposed(cast: Cast) -> bool:
    """Check whether the results of a cast are transposed in memory."""
    return cast.block[1] == 1 or (cast.is_transposed and _is_square(cast))


def _is_square(cast: Cast) -> bool:
    return 1 not in cast.block


def _block_size(cast: Cast) -> int:
    """Return the number of neighbours along the contraction that share a scale."""
    return max(cast.block)


def _ring(dtype: str, size: int) -> Any:
    """Return shared memory for the results of two half tiles; its columns are as wide as a block."""
    layout = mosaic_gpu.swizzled(ROWS, size, jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((2, TILE // size, ROWS, size), jnp.dtype(dtype), **layout)


def _results(cast: Cast, made: Any) -> Blocks:
    """Return the results of a cast, with scales in the shape and dtype of a ``QTensor``."""
    transpose = (lambda x: x.T) if is_transposed(cast) else (lambda x: x)
    tensor = None
    if cast.has_elements:
        q, scale = transpose(next(made)), next(made)
        scale = transpose(scale if _is_square(cast) else scale.T)
        tensor = QTensor(q, stored_scale(scale, cast.spec))
    return Blocks(tensor, transpose(next(made)) if cast.has_values else None)


def _kernel(x_ref: Any, *refs: Any, casts: tuple[Cast, ...], places: dict[tuple[str, int], int], steps: int) -> None:
    out_refs, rings = refs[: -len(places)], refs[-len(places) :]
    i, j = lax.axis_index("rows"), lax.axis_index("strip")
    copies = [(cast.has_elements + cast.has_values) * TILE // _block_size(cast) for cast in casts]

    def step(indices: tuple[Any], x_tile: Any) -> None:
        place = (i, j * steps + indices[0])
        left, found = iter(out_refs), {}
        for n, cast in enumerate(casts):
            outs = [next(left) for _ in range(2 * cast.has_elements + cast.has_values)]
            key = cast.spec, cast.floor
            if _is_square(cast) and key not in found:
                found[key] = _scale(_tile_amax(x_tile), cast)
            whole = found[key] if _is_square(cast) else None
            for half in range(2):
                # Wait until this half of the rings is free: only copies from the other half may be pending.
                plgpu.wait_smem_to_gmem(copies[n if half else n - 1], wait_read_only=True)
                own = {dtype: rings[at].at[half] for (dtype, size), at in places.items() if size == _block_size(cast)}
                _cast(x_tile, half, cast, whole, place, outs, own)

    slots = 2 if x_ref.dtype.itemsize == 2 else 1
    layout = mosaic_gpu.swizzled(TILE, TILE, x_ref.dtype.itemsize)
    plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=[plgpu.BlockSpec((TILE, TILE), lambda k: (i, j * steps + k), **layout)],
        max_concurrent_steps=slots,
    )(x_ref)
    plgpu.wait_smem_to_gmem(0)


def _load_half(x_tile: Any, half: int, is_transposed: bool) -> Array:
    """Load half of a tile, or half of its transpose, in float32."""
    part = slice(half * ROWS, (half + 1) * ROWS)
    if not is_transposed:
        return mosaic_gpu.load(x_tile.at[part], _REGISTERS).astype(jnp.float32)
    x = mosaic_gpu.load(mosaic_gpu.transposed(x_tile.at[:, part]), _ACROSS)
    return plgpu.layout_cast(x, _REGISTERS).astype(jnp.float32)


def _row_amax(x: Array) -> Array:
    """Return the largest magnitude of each row as an integer; in this order NaN is the largest."""
    return jnp.max(lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE, axis=1)


def _tile_amax(x_tile: Any) -> Array:
    halves = [_row_amax(_load_half(x_tile, half, False)) for half in range(2)]
    return jnp.max(jnp.maximum(*halves), axis=0)


def _scale(largest: Array, cast: Cast) -> Array:
    """Return float32 scales like ``core.scales.scale_of_amax``, or NaN for non-finite values if scales are e8m0."""
    bound = element(cast.spec.dtype).bound
    exact = lax.bitcast_convert_type(largest, jnp.float32) * (1 / bound)
    if cast.spec.scale_rounding == "exact":
        return jnp.where(exact < cast.floor, 1.0, exact)
    mantissa, exponent = math.frexp(bound)
    of_bound = int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))
    power = (largest >> _MANTISSA_BITS) - (exponent - 1) + jnp.where((largest & _MANTISSA) > of_bound, 1, 0)
    bits = jnp.maximum(power, 1) << _MANTISSA_BITS
    infinity = _NOT_FINITE << _MANTISSA_BITS
    none = infinity + (cast.spec.scale_dtype == "float8_e8m0fnu")
    scale = lax.bitcast_convert_type(jnp.where(largest < infinity, bits, none), jnp.float32)
    return jnp.where(exact < cast.floor, 1.0, scale)


def _cast(
    x_tile: Any, half: int, cast: Cast, whole: Array | None, place: tuple[Any, Any], outs: list[Any], rings: Any
) -> None:
    """Cast half of a tile, and start the copies of its elements with their scales, of its values, or of both.

    Args:
      x_tile: tile.
      half: half of its rows, or of its columns if the cast is transposed.
      cast: cast of the tile.
      whole: scale of the tile, or None if each row or each part of a row has its own scale.
      place: row and column of the tile in the matrix of tiles.
      outs: results in global memory.
      rings: staging buffers in shared memory, by dtype.
    """
    size, (row, column) = _block_size(cast), place[::-1] if is_transposed(cast) else place
    x = _load_half(x_tile, half, is_transposed(cast))
    rows, made = pl.ds(row * TILE + half * ROWS, ROWS), []
    for n in range(TILE // size):
        piece = x[:, n * size : (n + 1) * size]
        scale = _scale(_row_amax(piece), cast) if whole is None else whole
        if cast.has_elements:
            at = (column * (TILE // size) + n, rows) if whole is None else (row, column)
            outs[1][at] = scale
        spread = lax.broadcast_in_dim(scale, piece.shape, [0] if whole is None else [])
        q = saturating_cast_in_kernel(piece / spread, element(cast.spec.dtype))
        if cast.has_elements:
            rings[cast.spec.dtype].at[n][...] = q
            made.append((rings[cast.spec.dtype].at[n], outs[0], n))
        if cast.has_values:
            rings["bfloat16"].at[n][...] = (q.astype(jnp.float32) * spread).astype(jnp.bfloat16)
            made.append((rings["bfloat16"].at[n], outs[-1], n))
    plgpu.commit_smem()
    for source, out, n in made:
        plgpu.copy_smem_to_gmem(source, out.at[rows, pl.ds(column * TILE + n * size, size)])
