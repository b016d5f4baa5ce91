"""``quantize`` on Hopper: one read of x writes q, its transposed copy and the amax (Mosaic GPU).

A program casts a strip of tiles. While it casts one tile, TMA loads the next tile and stores the previous tile. The
transposed copy is read from the quantized tile in shared memory, so each element is divided only once.
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

from jaxquant.core.dtypes import Element, element
from jaxquant.core.rounding import saturating_cast_in_kernel
from jaxquant.kernels import DTYPES, mosaic_gpu
from jaxquant.kernels.platforms import MAX_GRID_BLOCKS
from jaxquant.kernels.quantize.reference import MAGNITUDE, NAME, Quantized

TILE_M, TILE_N = 64, 128
STEPS = 8
"""Largest number of tiles of a strip."""
_REGISTERS = plgpu.Layout.WGMMA
# One element per register, so that a byte can be read along columns and written along rows.
_BYTES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (8, 4), (1,))), warp_dims=(-9,), lane_dims=(-3, -2), vector_dim=-1
)


def refusal(
    shape: tuple[int, ...],
    x_dtype: str,
    *,
    dtype: str,
    compute_dtype: str = "float32",
    capability: tuple[int, int],
    interpret: bool = False,
) -> str | None:
    """Return the reason why the kernel cannot run a call, or None if it can.

    Args:
      shape, x_dtype: shape and dtype of x.
      dtype, compute_dtype, interpret: arguments of ``quantize``.
      capability: compute capability of the device; see ``platforms.capability_of``.
    """
    if len(shape) != 2 or shape[0] % TILE_M or shape[1] % TILE_N or 0 in shape:
        return f"the quantize kernel needs tiles of {TILE_M}×{TILE_N}, which do not divide {'×'.join(map(str, shape))}"
    if shape[0] // TILE_M > MAX_GRID_BLOCKS:
        return f"the quantize kernel supports at most {MAX_GRID_BLOCKS * TILE_M:,} rows, not {shape[0]:,}"
    for name, known in ((x_dtype, ("float32", "bfloat16")), (compute_dtype, ("float32", "bfloat16")), (dtype, DTYPES)):
        if name not in known:
            return f"the quantize kernel supports the dtypes {' and '.join(known)}, not {name}"
    return mosaic_gpu.device_refusal(capability, 9, 10, interpret)


def quantize(
    x: Float[Array, "M N"],
    scale: Float[Array, "1 1"],
    *,
    dtype: str,
    transposed: bool = False,
    compute_dtype: str = "float32",
    interpret: bool = False,
) -> Quantized:
    """Compute ``reference.quantize``; ``refusal`` must return None. The amax is NaN if x has a NaN.

    Args:
      x, scale, dtype, transposed, compute_dtype: arguments of the reference.
      interpret: whether to run without a GPU.
    """
    M, N = x.shape
    steps = math.gcd(N // TILE_N, STEPS)
    strips = N // TILE_N // steps
    kernel = functools.partial(_kernel, steps=steps, transposed=transposed, kind=element(dtype), compute=compute_dtype)
    # jax 0.10 cannot read the transpose of swizzled memory.
    layout = mosaic_gpu.swizzled(TILE_M, TILE_N, 1) if mosaic_gpu.HAS_JAX_0_11 or not transposed else {}
    tiles = [plgpu.SMEM((2, TILE_M, TILE_N), jnp.dtype(dtype), **layout)]
    if transposed:
        tiles.append(plgpu.SMEM((2, TILE_N, TILE_M), jnp.dtype(dtype), **mosaic_gpu.swizzled(TILE_N, TILE_M, 1)))
    q, *q_t, amax = mosaic_gpu.call(
        kernel,
        (x, scale.astype(compute_dtype).astype(jnp.float32).reshape(-1)),
        [((M, N), dtype), *([((N, M), dtype)] * transposed), ((strips, M), jnp.int32)],
        scratch_types=tiles,
        grid=(M // TILE_M, strips),
        grid_names=("rows", "strip"),
        interpret=interpret,
        kernel_name=NAME,
    )
    return Quantized(q, q_t[0] if transposed else None, lax.bitcast_convert_type(jnp.max(amax), jnp.float32))


def _kernel(x_ref: Any, scale_ref: Any, *refs: Any, steps: int, transposed: bool, **cast: Any) -> None:
    """Quantize a strip, and write the largest magnitude of each of its rows as an integer."""
    *out_refs, amax_ref = refs[: transposed + 2]
    tiles = refs[transposed + 2 :]
    i, j = lax.axis_index("rows"), lax.axis_index("strip")

    def step(indices: tuple[Any], x_tile: Any, amax: Array) -> Array:
        column = j * steps + indices[0]
        start = (i * TILE_M, column * TILE_N)
        slot = lax.rem(indices[0], 2)
        x = mosaic_gpu.load(x_tile, _REGISTERS).astype(jnp.float32)
        magnitude = lax.bitcast_convert_type(x, jnp.int32) & MAGNITUDE
        q = _cast(x, scale_ref, **cast)
        plgpu.wait_smem_to_gmem(len(tiles), wait_read_only=True)  # the tile of two steps ago is stored
        tiles[0].at[slot][...] = q
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tiles[0].at[slot], out_refs[0].at[pl.ds(start[0], TILE_M), pl.ds(start[1], TILE_N)])
        if transposed:
            across = mosaic_gpu.load(mosaic_gpu.transposed(tiles[0].at[slot]), _BYTES, is_optimized=False)
            mosaic_gpu.store(tiles[1].at[slot], across, is_optimized=False)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tiles[1].at[slot], out_refs[1].at[pl.ds(start[1], TILE_N), pl.ds(start[0], TILE_M)])
        return jnp.maximum(amax, jnp.max(magnitude, axis=1))

    layout = mosaic_gpu.swizzled(TILE_M, TILE_N, x_ref.dtype.itemsize)
    amax_ref[j, pl.ds(i * TILE_M, TILE_M)] = plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=[plgpu.BlockSpec((TILE_M, TILE_N), lambda k: (i, j * steps + k), **layout)],
        max_concurrent_steps=2,
        init_carry=plgpu.layout_cast(jnp.zeros((TILE_M,), jnp.int32), _REGISTERS.reduce(1)),
    )(x_ref)
    plgpu.wait_smem_to_gmem(0)


def _cast(x: Array, scale_ref: Any, *, kind: Element, compute: str) -> Array:
    """Cast a tile as ``core.rounding`` does.

    Args:
      x: tile in float32.
      scale_ref: scale in global memory.
      kind: element type of the result.
      compute: dtype of the division.
    """
    # The float32 quotient of bfloat16 numbers, rounded to bfloat16, is their bfloat16 quotient.
    x = (x.astype(compute).astype(jnp.float32) / scale_ref[0]).astype(compute).astype(jnp.float32)
    return saturating_cast_in_kernel(x, kind)
