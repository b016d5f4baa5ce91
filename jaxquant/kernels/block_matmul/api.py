"""Block-quantized tensors as arguments of ``matmul`` (``operands``); ``refusal`` rejects unsupported tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxquant.core.blocks import BlocksError
from jaxquant.core.qtensor import QTensor
from jaxquant.core.scales import decode_scale
from jaxquant.core.sharding import device_kind_of
from jaxquant.kernels.block_matmul.reference import BLOCK, repeat_per_row
from jaxquant.kernels.platforms import HAS_JAX_0_11, capability_of, sharding_refusal

Array = jax.Array
Axes = Sequence[int]


def refusal(
    lhs: QTensor, rhs: QTensor, contract: tuple[Axes, Axes], batch: tuple[Axes, Axes], *, out_dtype: str
) -> str | None:
    """Return the reason why the kernel cannot compute a contraction, or None if it can.

    Args:
      lhs, rhs: operands, which may be abstract. The caller applies their outer scales.
      contract, batch: contraction and batch axes, as in ``lax.dot_general``.
      out_dtype: dtype of the result.
    """
    if lhs.codec or rhs.codec:
        return f"the block_matmul kernel does not support the format {lhs.codec or rhs.codec}"
    if out_dtype not in ("float32", "bfloat16"):
        return f"the block_matmul kernel writes float32 and bfloat16, not {out_dtype}"
    if why := elements_refusal(lhs.qvalue, rhs.qvalue):
        return why
    for side, *axes in zip((lhs, rhs), contract, batch, strict=True):
        if side.zero_point is not None:
            return "the block_matmul kernel does not support zero points"
        try:
            tensor = jax.eval_shape(functools.partial(_matrices, contract=axes[0], batch=axes[1]), side)
        except BlocksError as error:
            return f"the block_matmul kernel needs matrices, but {error}"
        wanted = [(1,), (1, BLOCK, tensor.shape[1]), (BLOCK,)]
        if tensor.shape[1] > BLOCK:
            wanted[1] = (1, BLOCK)
        if any(size not in sizes for size, sizes in zip(tensor.blocks, wanted, strict=True)):
            return (
                f"the block_matmul kernel supports blocks of 1×{BLOCK} and {BLOCK}×{BLOCK}, not of {tensor.blocks[1:]}"
            )
    return None


def elements_refusal(lhs: Array, rhs: Array) -> str | None:
    """Return the reason why the kernel cannot multiply these dtypes on this device, or None if it can.

    Args:
      lhs, rhs: elements of the operands.
    """
    kinds = [side.dtype.name for side in (lhs, rhs)]
    if capability_of(lhs, rhs)[0] != 9:
        return f"the block_matmul kernel runs only on Hopper GPUs, but the device is {device_kind_of(lhs, rhs)}"
    if any(each not in ("float8_e4m3fn", "float8_e5m2") for each in kinds):
        return f"the block_matmul kernel multiplies two float8 arrays, not {kinds[0]} and {kinds[1]}"
    if kinds[0] != kinds[1] and not HAS_JAX_0_11:
        return f"block_matmul of {kinds[0]} with {kinds[1]} needs jax 0.11 or newer, but this is jax {jax.__version__}"
    if not lhs.size or not rhs.size:
        return "the block_matmul kernel does not support empty arrays"
    return sharding_refusal(lhs, rhs, defers=True)


def operands(lhs: QTensor, rhs: QTensor, contract: tuple[Axes, Axes], batch: tuple[Axes, Axes]) -> list[Array]:
    """Return the arguments of ``reference.matmul`` for two tensors; ``refusal`` must return None.

    The depth is padded with zeros to a multiple of 128.

    Args:
      lhs, rhs, contract, batch: arguments of ``refusal``.
    """
    sides = [_matrices(side, *axes) for side, *axes in zip((lhs, rhs), contract, batch, strict=True)]
    values = [jnp.pad(side.qvalue, ((0, 0), (0, 0), (0, -side.shape[2] % BLOCK))) for side in sides]
    left, right = (decode_scale(side.scale) for side in sides)
    return [*values, repeat_per_row(left, sides[0].shape[1]), right]


def _matrices(side: QTensor, contract: Axes, batch: Axes) -> QTensor:
    """Return a tensor as (batch, free, contracted)."""
    free = [axis for axis in range(side.ndim) if axis not in contract and axis not in batch]
    order = (*batch, *free, *contract)
    sizes = tuple(math.prod(side.shape[axis] for axis in axes) for axes in (batch, free, contract))
    return side.transpose(order).reshape(sizes)
