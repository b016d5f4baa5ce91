"""Layouts that let a GPU's compiler make a quantized tensor, its transposed copy and its amax of one read.

Hopper's 8-bit matmuls want both operands with the contraction last. XLA turns the cast around for the first matmul that
it sees: the tensor is then read again for its amax, and turned again for the other matmul. For int8 it folds its own
copies back into the matmul, which cuBLASLt then computes up to eight times as slowly. Here the cast keeps the row-major
order of what it reads, and the copy is made of the 8-bit tensor. Under automatic sharding a layout that is asked for
makes the partitioner gather the tensor, so a program for more than one device asks for none.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxquant.core.qtensor import QTensor
from jaxquant.kernels.platforms import is_cut

Array = jax.Array


KEEP = "keep_layout"
"""Name of the primitive: the identity, but for compilers of GPUs."""

_keep = Primitive(KEEP)
_keep.def_impl(lambda x, **_: x)
_keep.def_abstract_eval(lambda x, **_: x)


def _batch(batched: Any, dims: Any, *, last: tuple[int, ...], is_row_major: bool) -> Any:
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
    return copy.transpose(np.argsort(order))  # which the matmul takes in: its operand is the copy


def _lower_on_gpus(context: Any, x: Any, **layout: Any) -> Any:
    if is_cut(context):
        return [x]
    return mlir.lower_fun(_on_gpus, multiple_results=False)(context, x, **layout)


batching.primitive_batchers[_keep] = _batch
ad.deflinear2(_keep, lambda gradient, _, **__: [gradient])
mlir.register_lowering(_keep, lambda context, x, **_: [x])
mlir.register_lowering(_keep, _lower_on_gpus, platform="cuda")


def _is_byte(x: Array) -> bool:
    return jax.dtypes.itemsize_bits(x.dtype) == 8


def row_major(tensor: QTensor) -> QTensor:
    """Ask GPUs to keep an 8-bit tensor in row-major order, if it is not cut over devices.

    Args:
      tensor: quantized operand.
    """
    if not _is_byte(tensor.qvalue):
        return tensor
    keep = lambda part: _keep.bind(part, last=(), is_row_major=True)  # noqa: E731
    return tensor.replace(lambda name, part: keep(part) if name == "qvalue" else part)


def contraction_last(x: Array, axes: tuple[int, ...], *, is_row_major: bool) -> Array:
    """Return an operand that GPUs copy so that its contraction axes are last in memory, if it is not cut over devices.

    Args:
      x: quantized elements.
      axes: that are contracted.
      is_row_major: whether XLA may not lay the copy out in another way, as it does with int8.
    """
    is_last = axes == tuple(range(x.ndim - len(axes), x.ndim))
    if not _is_byte(x) or (is_last and not is_row_major):
        return x
    return _keep.bind(x, last=axes, is_row_major=is_row_major)
