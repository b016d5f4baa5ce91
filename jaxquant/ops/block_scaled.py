"""block_scaled: the product of two operands in blocks, by a GPU instruction for them or by our kernel.

On GPUs of compute capability 10, XLA turns the custom call below (``jax.nn.scaled_matmul``'s) into cuDNN's block-scaled
matmul. On other GPUs, XLA would dequantize the operands in more passes than ``contract`` does, so this custom call is
used only on compute capability 10. For blocks of 128, there is a kernel for Hopper (``kernels/block_matmul``). The
custom call and the kernel are lowerings of one primitive.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxquant.core.blocks import repeat_scale
from jaxquant.core.float_dot import float_dot
from jaxquant.core.qtensor import QTensor, dequantize
from jaxquant.core.scales import compile_impl
from jaxquant.kernels.block_matmul import api as kernel
from jaxquant.kernels.block_matmul import reference
from jaxquant.kernels.platforms import capability_of, load_kernel, sharding_refusal
from jaxquant.kernels.varying import vary_alike
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.implementation import select_block_matmul

Array = jax.Array
Axes = tuple[int, ...]
SIZES = {("float8_e4m3fn", "float8_e8m0fnu"): 32, ("float4_e2m1fn", "float8_e4m3fn"): 16}
"""Element and scale dtypes of the instruction -> number of elements that share a scale (MXFP8, NVFP4)."""


def refusal(lhs: QTensor, rhs: QTensor, dims: Dimensions) -> str | None:
    """Return the reason why the instruction cannot compute a contraction, or None if it can.

    The instruction sums exact products in float32, like the float matmul of the dequantized operands.

    Args:
      lhs, rhs, dims: arguments of ``contract``.
    """
    kinds = {(side.qvalue.dtype.name, "" if side.codec else side.scale.dtype.name) for side in (lhs, rhs)}
    size = SIZES.get(next(iter(kinds))) if len(kinds) == 1 else None
    if size is None:
        return "no chip has a block-scaled matmul for these element and scale dtypes"
    if capability_of(lhs.qvalue, rhs.qvalue)[0] != 10:
        return "the chip has no block-scaled matmul"
    for side, axes in ((lhs, dims.lhs_contract), (rhs, dims.rhs_contract)):
        if side.blocks[axes[-1]] % size or side.shape[axes[-1]] % size or not side.qvalue.size:
            return f"the last contraction axis is not divided into whole blocks of {size} elements"
    return sharding_refusal(lhs.qvalue, rhs.qvalue, defers=True)


def select_matmul(lhs: QTensor, rhs: QTensor, dims: Dimensions, out_dtype: str, implementation: str | None) -> str:
    """Select the implementation of a contraction (``cudnn``, ``pallas`` or ``xla``); see ``select_block_matmul``."""
    refused = functools.partial(kernel.refusal, lhs, rhs, *_axes(dims), out_dtype=out_dtype)
    return select_block_matmul(refusal(lhs, rhs, dims), implementation, refused).name


def _axes(dims: Dimensions) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    return (dims.lhs_contract, dims.rhs_contract), (dims.lhs_batch, dims.rhs_batch)


def multiply(lhs: QTensor, rhs: QTensor, dims: Dimensions, out_dtype: str, by: str = "cudnn") -> Array:
    """Compute the matmul of two operands with block scales; the caller applies the outer scales.

    Args:
      lhs, rhs, dims: operands and dimension numbers.
      out_dtype: dtype of the result.
      by: result of ``select_matmul``, "cudnn" or "pallas".
    """
    if by == "pallas":
        operands = kernel.operands(lhs, rhs, *_axes(dims))
    else:
        size = SIZES[lhs.qvalue.dtype.name, lhs.scale.dtype.name]
        x, x_scale = _rows(lhs, dims.lhs_batch, dims.lhs_free, dims.lhs_contract, size)
        w, w_scale = _rows(rhs, dims.rhs_batch, dims.rhs_free, dims.rhs_contract, size)
        operands = [x, w, x_scale, w_scale]
    out = _scaled_dot.bind(*vary_alike(*operands)[0], dimension_numbers=_NUMBERS, out_dtype=out_dtype)
    batch, free = [lhs.shape[axis] for axis in dims.lhs_batch], [lhs.shape[axis] for axis in dims.lhs_free]
    return out.reshape(*batch, *free, *(rhs.shape[axis] for axis in dims.rhs_free))


def _rows(
    side: QTensor, batch: tuple[int, ...], free: tuple[int, ...], contracted: tuple[int, ...], size: int
) -> tuple[Array, Array]:
    """Return qvalues as (batch, free, contracted), and a scale for each ``size`` contracted elements."""
    scale, order = side.scale, (*batch, *free, *contracted)
    for axis, n in enumerate(side.shape):
        step = size if axis == contracted[-1] else 1
        if scale.shape[axis] != n // step:
            scale = repeat_scale(scale, axis, n // step, side.blocks[axis] // step)
    shape = [math.prod(side.shape[axis] for axis in axes) for axes in (batch, free, contracted)]
    counts = (*shape[:2], shape[2] // size)
    return side.qvalue.transpose(order).reshape(shape), scale.transpose(order).reshape(counts)


# -- the primitive: (batch, rows, contracted), (batch, columns, contracted), scales of both -> (batch, rows, columns) --


_NUMBERS = (((2,), (2,)), ((0,), (0,)))


def _emulated(x: Array, w: Array, x_scale: Array, w_scale: Array, *, dimension_numbers: Any, out_dtype: str) -> Array:
    if x_scale.dtype == jnp.float32:
        return reference.matmul(x, w, x_scale, w_scale, out_dtype=out_dtype)
    left, right = (dequantize(QTensor(*side), "bfloat16") for side in ((x, x_scale), (w, w_scale)))  # exact
    return float_dot(left, right, dimension_numbers, preferred_element_type=out_dtype)


def _batch(operands: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    n = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    whole = [
        jnp.broadcast_to(x, (n, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    out = _scaled_dot.bind(*(x.reshape(-1, *x.shape[2:]) for x in whole), **params)
    return out.reshape(n, -1, *out.shape[1:]), 0


def _lower(context: Any, *operands: Any, out_dtype: str, **_: Any) -> Any:
    if context.avals_in[2].dtype == jnp.float32:
        matmul = load_kernel("block_matmul", "gpu").matmul
        return mlir.lower_fun(matmul, multiple_results=False)(context, *operands, out_dtype=out_dtype)
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[out_dtype]
    dims = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": kind}
    config = json.dumps({"scaled_dot_backend_config": dims})
    return jax.ffi.ffi_lowering("__op$block_scaled_dot", api_version=2, backend_config=config)(context, *operands)


NAME = "block_scaled_dot"
"""Name of the primitive."""

_scaled_dot = Primitive(NAME)
compile_impl(_scaled_dot, "dimension_numbers", "out_dtype")
_scaled_dot.def_abstract_eval(
    lambda x, w, *_, out_dtype, **__: x.update(shape=(*x.shape[:2], w.shape[1]), dtype=jnp.dtype(out_dtype))
)
batching.primitive_batchers[_scaled_dot] = _batch
mlir.register_lowering(_scaled_dot, mlir.lower_fun(_emulated, multiple_results=False))
mlir.register_lowering(_scaled_dot, _lower, platform="cuda")
