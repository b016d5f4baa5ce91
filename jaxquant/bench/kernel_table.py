"""Hand-written TPU kernels, compiled without a TPU, next to XLA's own program for the same result.

A kernel's cycles are the bundles of its final schedule, each multiplied by its number of executions. If XLA's program
is one matmul, the table has its cycles, too, next to the compiler's ``estimated_cycles``. Bundle counts do not include
waits for HBM; the last column has the cycles that the bytes take at full bandwidth.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxquant.aot.chips import Chip, chip
from jaxquant.aot.program import read_program
from jaxquant.aot.topology import devices
from jaxquant.bench.schedules import Schedule, read_schedule
from jaxquant.config.recipes import RECIPES
from jaxquant.core.scales import SMALLEST_SCALE
from jaxquant.kernels.block_quantize import reference as cast_reference
from jaxquant.kernels.block_quantize import tpu as cast_tpu
from jaxquant.kernels.block_quantize import tuning as cast_tuning
from jaxquant.kernels.block_quantize.reference import Cast
from jaxquant.kernels.fp8_einsum import reference as matmul_reference
from jaxquant.kernels.fp8_einsum import tpu as matmul_tpu
from jaxquant.kernels.fp8_einsum import tuning as matmul_tuning
from jaxquant.kernels.quantize import reference as quantize_reference
from jaxquant.kernels.quantize import tpu as quantize_tpu
from jaxquant.kernels.quantize import tuning as quantize_tuning

Row = dict[str, Any]
Program = Callable[..., Any]

PRODUCTS = ((4096, 4096, 8192), (8192, 8192, 8192))
"""Sizes (M, N, K) of the matmuls."""
CAST = (4096, 8192)
"""Rows and columns of the quantized matrix."""
DTYPES = ("int8", "float8_e4m3fn")
XLA_MATMUL = "fusion"
"""XLA's name for the program of a matmul with a scale."""


