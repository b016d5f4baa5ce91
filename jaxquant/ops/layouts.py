"""Layouts that let a GPU's compiler make a quantized tensor, its transposed copy and its amax of one read.

Hopper's 8-bit matmuls want both operands with the contraction last, and XLA turns the cast around for the first matmul
that it sees: the tensor is then read again for its amax, and turned again for the other matmul. Here the cast keeps the
row-major order of what it reads, and the copy is made of the 8-bit tensor. Under automatic sharding a layout that is
asked for makes the partitioner gather the tensor, so there nothing is asked: as far as types tell while tracing
(``is_whole``), and always when a program for more than one device is lowered (``_is_cut``).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxquant.core.qtensor import QTensor
from jaxquant.core.sharding import is_whole

Array = jax.Array


KEEP = "keep_layout"
"""Name of the primitive: the identity, but for compilers of GPUs."""

_keep = Primitive(KEEP)
_keep.def_impl(lambda x, *, is_row_major: x)
_keep.def_abstract_eval(lambda x, *, is_row_major: x)


def _batch(batched: Any, axes: Any, *, is_row_major: bool) -> Any:
    return _keep.bind(*batched, is_row_major=is_row_major), axes[0]


def _on_gpus(x: Array, *, is_row_major: bool) -> Array:
    if is_row_major:
        return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(x)


def _is_cut(context: Any) -> bool:
    """Check whether a compiler may cut what this program computes over devices; what cannot be read off may be cut.

    Types of results that a kernel declares by itself (cuDNN's attention) name no mesh, and the process that lowers for
    an absent chip has a single device.
    """
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "num_devices", None) != 1
    return mesh.size != 1 and set(axes.manual_axes) != set(mesh.axis_names)


def _lower_on_gpus(context: Any, x: Any, *, is_row_major: bool) -> Any:
    if is_row_major and _is_cut(context):
        return [x]
    return mlir.lower_fun(_on_gpus, multiple_results=False)(context, x, is_row_major=is_row_major)


batching.primitive_batchers[_keep] = _batch
ad.deflinear2(_keep, lambda gradient, _, *, is_row_major: [gradient])
mlir.register_lowering(_keep, lambda context, x, *, is_row_major: [x])
mlir.register_lowering(_keep, _lower_on_gpus, platform="cuda")


def _is_byte(x: Array) -> bool:
    return jax.dtypes.itemsize_bits(x.dtype) == 8


def row_major(tensor: QTensor) -> QTensor:
    """Ask GPUs to keep an 8-bit tensor with one scale in row-major order, where it is whole.

    Args:
      tensor: quantized operand.
    """
    if tensor.scale.size != 1 or not _is_byte(tensor.qvalue) or not is_whole(tensor.qvalue):
        return tensor
    return tensor.replace(lambda name, part: _keep.bind(part, is_row_major=True) if name == "qvalue" else part)


def contraction_last(x: Array, axes: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Bring contraction axes last by a copy of the 8-bit tensor, where it is whole; return it and where they are.

    Args:
      x: quantized elements.
      axes: that are contracted.
    """
    last = tuple(range(x.ndim - len(axes), x.ndim))
    if axes == last or not _is_byte(x) or not is_whole(x):
        return x, axes
    free = tuple(axis for axis in range(x.ndim) if axis not in axes)
    return _keep.bind(x.transpose(free + axes), is_row_major=False), last
