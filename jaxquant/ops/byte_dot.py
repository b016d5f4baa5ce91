"""8-bit operands on GPUs: their memory layout, and their matmul by cuBLASLt instead of Triton.

Hopper's 8-bit matmuls need operands whose contraction axes are last in memory. By default, XLA transposes the cast for
the first matmul of a tensor: the tensor is then read again for its amax, and transposed again for the other matmul. XLA
also folds its own copies of int8 operands into the matmul, which cuBLASLt then computes up to eight times as slowly.
With this file, the cast keeps the row-major order of its input, and the 8-bit tensor is copied. Programs for more than
one device get no such layout constraint, because with automatic sharding it makes the partitioner gather the tensor.

The matmul is a ``lax.dot_general``, so that rematerialization policies recognize it. Identity primitives before and
after it carry information for GPU compilers: copies of int8 operands whose contraction axes are last in memory, and the
algorithm for fp8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jaxquant.core.float_dot import float_dot
from jaxquant.core.qtensor import QTensor
from jaxquant.kernels.platforms import capability_of, may_be_sharded
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array

KEEP = "keep_layout"
"""Name of the primitive, which is the identity except for GPU compilers."""

_keep = Primitive(KEEP)
_keep.def_impl(lambda x, **_: x)
_keep.def_abstract_eval(lambda x, **_: x)


def _batch_layout(batched: Any, dims: Any, *, last: tuple[int, ...], is_row_major: bool) -> Any:
    (x,), (batch,) = batched, dims
    return _keep.bind(x, last=tuple(axis + (axis >= batch) for axis in last), is_row_major=is_row_major), batch


def _pin(x: Array) -> Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _on_gpus(x: Array, *, last: tuple[int, ...], is_row_major: bool) -> Array:
    if not last:
        return _pin(x)
    order = (*(axis for axis in range(x.ndim) if axis not in last), *last)
    copy = x.transpose(order)
    copy = jax.lax.optimization_barrier(_pin(copy) if is_row_major else copy)
    return copy.transpose(np.argsort(order))  # XLA folds this transpose into the matmul


def _lower_on_gpus(context: Any, x: Any, **layout: Any) -> Any:
    if may_be_sharded(context):
        return [x]
    return mlir.lower_fun(_on_gpus, multiple_results=False)(context, x, **layout)


batching.primitive_batchers[_keep] = _batch_layout
ad.deflinear2(_keep, lambda gradient, _, **__: [gradient])
mlir.register_lowering(_keep, lambda context, x, **_: [x])
mlir.register_lowering(_keep, _lower_on_gpus, platform="cuda")


def _is_byte(x: Array) -> bool:
    return jax.dtypes.itemsize_bits(x.dtype) == 8


def row_major(tensor: QTensor) -> QTensor:
    """Make GPUs keep an 8-bit tensor in row-major order, if it is not split over devices.

    Args:
      tensor: quantized operand.
    """
    if not _is_byte(tensor.qvalue):
        return tensor
    keep = lambda part: _keep.bind(part, last=(), is_row_major=True)  # noqa: E731
    return tensor.replace(lambda name, part: keep(part) if name == "qvalue" else part)


def copy_contraction_last(x: Array, axes: tuple[int, ...], *, is_row_major: bool) -> Array:
    """Return an operand that GPUs copy so that its contraction axes are last in memory, if it is on one device.

    Args:
      x: quantized elements.
      axes: contraction axes.
      is_row_major: whether the copy must be row-major; for int8, XLA would choose another layout.
    """
    is_last = axes == tuple(range(x.ndim - len(axes), x.ndim))
    if not _is_byte(x) or (is_last and not is_row_major):
        return x
    return _keep.bind(x, last=axes, is_row_major=is_row_major)


# -- the matmul --------------------------------------------------------------------------------------------------------


FP8 = ("float8_e4m3fn", "float8_e5m2")
ROWS = 64
"""Smallest number of rows of the other operand for which GPUs copy an int8 operand.

