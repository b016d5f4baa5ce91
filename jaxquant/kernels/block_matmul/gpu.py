"""``matmul`` and its grouped forms on Hopper: wgmma on tiles loaded by TMA, scaled and added in registers.

A program has one warpgroup that loads and up to three that multiply; it loops over the tiles of the result. The tensor
cores add the 128 products of a block in fewer bits than float32. Each block sum is then multiplied by both scales and
added to the result in float32. If the last tile would be incomplete, it begins earlier: it overlaps the previous tile
and writes the same values there.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from jaxquant.kernels import mosaic_gpu
from jaxquant.kernels.block_matmul.reference import BLOCK, NAME
from jaxquant.kernels.block_matmul.tuning import COLUMNS, PART, ROWS, STEPS, SWIZZLED, Tile, grouped_tile, tile_for

Mode = Literal["dense", "grouped", "grouped_drhs"]
_REGISTERS = plgpu.Layout.WGMMA


def matmul(
    lhs: Shaped[Array, "B M K"],
    rhs: Shaped[Array, "B N K"],
    lhs_scale: Float[Array, "B M T"],
    rhs_scale: Float[Array, "B columns T"],
    *,
    out_dtype: str,
    interpret: bool = False,
    tile: Tile | None = None,
) -> Float[Array, "B M N"]:
    """Compute ``reference.matmul``.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, out_dtype: arguments of the reference.
      interpret: whether to run without a GPU.
      tile: tile of the result, or None to choose one (``tuning``).
    """
    depth = jnp.array([lhs.shape[2] // BLOCK], jnp.int32)
    return _run_padded("dense", lhs, rhs, lhs_scale, rhs_scale, depth, tile, out_dtype=out_dtype, interpret=interpret)


def grouped(
    lhs: Shaped[Array, "M K"],
    rhs: Shaped[Array, "G N K"],
    lhs_scale: Float[Array, "M T"],
    rhs_scale: Float[Array, "G columns T"],
    groups: Int[Array, " tiles"],
    *,
    out_dtype: str,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """Compute ``reference.grouped``.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, groups, out_dtype: arguments of the reference.
      interpret: whether to run without a GPU.
    """
    N = rhs.shape[1]
    out = _call(
        "grouped",
        lhs[None],
        _pad_rows(rhs, N + -N % COLUMNS),
        lhs_scale.T[None],
        _rhs_scales(rhs_scale, N),
        groups,
        tile=grouped_tile(N),
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out[0, :, :N]


def grouped_drhs(
    lhs: Shaped[Array, "M K"],
    rhs: Shaped[Array, "N K"],
    lhs_scale: Float[Array, "M T"],
    rhs_scale: Float[Array, "N T"],
    starts: Int[Array, " G+1"],
    *,
    out_dtype: str,
    interpret: bool = False,
) -> Float[Array, "G M N"]:
    """Compute ``reference.grouped_drhs``.

    Args:
      lhs, rhs, lhs_scale, rhs_scale, starts, out_dtype: arguments of the reference.
      interpret: whether to run without a GPU.
    """
    sides = lhs[None], rhs[None], lhs_scale[None], rhs_scale[None]
    return _run_padded("grouped_drhs", *sides, starts, None, out_dtype=out_dtype, interpret=interpret)


def _run_padded(
    mode: Mode, lhs: Array, rhs: Array, left: Array, right: Array, ids: Array, tile: Tile | None, **options: Any
) -> Array:
    """Run the kernel on operands padded with zeros to whole tiles, and remove the padding of the result."""
    M, N = lhs.shape[1], rhs.shape[1]
    tile = tile or tile_for(M)
    rows = max(tile.rows, M + -M % SWIZZLED)
    a, b, left = _pad_rows(lhs, rows), _pad_rows(rhs, N + -N % COLUMNS), _pad_rows(left, rows).swapaxes(1, 2)
    return _call(mode, a, b, left, _rhs_scales(right, N), ids, tile=tile, **options)[:, :M, :N]


def _pad_rows(x: Array, size: int) -> Array:
    """Pad the second axis with zeros."""
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0))) if size > x.shape[1] else x


def _rhs_scales(scale: Array, columns: int) -> Array:
    """Return the scales of rhs in the kernel's layout: [B, columns / 128, T] for blocks, otherwise [B, T, columns]."""
    if scale.shape[1] == columns and columns > 1:
        return _pad_rows(scale, columns + -columns % COLUMNS).swapaxes(1, 2)
    return scale


