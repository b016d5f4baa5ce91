"""Matmul with a packed kernel; the kernel is decoded in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxquant.formats.codec import Parts
from jaxquant.formats.packed_array import PackedArray

DECODED_ELEMENTS = 1 << 20
"""Maximum number of kernel elements that are decoded at a time."""


def matmul(x: Float[Array, "... K"], kernel: PackedArray) -> Float[Array, "... N"]:
    """Compute ``x · decode(kernel)`` for a few rows of the kernel at a time, so that only these rows are in float.

    The kernel is decoded in float32 and rounded to the dtype of ``x``; products are summed in float32. Only ``x`` has a
    gradient, computed with the decoded kernel; a packed kernel is frozen.

    Args:
      x: float array.
      kernel: kernel with two axes, packed along the contraction axis: either ``[K, N]`` with axis 0 or ``[N, K]`` with
        axis 1, as checkpoints store it.

    Raises:
      ValueError: the shapes do not match.
    """
    if kernel.ndim != 2 or x.ndim == 0 or x.shape[-1] != kernel.shape[kernel.axis]:
        raise ValueError(
            f"x of shape {x.shape} does not contract with a packed kernel of shape {kernel.shape} along its axis "
            f"{kernel.axis}; the last axis of x must have the size of that kernel axis"
        )
    return _matmul(x, kernel)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: PackedArray) -> jax.Array:
    def of_rows(parts: Parts) -> jax.Array:
        rows = kernel.codec.decode(parts, x.dtype.name)
        contraction = ((1,), (x.ndim - 1,)), ((), ())
        return jax.lax.dot_general(rows, x, contraction, preferred_element_type=jnp.float32).astype(x.dtype)

    results = [_map(of_rows, count, chunks) for count, chunks in _row_chunks(kernel)]
    results = [result.reshape(result.shape[0] * result.shape[1], *x.shape[:-1]) for result in results]
    return jnp.moveaxis(jnp.concatenate(results) if results else jnp.zeros((0, *x.shape[:-1]), x.dtype), 0, -1)


def _forward(x: jax.Array, kernel: PackedArray):
    return _matmul(x, kernel), (kernel, jnp.zeros((0,), x.dtype))


def _backward(residuals, grad: jax.Array):
    kernel, like = residuals
    total = jnp.zeros((*grad.shape[:-1], kernel.shape[kernel.axis]), jnp.float32)
    start = 0
    for count, chunks in _row_chunks(kernel):
        rows = jax.tree.leaves(chunks.rows)[0].shape[1]
        stop = start + count * rows
        grads = jnp.moveaxis(grad[..., start:stop], -1, 0).reshape(count, rows, *grad.shape[:-1])
        start = stop

        def add(total: jax.Array, step, chunks=chunks):
            decoded = kernel.codec.decode(chunks.shared | step[0], like.dtype.name)
            contraction = ((0,), (0,)), ((), ())
            return total + jax.lax.dot_general(step[1], decoded, contraction, preferred_element_type=jnp.float32), None

        total, _ = jax.lax.scan(add, total, (chunks.rows, grads))
    return total.astype(like.dtype), jax.tree.map(_no_gradient, kernel)


_matmul.defvjp(_forward, _backward)


def _no_gradient(part: jax.Array):
    if jnp.issubdtype(part.dtype, jnp.floating):
        return jnp.zeros_like(part)
    return np.zeros(part.shape, jax.dtypes.float0)


class _Chunks(NamedTuple):
    """Equal chunks of rows: the parts that have rows, as ``[chunk, row, ...]``, and the parts without rows."""

    rows: Parts
    shared: Parts


def _row_chunks(kernel: PackedArray) -> Iterator[tuple[int, _Chunks]]:
    """Yield the kernel's rows in chunks; the rest is one smaller chunk."""
    rows, depth = kernel.shape[1 - kernel.axis], kernel.shape[kernel.axis]
    size = min(max(1, DECODED_ELEMENTS // max(depth, 1)), max(rows, 1))
    shared = {name: part for name, part in kernel.parts.items() if part.ndim == 0}
    full = rows // size * size
    for start, stop, step in ((0, full, size), (full, rows, rows - full)):
        if stop > start:
            count = (stop - start) // step
            chunks = {
                name: part[start:stop].reshape(count, step, *part.shape[1:])
                for name, part in kernel.parts.items()
                if name not in shared
            }
            yield count, _Chunks(chunks, shared)


def _map(function: Callable[[Parts], Array], count: int, chunks: _Chunks) -> Array:
    if count == 1:
        return function(chunks.shared | {name: part[0] for name, part in chunks.rows.items()})[None]
    return jax.lax.map(lambda rows: function(chunks.shared | rows), chunks.rows)
