"""Codec: encoding of float arrays to bytes and back, as a row of data and two functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxquant.core.qtensor import CODEC_MARK, QTensor

Parts = dict[str, Array]
"""Arrays of an encoded array by name, each with the leading axes of the float array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """One tensor format. Blocks lie along the last axis, row by row.

    Attributes:
      name: name in configs and for ``codec``.
      elements_per_block: number of elements that are encoded together; the last axis must be a multiple.
      bytes_per_block: number of bytes of a block, including its scales.
      encode_last: function from float32 ``[..., K]`` to parts.
      decode_last: function from parts to float32 ``[..., K]``, bit for bit as the format defines.
      encoding: name in a GGUF file and in MAX's ``QuantizationEncoding``, or None.
    """

    name: str
    elements_per_block: int
    bytes_per_block: int
    encode_last: Callable[[Float[Array, "... K"]], Parts]
    decode_last: Callable[[Parts], Float[Array, "... K"]]
    encoding: str | None = None

    def encode(self, x: Float[Array, ...], axis: int = -1) -> Parts:
        """Encode an array. Can be jitted.

        Args:
          x: array of any float dtype; it is converted to float32.
          axis: axis along which neighbours share a block. The result has this axis last.

        Raises:
          ValueError: the size of the axis is not a multiple of the block.
          TypeError: the array is not a float array.
        """
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jax.dtypes.itemsize_bits(x.dtype) == 4):
            raise TypeError(f"{self.name} encodes float arrays, got {x.dtype.name}; convert the array first")
        if x.ndim == 0 or x.shape[axis] % self.elements_per_block:
            raise ValueError(
                f"axis {axis} of shape {x.shape} cannot be split into blocks of {self.elements_per_block} elements "
                f"for {self.name}; pad the axis, or leave this array in float"
            )
        return _encode(self, jnp.moveaxis(x, axis, -1))

    def decode(self, parts: Parts, dtype: str = "float32") -> Float[Array, ...]:
        """Decode the result of ``encode``, with blocks along the last axis, rounded once to ``dtype``."""
        return _decode(self, parts).astype(dtype)

    def decode_tensor(self, tensor: QTensor) -> Float[Array, "*shape"]:
        """Return the float32 array of a ``QTensor`` from ``formats.encode_tensor``."""
        sizes = tensor.blocks
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        stored = jnp.moveaxis(tensor.qvalue, axes[-1], -1)
        stored = jnp.squeeze(stored, axis=tuple(axes[:-1]))
        contraction = tuple(sizes[axis] for axis in axes)
        values = self.decode({"blocks": stored})[..., : math.prod(contraction)]
        values = jnp.moveaxis(values.reshape(*stored.shape[:-1], *contraction), range(-len(axes), 0), axes)
        return checkpoint_name(values, CODEC_MARK + self.name)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of an encoded array of this shape, without the scale of the complete tensor."""
        size = 1
        for length in shape:
            size *= length
        return size // self.elements_per_block * self.bytes_per_block


@functools.partial(jax.jit, static_argnums=0)
def _encode(codec: Codec, x: Array) -> Parts:
    return codec.encode_last(x)


@functools.partial(jax.jit, static_argnums=0)
def _decode(codec: Codec, parts: Parts) -> Array:
    return codec.decode_last(parts)


def split_blocks(x: Float[Array, "... K"], size: int) -> Float[Array, "... T size"]:
    """Return ``x`` with its last axis split into blocks."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def merge_last(blocks: Array) -> Array:
    """Return an array with its last two axes merged."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
