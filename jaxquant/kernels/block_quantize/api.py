"""``block_quantize`` of tensors of any rank, on the platform for which a program is compiled."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxquant.core.blocks import BlocksError, is_even, reshape_blocks
from jaxquant.core.calibration import Calibration
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.sharding import device_kind_of, platform_of
from jaxquant.kernels.block_quantize import reference
from jaxquant.kernels.block_quantize.reference import Blocks, Cast
from jaxquant.kernels.block_quantize.tuning import TILE
from jaxquant.kernels.platforms import (
    MAX_GRID_BLOCKS,
    capability_of,
    is_interpretable,
    load_kernel,
    platform_refusal,
    sharding_refusal,
)

_SHAPES = ((1, TILE), (TILE, 1), (TILE, TILE), (1, 32), (32, 1))


def refusal(x: Array, casts: tuple[Cast, ...]) -> str | None:
    """Return the reason why the kernel cannot quantize a tensor, or None if it can.

    Args:
      x, casts: arguments of ``block_quantize``.
    """
    if x.dtype.name not in ("float32", "bfloat16"):
        return f"the block_quantize kernel reads float32 and bfloat16, not {x.dtype.name}"
    if why := next(filter(None, (_spec_refusal(cast.spec) for cast in casts)), None):
        return why
    found = _matrix(x.shape, casts)
    if found is None:
        shapes = " and ".join("×".join(map(str, cast.block)) for cast in casts)
        return f"the block_quantize kernel needs tiles of {TILE}×{TILE}, not shape {x.shape} in blocks of {shapes}"
    is_gpu = platform_of(x) == "gpu"
    if is_gpu and capability_of(x)[0] != 9:
        return f"the block_quantize kernel runs only on TPUs and Hopper GPUs, but the device is {device_kind_of(x)}"
    if is_gpu and found[0][0] // TILE > MAX_GRID_BLOCKS:
        return f"block_quantize supports at most {MAX_GRID_BLOCKS * TILE:,} rows on GPUs, not {found[0][0]:,}"
    if jax.config.read("jax_enable_x64"):
        return "the block_quantize kernel uses 32-bit indices, but jax_enable_x64 is on"
    return sharding_refusal(x) or (None if is_gpu else platform_refusal("block_quantize", x))


def _spec_refusal(spec: TensorSpec) -> str | None:
    if spec.dtype not in ("float8_e4m3fn", "float8_e5m2"):
        return f"the block_quantize kernel writes float8_e4m3fn and float8_e5m2, not {spec.dtype}"
    if spec.rounding != "nearest" or spec.reciprocal:
        return "the block_quantize kernel supports only division by the scale with rounding to nearest"
    if spec.scale_dtype == "float8_e4m3fn" or spec.scale_rounding == "nearest":
        return "the block_quantize kernel supports only float32 scales, exact or rounded up to powers of two"
    is_plain = spec.calibration == Calibration() and not spec.clips and spec.scaling == "dynamic"
    return None if is_plain else "the block_quantize kernel supports only the amax of a block, without clipping"


def block_quantize(x: Float[Array, "*shape"], casts: tuple[Cast, ...]) -> tuple[Blocks, ...]:
    """Quantize a tensor once for each block shape; ``refusal`` must return None.

    Args:
      x: tensor.
      casts: casts of x.
    """
    found = _matrix(x.shape, casts)
    assert found is not None
    shape, flat = found
    matrix, name = x.reshape(shape), "gpu" if platform_of(x) == "gpu" else "tpu"
    kernel = load_kernel("block_quantize", name).block_quantize
    where: dict[str, Any] = {"cuda" if name == "gpu" else "tpu": functools.partial(kernel, casts=flat)}
    if name == "tpu" and is_interpretable(matrix):
        where["cpu"] = functools.partial(kernel, casts=flat, interpret=True)
    default = functools.partial(reference.block_quantize, casts=flat)
    with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):  # results have the mesh of x
        out = jax.lax.platform_dependent(matrix, **where, default=default)

    def back(made: Blocks) -> Blocks:
        tensor = None if made.tensor is None else made.tensor.reshape(x.shape)
        return Blocks(tensor, None if made.values is None else made.values.reshape(x.shape))

    return tuple(back(made) for made in out)


def _matrix(shape: tuple[int, ...], casts: tuple[Cast, ...]) -> tuple[tuple[int, int], tuple[Cast, ...]] | None:
    """Return a matrix shape of whole tiles for a tensor, and the casts of that matrix, or None if no shape fits."""
    if 0 in shape or not all(is_even(shape, cast.block) for cast in casts):
        return None
    for axis in range(1, len(shape)):
        matrix = math.prod(shape[:axis]), math.prod(shape[axis:])
        try:
            found = tuple(cast._replace(block=reshape_blocks(shape, matrix, cast.block)) for cast in casts)
        except BlocksError:
            continue
        if all(size and size % TILE == 0 for size in matrix) and all(cast.block in _SHAPES for cast in found):
            return matrix, found
    return None
