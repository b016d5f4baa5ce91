"""``einsum``: any contraction of two quantized tensors as ``matmul``, on the platform for which it is compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant import exact
from jaxquant.core.qtensor import QTensor
from jaxquant.core.sharding import platform_of
from jaxquant.kernels import DTYPES
from jaxquant.kernels.fp8_einsum import reference
from jaxquant.kernels.fp8_einsum.reference import Major
from jaxquant.kernels.platforms import capability_of, is_interpretable, load_kernel, platform_refusal, sharding_refusal
from jaxquant.kernels.varying import vary_alike

Array = jax.Array
Axes = Sequence[int]


class Side(NamedTuple):
    """Canonical form of an operand.

    Attributes:
      shape: (batch, free, contracted), or (batch, contracted, free) if the free axes are last.
      is_k_major: whether the contracted axes are last.
      batch, free: shapes of the batch axes and of the free axes.
    """

    shape: tuple[int, int, int]
    is_k_major: bool
    batch: tuple[int, ...]
    free: tuple[int, ...]


def refusal(
    lhs: QTensor,
    rhs: QTensor,
    contract: tuple[Axes, Axes],
    batch: tuple[Axes, Axes],
    *,
    out_dtype: str,
    accumulator: str,
    scale_dtype: str = "float32",
) -> str | None:
    """Return the reason why the kernel cannot compute a contraction, or None if it can.

    Args:
      lhs, rhs, contract, batch, out_dtype, accumulator: arguments of ``einsum``.
      scale_dtype: dtype in which the scales of channels are applied.
    """
    kinds = [side.qvalue.dtype.name for side in (lhs, rhs)]
    if lhs.codec or rhs.codec:
        return f"the fp8_einsum kernel does not support the format {lhs.codec or rhs.codec}"
    if any(kind not in DTYPES for kind in kinds) or kinds.count("int8") == 1:
        return f"the fp8_einsum kernel multiplies two int8 or two fp8 arrays, not {kinds[0]} and {kinds[1]}"
    if lhs.zero_point is not None or rhs.zero_point is not None:
        return "the fp8_einsum kernel does not support zero points"
    allowed = ("int32",) if "int8" in kinds else ("float32", "bfloat16")
    if accumulator not in allowed or out_dtype not in ("float32", "bfloat16"):
        return f"fp8_einsum sums {kinds[0]} in {' or '.join(allowed)}, not in {accumulator} for a {out_dtype} result"
    if not lhs.qvalue.size or not rhs.qvalue.size:
        return "the fp8_einsum kernel does not support empty arrays"
    if "int8" in kinds and math.prod(lhs.shape[axis] for axis in contract[0]) > 132_104:  # 127 · 128 a product
        return "the int32 sums of the fp8_einsum kernel hold at most 132,104 products"
    left, right = _sides(lhs, rhs, contract, batch)
    if left is None or right is None:
        return "the fp8_einsum kernel needs batch axes first, and contraction axes next to each other in the same order"
    is_scalar = lhs.scale.size == rhs.scale.size == 1
    if not is_scalar and not (_per_free(lhs, contract[0]) and _per_free(rhs, contract[1])):
        return "the fp8_einsum kernel supports scales per tensor or per channel, not per tile or block"
    if not is_scalar and scale_dtype != "float32":
        return f"the fp8_einsum kernel applies the scales of channels in float32, not in {scale_dtype}"
    if why := sharding_refusal(lhs.qvalue, rhs.qvalue) or platform_refusal("fp8_einsum", lhs.qvalue):
        return why
    if platform_of(lhs.qvalue) != "gpu":
        return None
    m, n = (side.shape if side.is_k_major else _swapped(side.shape) for side in (left, right))
    options = {"out_dtype": out_dtype, "accumulator": accumulator, "capability": capability_of(lhs.qvalue, rhs.qvalue)}
    return load_kernel("fp8_einsum", "gpu").refusal(m, n, *kinds, **options)


def einsum(
    lhs: QTensor,
    rhs: QTensor,
    contract: tuple[Axes, Axes],
    batch: tuple[Axes, Axes],
    *,
    out_dtype: str,
    accumulator: str,
) -> Array:
    """Contract two quantized tensors; ``refusal`` must return None.

    The result has the axes (batch, free axes of lhs, free axes of rhs).

    Args:
      lhs, rhs: operands.
      contract, batch: contraction and batch axes, as in ``lax.dot_general``.
      out_dtype, accumulator: arguments of ``reference.matmul``.
    """
    left, right = _sides(lhs, rhs, contract, batch)
    assert left is not None
    assert right is not None
    majors: dict[str, Major] = {
        "lhs_major": "k" if left.is_k_major else "m",
        "rhs_major": "k" if right.is_k_major else "n",
    }
    operands = [lhs.qvalue.reshape(left.shape), rhs.qvalue.reshape(right.shape)]
    is_scalar = lhs.scale.size == rhs.scale.size == 1
    if is_scalar:
        scales = [(lhs.full_scale() * rhs.full_scale()).reshape(1)]
    else:
        scales = [
            _channels(lhs, contract[0], batch[0], left)[..., None],
            _channels(rhs, contract[1], batch[1], right)[:, None, :],
        ]
    operands, _ = vary_alike(*operands, *scales)

    def on(run: Any, is_k_major: bool = False, **more: Any) -> Any:
        def call(a: Array, b: Array, *scales: Array) -> Array:
            scale_arguments = {"scale": scales[0]} if is_scalar else {"left": scales[0], "right": scales[1]}
            options: dict[str, Any] = {"out_dtype": out_dtype, "accumulator": accumulator, **more}
            if is_k_major:
                a, b = (x if each.is_k_major else x.swapaxes(1, 2) for x, each in ((a, left), (b, right)))
            else:
                options |= majors
            return run(a, b, **scale_arguments, **options)

        return call

    tpu = load_kernel("fp8_einsum", "tpu")
    where = {"tpu": on(tpu.matmul)}
    if is_interpretable(operands[0]):
        where["cpu"] = on(tpu.matmul, interpret=True)
    if platform_of(lhs.qvalue) == "gpu":
        where["cuda"] = on(load_kernel("fp8_einsum", "gpu").matmul, is_k_major=True)
    out = jax.lax.platform_dependent(*operands, **where, default=on(reference.matmul))
    if accumulator == "int32":  # on CPUs, the kernel is a part of the program: an addition could change its rounding
        out = jax.lax.platform_dependent(out, cpu=exact.hold, default=lambda out: out)
    return out.reshape((*left.batch, *left.free, *right.free))


def _sides(
    lhs: QTensor, rhs: QTensor, contract: tuple[Axes, Axes], batch: tuple[Axes, Axes]
) -> tuple[Side | None, Side | None]:
    """Return both operands in the canonical form, or None for an operand with another order of axes."""
    order = sorted(range(len(contract[0])), key=lambda i: contract[0][i])
    first, second = ([axes[i] for i in order] for axes in contract)
    return _side(lhs.shape, first, batch[0]), _side(rhs.shape, second, batch[1])


def _side(shape: tuple[int, ...], contract: Axes, batch: Axes) -> Side | None:
    free = [axis for axis in range(len(shape)) if axis not in contract and axis not in batch]
    order = (*batch, *free, *contract)
    is_k_major = order == tuple(range(len(shape)))
    if not contract or not (is_k_major or (*batch, *contract, *free) == tuple(range(len(shape)))):
        return None
    b, f, k = (tuple(shape[axis] for axis in axes) for axes in (batch, free, contract))
    sizes = (math.prod(b), math.prod(f), math.prod(k))
    return Side(sizes if is_k_major else _swapped(sizes), is_k_major, b, f)


def _swapped(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    return sizes[0], sizes[2], sizes[1]


def _per_free(tensor: QTensor, contract: Axes) -> bool:
    scales = tensor.scale.shape
    return all(
        n == 1 or (n == size and axis not in contract)
        for axis, (n, size) in enumerate(zip(scales, tensor.shape, strict=True))
    )


def _channels(tensor: QTensor, contract: Axes, batch: Axes, side: Side) -> Array:
    """Return the scale of each batch entry and channel, [batch, free]."""
    free = [axis for axis in range(tensor.ndim) if axis not in contract and axis not in batch]
    scale = (
        tensor.full_scale()
        .transpose((*batch, *free, *contract))
        .reshape(tuple(tensor.scale.shape[axis] for axis in (*batch, *free)))
    )
    return jnp.broadcast_to(scale, (*side.batch, *side.free)).reshape(math.prod(side.batch), math.prod(side.free))