class _Plan(NamedTuple):
    """Static parameters of a product.

    Attributes:
      mode: form of the product.
      tile: tile of the result.
      parts: number of matrices in the result.
      M, N, K: rows, columns and depth of one matrix; K covers all groups if the groups split the depth.
      per_column: whether rhs has a scale for each column, rather than for each block.
      multicast: whether the programs of a cluster share loads, which the interpreter does not support.
    """

    mode: Mode
    tile: Tile
    parts: int
    M: int
    N: int
    K: int
    per_column: bool
    multicast: bool

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles along each axis of a matrix; the tiles of a cluster (along one axis) count as one tile."""
        counts = [math.ceil(self.M / self.tile.rows), self.N // COLUMNS]
        axis = 1 if self.mode == "grouped" else 0
        counts[axis] = math.ceil(counts[axis] / self.tile.cluster)
        return counts[0], counts[1]


def _call(
    mode: Mode,
    lhs: Array,
    rhs: Array,
    left: Array,
    right: Array,
    ids: Array,
    *,
    tile: Tile,
    out_dtype: str,
    interpret: bool,
) -> Array:
    """Run the kernel on operands of whole tiles; see ``_blocks_of`` for the meaning of ``ids`` in each mode."""
    (B, M, K), N = lhs.shape, rhs.shape[1]
    operands = lhs, rhs, left.astype(jnp.float32), right.astype(jnp.float32), ids
    parts = ids.shape[0] - 1 if mode == "grouped_drhs" else B
    per_column = right.shape[1:] == (K // BLOCK, N)
    plan = _Plan(mode, tile, parts, M, N, K, per_column, multicast=tile.cluster > 1 and not interpret)
    layout = mosaic_gpu.swizzled(ROWS, PART, jnp.dtype(out_dtype).itemsize)
    cluster = {"cluster": (tile.cluster,), "cluster_names": ("cluster",)} if tile.cluster > 1 else {}
    (out,) = mosaic_gpu.call(
        functools.partial(_kernel, plan=plan),
        operands,
        [((parts, M, N), out_dtype)],
        scratch_types=[plgpu.SMEM((tile.warpgroups, 2, ROWS, PART), jnp.dtype(out_dtype), **layout)],
        grid=(min(mosaic_gpu.count_multiprocessors() // tile.cluster, parts * math.prod(plan.tiles)),),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name=NAME if mode == "dense" else f"{NAME}_{mode}",
        **cluster,
    )
    return out


def _kernel(
    lhs_ref: Any, rhs_ref: Any, left_ref: Any, right_ref: Any, ids_ref: Any, out_ref: Any, staged: Any, *, plan: _Plan
) -> None:
    warpgroup = lax.axis_index("warpgroup")
    ignore = lambda *_: None  # noqa: E731

    def operands(source: Any, group: Any, row: Any, column: Any) -> list[Any]:
        rows, columns = pl.ds(row, plan.tile.rows), pl.ds(column, COLUMNS)
        found = [lhs_ref.at[source, rows, :], rhs_ref.at[group, columns, :], left_ref.at[source, :, rows]]
        return [*found, right_ref.at[group, :, columns]] if plan.per_column else found

    def scope(allocations: Any) -> None:
        @plgpu.nd_loop((plan.parts * math.prod(plan.tiles),), collective_axes="program")
        def _(loop: Any) -> None:
            part, row, block = _tile_at(plan, loop.index[0])
            start, column = jnp.minimum(row * plan.tile.rows, plan.M - plan.tile.rows), block * COLUMNS
            source, group, first, count = _blocks_of(plan, ids_ref, part, row)

            def add(index: Any, lhs_tile: Any, rhs_tile: Any, left_tile: Any, *rest: Any) -> Any:
                scale = None if plan.per_column else right_ref[group, block, first + index[0]]
                return _add(warpgroup, lhs_tile, rhs_tile, left_tile, rest[0] if scale is None else scale, rest[-1])

            def compute(run: Any) -> None:
                zeros = plgpu.layout_cast(jnp.zeros((ROWS, PART), jnp.float32), _REGISTERS)
                total = run((zeros,) * (COLUMNS // PART))
                _write(total, staged.at[warpgroup], out_ref.at[part], start + warpgroup * ROWS, column)

            found = operands(source, group, start, column)
            _pipeline(plan, add, compute, first, count)(*found, allocations=allocations)

    whole = _pipeline(plan, ignore, ignore, 0, plan.K // BLOCK)
    pl.run_scoped(scope, whole.get_allocations(*operands(0, 0, 0, 0)), collective_axes="warpgroup")
    plgpu.wait_smem_to_gmem(0)


def _pipeline(plan: _Plan, body: Any, context: Any, first: Any, count: Any) -> Any:
    """Return a pipeline that loads tiles and their scales, from block ``first`` of the depth, and calls ``body``."""
    sides = (plan.tile.rows, BLOCK), (COLUMNS, BLOCK)
    shared = sides[0 if plan.mode == "grouped" else 1] if plan.multicast else None
    specs = []
    for side in sides:
        more: dict[str, Any] = mosaic_gpu.swizzled(*side, 1)
        if side is shared:
            more["collective_axes"] = ("cluster",)
        specs.append(plgpu.BlockSpec(side, lambda k: (0, first + k), **more))
    scales = [plgpu.BlockSpec((1, rows), lambda k: (first + k, 0)) for rows, _ in sides[: 1 + plan.per_column]]
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(count,),
        memory_registers=mosaic_gpu.MEMORY_REGISTERS[plan.tile.warpgroups],
        in_specs=specs + scales,
        max_concurrent_steps=min(STEPS, plan.K // BLOCK),
        wg_axis="warpgroup",
        num_compute_wgs=plan.tile.warpgroups,
        compute_context=context,
    )


def _tile_at(plan: _Plan, place: Any) -> tuple[Any, Any, Any]:
    """Return the indices (matrix, tile row, tile column) of the result tile that is computed at step ``place``."""
    size = jnp.int32(math.prod(plan.tiles))
    part, place = (lax.div(place, size), lax.rem(place, size)) if plan.parts > 1 else (0, place)
    row, block = plgpu.planar_snake(place, plan.tiles, 1, 8)
    if plan.tile.cluster == 1:
        return part, row, block
    other = lax.axis_index("cluster")
    if plan.mode == "grouped":
        return part, row, jnp.minimum(block * plan.tile.cluster + other, plan.N // COLUMNS - 1)
    return part, row * plan.tile.cluster + other, block


def _blocks_of(plan: _Plan, ids_ref: Any, part: Any, row: Any) -> tuple[Any, Any, Any, Any]:
    """Return the indices of a tile's lhs and rhs matrices, its first block along the depth, and its number of blocks.

    ``ids_ref`` holds the number of blocks in dense mode, ``groups`` in grouped mode, and ``starts`` in grouped_drhs
    mode. The number of blocks is never a constant: the compiler would unroll loops and need too many registers.
    """
    if plan.mode == "dense":
        return part, part, 0, ids_ref[0]
    if plan.mode == "grouped":
        return 0, jnp.maximum(ids_ref[row], 0), 0, jnp.where(ids_ref[row] < 0, 0, plan.K // BLOCK)
    return 0, 0, ids_ref[part], ids_ref[part + 1] - ids_ref[part]


def _add(warpgroup: Any, lhs_tile: Any, rhs_tile: Any, left_tile: Any, right: Any, total: Any) -> Any:
    """Add the scaled product of a block to the sums; ``right`` holds one scale for rhs, or a scale for each column."""
    rows = pl.ds(warpgroup * ROWS, ROWS)

    def product(sums: Any) -> Array:
        plgpu.wgmma(sums, lhs_tile.at[rows], mosaic_gpu.transposed(rhs_tile))
        plgpu.wgmma_wait(0)
        return sums[...]

    left = mosaic_gpu.load(left_tile.at[0, rows], _REGISTERS.reduce(1), is_optimized=False)
    left = left * right if right.ndim == 0 else left
    found = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))
    sums = []
    for n, each in enumerate(total):
        scale = lax.broadcast_in_dim(left, each.shape, [0])
        if right.ndim:
            part = right.at[0, pl.ds(n * PART, PART)]
            columns = mosaic_gpu.load(part, _REGISTERS.reduce(0), is_optimized=False)
            scale = scale * lax.broadcast_in_dim(columns, each.shape, [1])
        sums.append(each + found[:, n * PART : (n + 1) * PART] * scale)
    plgpu.commit_smem()  # all threads must read their scales before TMA overwrites them
    return tuple(sums)


def _write(parts: tuple[Array, ...], staged: Any, out_ref: Any, row: Any, column: Any) -> None:
    """Store a tile part by part: while one part is written to shared memory, TMA stores the previous part."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for n, part in enumerate(parts):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        staged.at[n % 2][...] = part.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[n % 2], out_ref.at[pl.ds(row, ROWS), pl.ds(column + n * PART, PART)])
