"""``matmul`` on Hopper: wgmma on tiles loaded by TMA, scales in the epilogue (Mosaic GPU).

A program has one warpgroup that loads and two that multiply; it loops over the tiles of the result. The tensor cores
compute the sums, for float8 in fewer bits than float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped

from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.fp8_einsum.reference import NAME, sum_dtype

WARPGROUPS = 2
"""Number of multiplying warpgroups, each for half of a tile's columns."""
TILE_M, TILE_K = 128, 128
TILES_N = (128, 64)
"""Possible numbers of columns of one warpgroup; the first one that divides the matrix is used."""
EPILOGUE = 64
"""Number of rows and of columns that are stored at once."""
_REGISTERS = plgpu.Layout.WGMMA


def refusal(
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    lhs_dtype: str,
    rhs_dtype: str,
    *,
    out_dtype: str,
    accumulator: str,
    capability: tuple[int, int],
    interpret: bool = False,
) -> str | None:
    """Return the reason why the kernel cannot run a call, or None if it can.

    Args:
      lhs, rhs: shapes [B, M, K] and [B, N, K].
      lhs_dtype, rhs_dtype: dtypes of the operands.
      out_dtype, accumulator, interpret: arguments of ``matmul``.
      capability: compute capability of the device; see ``platforms.capability_of``.
    """
    sizes = lhs[1], rhs[1], lhs[2]
    tile = TILE_M, WARPGROUPS * TILES_N[-1], TILE_K
    if 0 in sizes or lhs[0] == 0 or any(size % step for size, step in zip(sizes, tile, strict=True)):
        names = "×".join(map(str, tile)), "×".join(map(str, sizes))
        return f"the fp8_einsum kernel needs tiles of {names[0]} (M×N×K), which do not divide {names[1]}"
    kinds = sorted((lhs_dtype, rhs_dtype))
    if kinds != ["int8", "int8"] and not all(kind in ("float8_e4m3fn", "float8_e5m2") for kind in kinds):
        return f"the fp8_einsum kernel multiplies two int8 or two fp8 arrays, not {lhs_dtype} and {rhs_dtype}"
    if (accumulator != "int32") if kinds[0] == "int8" else (accumulator not in ("float32", "bfloat16")):
        return f"the fp8_einsum kernel does not sum {lhs_dtype} in {accumulator}"
    if out_dtype not in ("float32", "bfloat16"):
        return f"the fp8_einsum kernel writes float32 and bfloat16, not {out_dtype}"
    if kinds[0] != kinds[1] and not mosaic_gpu.HAS_JAX_0_11:
        return f"fp8_einsum of {lhs_dtype} with {rhs_dtype} needs jax 0.11 or newer, but this is jax {jax.__version__}"
    return mosaic_gpu.device_refusal(capability, 9, 9, interpret)