class Compiler:
    """Compiler for one chip, with a folder of its dumps; each program replaces the dumps of the previous program.

    Args:
      target: name of the chip.
      folder: folder of the dumps, set in the environment of this process (``schedules.dump_environment``).
    """

    def __init__(self, target: str, folder: Path) -> None:
        self.chip: Chip = chip(target)
        self.folder = folder
        self._where = SingleDeviceSharding(devices(self.chip)[0])

    def shape(self, sizes: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
        """Return an abstract array on the chip."""
        return jax.ShapeDtypeStruct(tuple(sizes), dtype, sharding=self._where)

    def compile(self, program: Program, *shapes: jax.ShapeDtypeStruct) -> float:
        """Compile a program and return the compiler's cycle estimate, or 0 if there is no estimate.

        Args:
          program: function of the arrays.
          shapes: shapes of its arguments.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        text = jax.jit(program).lower(*shapes).compile().as_text()
        assert text is not None
        return sum(read_program(text).cycles)

    def hbm_cycles(self, size: float) -> float:
        """Return the cycles that moving ``size`` bytes takes with one device's share of the HBM bandwidth."""
        return size / (self.chip.bandwidth / self.chip.devices) * self.chip.clock


def rows(target: str, folder: Path) -> list[Row]:
    """Compile every kernel and return its figures.

    Args:
      target: TPU, one of ``CHIPS``.
      folder: folder of the dumps, set in the environment of this process (``schedules.dump_environment``).
    """
    compiler = Compiler(target, folder)
    found = [_product(compiler, sizes, dtype) for sizes in PRODUCTS for dtype in DTYPES]
    found += [_cast(compiler, dtype) for dtype in DTYPES]
    return found + [_block_cast(compiler, *each) for each in CASTS.items()]


def _block_casts() -> dict[str, tuple[Cast, ...]]:
    """Return the casts of activations, output gradients and weights in bfloat16 models, by config string and tensor."""
    found = {}
    for string in ("fp8_block", "mxfp8"):
        recipe = RECIPES[string].recipe
        assert recipe is not None
        tile, weight = recipe.resolve("fwd", "lhs"), recipe.resolve("fwd", "rhs")
        assert tile is not None
        assert weight is not None
        size = tile.tile_size or 0
        made = functools.partial(Cast, tile, floor=SMALLEST_SCALE)
        values = {"has_elements": False, "has_values": True}
        found[f"{string} activation"] = made((1, size), **values), made((size, 1))
        found[f"{string} gradient"] = made((1, size), **values), made((size, 1), **values)
        if weight.granularity == "per_block":
            found[f"{string} weight"] = (Cast(weight, (size, size), SMALLEST_SCALE, has_values=True),)
    return found


CASTS = _block_casts()


def _block_cast(compiler: Compiler, name: str, casts: tuple[Cast, ...]) -> Row:
    (M, N), x = CAST, compiler.shape(CAST, "bfloat16")
    compiler.compile(lambda x: cast_tpu.block_quantize(x, casts), x)
    made = read_schedule(compiler.folder, cast_reference.NAME)
    written = sum(each.has_elements + 2 * each.has_values for each in casts)
    tile = cast_tuning.blocks_for(CAST), cast_tuning.TILE
    # There is no XLA estimate for a cast, only for a whole step: audit-yardstick-v6e.md.
    return _cast_row(compiler, f"block cast of {M}×{N}, {name}", casts[0].spec.dtype, made, *tile, "", written)


def _cast_row(
    compiler: Compiler,
    kernel: str,
    elements: str,
    made: Schedule,
    blocks: Sequence[int],
    rows: int,
    estimate: int | str,
    written: int,
) -> Row:
    """Return the row of a cast of a bfloat16 matrix.

    Args:
      compiler: compiler of the chip.
      kernel, elements: name of the kernel, and its element type.
      made: schedule of the kernel.
      blocks, rows: block shape of one program, and number of rows that one step of the program processes.
      estimate: XLA's estimate, in thousand cycles.
      written: bytes written per element.
    """
    return {
        "kernel": kernel,
        "elements": elements,
        "blocks": "×".join(map(str, blocks)),
        "bundles a step": f"{made.count(2)} of {rows} rows",
        "once a tile": made.count(1),
        "MXU": "",
        "fills / spills": "{} / {}".format(*made.fills_and_spills),
        "kcycles": round(made.cycles / 1e3),
        "XLA's bundles": "",
        "XLA's MXU": "",
        "XLA's estimate": estimate,
        "HBM": round(compiler.hbm_cycles(math.prod(CAST) * (2 + written)) / 1e3),
    }


def _accumulator(dtype: str) -> str:
    return "int32" if dtype == "int8" else "bfloat16"


def _product(compiler: Compiler, sizes: tuple[int, int, int], dtype: str) -> Row:
    M, N, K = sizes
    given: dict[str, Any] = {"out_dtype": "bfloat16", "accumulator": _accumulator(dtype)}
    lhs, rhs = compiler.shape((1, M, K), dtype), compiler.shape((1, K, N), dtype)
    scale = compiler.shape((1,), "float32")
    compiler.compile(
        lambda lhs, rhs, scale: matmul_tpu.matmul(lhs, rhs, scale, rhs_major="n", **given), lhs, rhs, scale
    )
    made = read_schedule(compiler.folder, matmul_reference.NAME)
    blocks = matmul_tuning.blocks_for(M, N, K)
    depth = math.ceil(K / blocks[2])
    # Bundles inside two or more branches clear and rescale the sums, once per tile of the result.
    once = made.count(1, range(2, 1000))

    def xla(lhs: jax.Array, rhs: jax.Array, scale: jax.Array) -> jax.Array:
        numbers = (((2,), (1,)), ((0,), (0,)))
        out = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.dtype(given["accumulator"]))
        return matmul_reference.rescale(out, scale, None, None, **given)

    cycles = compiler.compile(xla, lhs, rhs, scale)
    theirs = read_schedule(compiler.folder, XLA_MATMUL)
    return {
        "kernel": f"matmul {M}×{N}×{K}",
        "elements": dtype,
        "blocks": "×".join(map(str, blocks)),
        "bundles a step": made.count(1) - once,
        "once a tile": once,
        "MXU": f"{made.mxu_share:.0%}",
        "fills / spills": "{} / {}".format(*made.fills_and_spills),
        "kcycles": round((made.cycles - once * made.trip_counts[0] * (depth - 1) / depth) / 1e3),
        "XLA's bundles": round(theirs.cycles / 1e3),
        "XLA's MXU": f"{theirs.mxu_share:.0%}",
        "XLA's estimate": round(cycles / 1e3),
        "HBM": round(compiler.hbm_cycles(M * K + K * N + 2 * M * N) / 1e3),
    }


def _cast(compiler: Compiler, dtype: str) -> Row:
    x, scale = compiler.shape(CAST, "bfloat16"), compiler.shape((1, 1), "float32")
    compiler.compile(lambda x, scale: quantize_tpu.quantize(x, scale, dtype=dtype), x, scale)
    made = read_schedule(compiler.folder, quantize_reference.NAME)
    tile = quantize_tuning.blocks_for(CAST), quantize_tuning.ROWS
    cycles = compiler.compile(lambda x, scale: quantize_reference.quantize(x, scale, dtype=dtype), x, scale)
    return _cast_row(compiler, "quantize {}×{}".format(*CAST), dtype, made, *tile, round(cycles / 1e3), 1)


if __name__ == "__main__":
    print(json.dumps(rows(sys.argv[1], Path(sys.argv[2]))))