On an H200 the copy moves two bytes an element at 4 TB/s. Without the copy, the matmul computes two operations an
element and row at 0.13 PFLOP/s instead of 0.7 (``benchmarks/results/on-chip.md``). The two are equal at 40 rows.
"""

_algorithm = Primitive("fp8_algorithm")
_algorithm.def_impl(lambda x, **_: x)
_algorithm.def_abstract_eval(lambda x, **_: x)


def byte_dot(
    lhs: Array,
    rhs: Array,
    dims: Dimensions,
    *,
    precision: jax.lax.PrecisionLike,
    preferred_element_type: str,
    out_sharding: NamedSharding | None = None,
    copies: bool = False,
) -> Array:
    """Multiply two operands by ``float_dot``, and pass GPU compilers the layout and algorithm of 8-bit operands.

    Args:
      lhs, rhs: operands.
      dims: dimension numbers.
      precision, preferred_element_type, out_sharding: arguments of ``lax.dot_general``.
      copies: whether GPUs copy fp8 operands so that the contraction axes are last in memory.
    """
    rows = [_rows(lhs, dims.lhs_free), _rows(rhs, dims.rhs_free)]
    is_int8, is_fp8 = lhs.dtype == rhs.dtype == jnp.int8, lhs.dtype.name in FP8 and rhs.dtype.name in FP8
    a, b = lhs, rhs
    if rows[1] >= ROWS if is_int8 else copies:
        a = copy_contraction_last(a, dims.lhs_contract, is_row_major=is_int8)
    if rows[0] >= ROWS if is_int8 else copies:
        b = copy_contraction_last(b, dims.rhs_contract, is_row_major=is_int8)
    arguments = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
    out = float_dot(a, b, dims.numbers, precision=precision, **arguments)
    has_algorithm = is_fp8 and {lhs.dtype.name, rhs.dtype.name} != {"float8_e5m2"} and min(rows) > 1
    if has_algorithm and capability_of(lhs, rhs) >= (8, 9):
        out = _algorithm.bind(out, is_fast=precision in (None, jax.lax.Precision.DEFAULT))
    return out


def _rows(x: Array, free: Sequence[int]) -> int:
    """Return the number of rows of an operand; a symbolic size counts as ``ROWS``."""
    return math.prod(x.shape[axis] if isinstance(x.shape[axis], int) else ROWS for axis in free)


def _lower(context: Any, out: Any, *, is_fast: bool) -> Any:
    """Set the algorithm of the matmul that produces a result: XLA then uses cuBLASLt, as Triton does not support it.

    JAX can request an algorithm with ``precision``, but this is an error on all other platforms. The algorithm names
    e5m2 for all fp8 operands, because StableHLO 1.16 supports no other fp8 type there.
    """
    value = out
    while _is_result_of(value, "sdy.sharding_constraint"):
        value = value.owner.operands[0]
    if tuple(context.module_context.platforms) != ("cuda",) or not _is_result_of(value, "stablehlo.dot_general"):
        return [out]
    dot, made = value.owner, value
    if may_be_sharded(context):
        dot, made = _swap_operands(dot)
    fp8, result = ir.Float8E5M2Type.get(), ir.F32Type.get()
    dot.attributes["algorithm"] = stablehlo.DotAlgorithm.get(fp8, fp8, result, 1, 1, 1, is_fast)
    if "precision_config" in dot.attributes:
        del dot.attributes["precision_config"]
    if made is value:
        return [out]
    value.replace_all_uses_with(made)
    return [made if out == value else out]


def _is_result_of(value: Any, name: str) -> bool:
    """Check whether a value is the result of an operation with this name, and not a function argument."""
    return isinstance(value.owner, ir.Operation | ir.OpView) and value.owner.name == name


def _swap_operands(dot: Any) -> tuple[Any, Any]:
    """Swap the operands of an ordinary matrix product. Returns the new product, and its transpose.

    The partitioner rewrites an ordinary product as ``stablehlo.dot``, which cannot store an algorithm.
    """
    (lhs, rhs), out = dot.operands, dot.results[0]
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    is_plain = (list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)) == ([1], [0])
    if not is_plain or len(lhs.type.shape) != 2 or len(rhs.type.shape) != 2:
        return dot, out
    with ir.InsertionPoint(dot), dot.location:
        kind = ir.RankedTensorType.get(out.type.shape[::-1], out.type.element_type)
        made = stablehlo.dot_general(kind, rhs, lhs, stablehlo.DotDimensionNumbers.get([], [], [0], [1]))
        barrier: Any = stablehlo.optimization_barrier([made])  # otherwise XLA folds the transpose into the product
        return made.owner, stablehlo.transpose(barrier, ir.DenseI64ArrayAttr.get([1, 0]))


batching.primitive_batchers[_algorithm] = lambda batched, dims, **params: (_algorithm.bind(*batched, **params), dims[0])
ad.deflinear2(_algorithm, lambda gradient, _, **__: [gradient])
mlir.register_lowering(_algorithm, _lower, cacheable=False)
