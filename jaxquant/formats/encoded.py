"""Kernels in a tensor format: a ``QTensor`` that holds the format's bytes, for any contraction axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxquant.core.qtensor import CODEC_MARK, QTensor
from jaxquant.core.sharding import gather_axis
from jaxquant.formats.table import codec


def encode_tensor(x: Float[Array, "*shape"], format: str, axes: Sequence[int]) -> QTensor:
    """Encode an array along several axes, which are flattened in their order.

    An incomplete last block is padded with zeros; files of the format cannot store such a tensor.

    Args:
      x: array of any float dtype.
      format: name of a GGML codec, whose blocks contain elements and scales.
      axes: contraction axes of a kernel.

    Raises:
      ValueError: the format does not exist or has several arrays, or the axes have fewer than two elements.
    """
    row = codec(format)
    if row.encoding is None:
        raise ValueError(f"tensor format {row.name!r} stores its scales in separate arrays; use a format of GGML")
    axes = sorted(axis % x.ndim for axis in axes)
    block = tuple(size if axis in axes else 1 for axis, size in enumerate(x.shape))
    long = [axis for axis in axes if x.shape[axis] > 1]
    count = math.prod(block)
    if not long or not count:
        raise ValueError(
            f"an array of shape {x.shape} has fewer than two elements along {axes}, too few for {row.name}"
        )
    for axis in axes:
        x = gather_axis(x, axis)
    moved = jnp.moveaxis(checkpoint_name(x, CODEC_MARK + row.name), axes, range(-len(axes), 0))
    rows = moved.reshape(*moved.shape[: x.ndim - len(axes)], count)
    padding = -count % row.elements_per_block
    if padding:
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padding)])
    # The encoder reads its blocks many times; the barrier makes them contiguous first.
    stored = row.encode(jax.lax.optimization_barrier(rows))["blocks"]
    stored = stored.reshape(*stored.shape[:-1], *[1] * (len(axes) - 1), stored.shape[-1])
    order = [axis for axis in axes if axis != long[-1]] + [long[-1]]
    return QTensor(jnp.moveaxis(stored, range(-len(axes), 0), order), block=block, codec=row.name)