def matmul(
    lhs: Shaped[Array, "B M K"],
    rhs: Shaped[Array, "B N K"],
    scale: Float[Array, 1] | None = None,
    *,
    left: Float[Array, "B M 1"] | None = None,
    right: Float[Array, "B 1 N"] | None = None,
    out_dtype: str,
    accumulator: str = "float32",
    interpret: bool = False,
) -> Float[Array, "B M N"]:
    """Compute ``reference.matmul`` of K-major operands; ``refusal`` must return None.

    Args:
      lhs, rhs, scale, left, right, out_dtype, accumulator: arguments of the reference.
      interpret: whether to run without a GPU.
    """
    (B, M, _), N = lhs.shape, rhs.shape[1]
    tile_n = next(size for size in TILES_N if N % (WARPGROUPS * size) == 0)
    if scale is None:
        assert left is not None
        assert right is not None
        scales = [left.reshape(B, M), right.reshape(B, N)]
    else:
        # The product of two bfloat16 numbers is exact in float32.
        scales = [scale.astype(out_dtype if accumulator == out_dtype else "float32").astype(jnp.float32)]
    out_tile = mosaic_gpu.swizzled(EPILOGUE, EPILOGUE, jnp.dtype(out_dtype).itemsize)
    (out,) = mosaic_gpu.call(
        functools.partial(_kernel, tile_n=tile_n, total=sum_dtype(lhs.dtype.name), accumulator=accumulator),
        (lhs, rhs, *scales),
        [((B, M, N), out_dtype)],
        scratch_types=[plgpu.SMEM((WARPGROUPS, 2, EPILOGUE, EPILOGUE), jnp.dtype(out_dtype), **out_tile)],
        grid=(min(mosaic_gpu.count_multiprocessors(), B * (M // TILE_M) * (N // tile_n // WARPGROUPS)),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name=NAME,
    )
    return out


def _kernel(lhs_ref: Any, rhs_ref: Any, *refs: Any, tile_n: int, total: str, accumulator: str) -> None:
    *scale_refs, out_ref, staged = refs
    B, M, K = lhs_ref.shape
    N = rhs_ref.shape[1]
    shape = M // TILE_M, N // tile_n // WARPGROUPS
    warpgroup = lax.axis_index("warpgroup")
    ignore = lambda *_: None  # noqa: E731

    def pipeline(body: Any, context: Any) -> Any:
        sides = (TILE_M, TILE_K), (WARPGROUPS * tile_n, TILE_K)
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(K // TILE_K,),
            memory_registers=mosaic_gpu.MEMORY_REGISTERS[WARPGROUPS],
            in_specs=[plgpu.BlockSpec(side, lambda k: (0, k), **mosaic_gpu.swizzled(*side, 1)) for side in sides],
            max_concurrent_steps=min(4 if out_ref.dtype.itemsize == 2 else 3, K // TILE_K),
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS,
            compute_context=context,
        )

    def scope(allocations: Any) -> None:
        @plgpu.nd_loop((B * math.prod(shape),), collective_axes="program")
        def _(loop: Any) -> None:
            (place,) = loop.index
            batch = lax.div(place, jnp.int32(math.prod(shape)))
            row, column = plgpu.planar_snake(lax.rem(place, jnp.int32(math.prod(shape))), shape, 1, 8)
            rows = pl.ds(row * TILE_M, TILE_M)
            columns = pl.ds(column * tile_n * WARPGROUPS, tile_n * WARPGROUPS)
            own = column * tile_n * WARPGROUPS + warpgroup * tile_n

            def multiply(_: Any, lhs_tile: Any, rhs_tile: Any, sums: Any) -> Any:
                plgpu.wgmma(sums, lhs_tile, mosaic_gpu.transposed(rhs_tile.at[pl.ds(warpgroup * tile_n, tile_n)]))
                plgpu.wgmma_wait(0)
                return sums

            def compute(run: Any) -> None:
                def on(sums: Any) -> None:
                    run(sums)
                    value = sums[...].astype(accumulator).astype(jnp.float32)
                    value = _rescaled(value, scale_refs, batch, row * TILE_M, own).astype(out_ref.dtype)
                    _write(value, staged.at[warpgroup], out_ref.at[batch], row * TILE_M, own)

                pl.run_scoped(on, plgpu.WGMMAAccumulatorRef((TILE_M, tile_n), jnp.dtype(total)))

            pipeline(multiply, compute)(
                lhs_ref.at[batch, rows, :], rhs_ref.at[batch, columns, :], allocations=allocations
            )

    allocations = pipeline(ignore, ignore).get_allocations(lhs_ref.at[0], rhs_ref.at[0])
    pl.run_scoped(scope, allocations, collective_axes="warpgroup")
    plgpu.wait_smem_to_gmem(0)


def _rescaled(value: Array, scale_refs: Any, batch: Any, row: Any, column: Any) -> Array:
    """Multiply a tile by the single scale, or by the scales of its rows and then of its columns."""
    if len(scale_refs) == 1:
        return value * scale_refs[0][0]
    for axis, (ref, start) in enumerate(zip(scale_refs, (row, column), strict=True)):
        part = ref.at[batch, pl.ds(start, value.shape[axis])]
        scales = mosaic_gpu.load(part, _REGISTERS.reduce(1 - axis), is_optimized=False)
        value = value * lax.broadcast_in_dim(scales, value.shape, [axis])
    return value


def _write(value: Array, staged: Any, out_ref: Any, row: Any, column: Any) -> None:
    """Store a tile part by part: while one part is written to shared memory, TMA stores the previous part."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    parts = itertools.product(*(range(0, size, EPILOGUE) for size in value.shape))
    for n, (i, j) in enumerate(parts):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staged.at[n % 2][...] = value[i : i + EPILOGUE, j : j + EPILOGUE]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[n % 2], out_ref.at[pl.ds(row + i, EPILOGUE), pl.ds(column + j, EPILOGUE)])
