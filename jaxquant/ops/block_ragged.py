"""block_ragged: the product of groups of rows and their weights, both in blocks, by our kernel for Hopper.

Rows are copied to slabs of 128 rows (``groups.Slabs``); a slab contains rows of one group only. The kernel multiplies
each slab by its group's weight, or sums over the slabs of each group. As in ``block_scaled``, the kernel is the
lowering of a primitive.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.lax import RaggedDotDimensionNumbers

from jaxquant.core.qtensor import QTensor
from jaxquant.core.scales import compile_impl
from jaxquant.kernels.block_matmul import api as kernel
from jaxquant.kernels.block_matmul import reference
from jaxquant.kernels.block_matmul.reference import BLOCK, repeat_per_row
from jaxquant.kernels.platforms import load_kernel
from jaxquant.kernels.varying import vary_alike
from jaxquant.ops.groups import Groups, Rows, Slabs, expand_groups
from jaxquant.ops.implementation import select_block_matmul

Array = jax.Array
NO_INSTRUCTION = "no chip has a grouped matmul with block scales"
"""Reason why XLA's program dequantizes the operands by default."""


def select_matmul(
    lhs: QTensor | Rows,
    rhs: QTensor | Rows,
    numbers: RaggedDotDimensionNumbers,
    out_dtype: str,
    implementation: str | None,
) -> str:
    """Select the implementation of a product of groups of rows (``pallas`` or ``xla``); see ``select_block_matmul``.

    Args:
      lhs, rhs: operands, with slabs as rows.
      numbers: dimension numbers as in ``lax.ragged_dot_general``.
      out_dtype: dtype of the product.
      implementation: requested implementation, or None.
    """

    def refused() -> str | None:
        if isinstance(lhs, Rows) or isinstance(rhs, Rows):
            return f"the block_matmul kernel needs scales per 1×{BLOCK} or {BLOCK}×{BLOCK}, not per group of rows"
        return kernel.refusal(lhs, rhs, *_axes(numbers), out_dtype=out_dtype)

    return select_block_matmul(NO_INSTRUCTION, implementation, refused).name


def multiply(
    lhs: QTensor, rhs: QTensor, groups: Groups, *, numbers: RaggedDotDimensionNumbers, out_dtype: str
) -> Array:
    """Multiply qvalues and the scales of their blocks with the kernel.

    Args:
      lhs, rhs: operands as in ``select_matmul``.
      groups: groups of the rows. If the rows are contracted, each group consists of whole blocks of 128.
      numbers: dimension numbers.
      out_dtype: dtype of the result, whose rows after the last group are undefined.
    """
    x, w, left, right = kernel.operands(lhs, rhs, *_axes(numbers))
    if not numbers.rhs_group_dimensions:
        starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(groups.sizes).astype(jnp.int32) // BLOCK])
        return _bind(_DRHS, x[0], w[0], left[0], repeat_per_row(right, w.shape[1])[0], starts, out_dtype)
    slabs = Slabs.of(groups, BLOCK)
    own = jnp.where(slabs.groups.ids < groups.sizes.size, slabs.groups.ids, -1)
    out = _bind(_ROWS, slabs.copy_rows(x[0]), w, slabs.copy_rows(left[0]), right, own, out_dtype)
    places = expand_groups(slabs.groups.starts * BLOCK - groups.starts, groups.ids) + jnp.arange(groups.ids.size)
    return jnp.take(out, places, axis=0, mode="clip")


def _axes(numbers: RaggedDotDimensionNumbers) -> Any:
    return numbers.dot_dimension_numbers[0], ((), numbers.rhs_group_dimensions)


# -- the primitive: arguments of ``reference.grouped`` and ``reference.grouped_drhs``, with the contracted axes last ---


NAME = "block_scaled_ragged_dot"
"""Name of the primitive."""
_ROWS = RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_DRHS = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [])


def _bind(numbers: RaggedDotDimensionNumbers, x: Array, w: Array, left: Array, right: Array, ids: Array, out_dtype):
    operands = vary_alike(x, w, left, right, ids.astype(jnp.int32))[0]
    return _ragged.bind(*operands, ragged_dot_dimension_numbers=numbers, out_dtype=out_dtype)


def _form(place: Any, numbers: RaggedDotDimensionNumbers) -> Any:
    return place.grouped_drhs if numbers == _DRHS else place.grouped


def _abstract(x: Any, w: Any, left: Any, right: Any, ids: Any, *, ragged_dot_dimension_numbers: Any, out_dtype: str):
    parts = (ids.shape[0] - 1,) if ragged_dot_dimension_numbers == _DRHS else ()
    return x.update(shape=(*parts, x.shape[0], w.shape[-2]), dtype=jnp.dtype(out_dtype))


def _emulated(*operands: Array, ragged_dot_dimension_numbers: Any, out_dtype: str) -> Array:
    return _form(reference, ragged_dot_dimension_numbers)(*operands, out_dtype=out_dtype)


def _lower(context: Any, *operands: Any, ragged_dot_dimension_numbers: Any, out_dtype: str) -> Any:
    form = _form(load_kernel("block_matmul", "gpu"), ragged_dot_dimension_numbers)
    return mlir.lower_fun(form, multiple_results=False)(context, *operands, out_dtype=out_dtype)


def _batch(operands: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    """Multiply the batch elements one after the other: the kernel has no batch axis."""
    mapped = [jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None]

    def one(own: Any) -> Array:
        rest = iter(own)
        return _ragged.bind(
            *(x if axis is None else next(rest) for x, axis in zip(operands, axes, strict=True)), **params
        )

    return jax.lax.map(one, mapped), 0


_ragged = Primitive(NAME)
compile_impl(_ragged, "ragged_dot_dimension_numbers", "out_dtype")
_ragged.def_abstract_eval(_abstract)
batching.primitive_batchers[_ragged] = _batch
mlir.register_lowering(_ragged, mlir.lower_fun(_emulated, multiple_results=False))
mlir.register_lowering(_ragged, _lower, platform="cuda")
