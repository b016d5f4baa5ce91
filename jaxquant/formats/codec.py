"""A codec: how float arrays become bytes and come back, as a row of data and two functions."""

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
"""The arrays of an encoded array by name, each with the leading axes of the float one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """One tensor format. Blocks lie along the last axis, row by row.

    Attributes:
      name: what configs and ``codec`` call it.
      elements_per_block: elements that are encoded together; the last axis must be a multiple.
      bytes_per_block: bytes that they take, a block's own scales included.
      encode_last: float32 ``[..., K]`` to parts.
      decode_last: parts to float32 ``[..., K]``, bit for bit what the format defines.
      encoding: name in a GGUF file and of MAX's ``QuantizationEncoding``, or None.
    """

    name: str
    elements_per_block: int
    bytes_per_block: int
    encode_last: Callable[[Float[Array, "... K"]], Parts]
    decode_last: Callable[[Parts], Float[Array, "... K"]]
    encoding: str | None = None

    def encode(self, x: Float[Array, ...], axis: int = -1) -> Parts:
        """Encode an array; jit-compatible.

        Args:
          x: any float dtype; it is read as float32.
          axis: along which neighbours share a block. It becomes the last one.

        Raises:
          ValueError: the size of the axis is no multiple of the block.
          TypeError: not a float array.
        """
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jax.dtypes.itemsize_bits(x.dtype) == 4):
            raise TypeError(f"{self.name} encodes float arrays, got {x.dtype.name}; convert the array first")
        if x.ndim == 0 or x.shape[axis] % self.elements_per_block:
            raise ValueError(
                f"axis {axis} of shape {x.shape} does not divide into blocks of {self.elements_per_block} elements, "
                f"as {self.name} needs; pad it or leave this array in float"
            )
        return _encode(self, jnp.moveaxis(x, axis, -1))

    def decode(self, parts: Parts, dtype: str = "float32") -> Float[Array, ...]:
        """Decode what ``encode`` made, blocks along the last axis, rounded once to ``dtype``."""
        return _decode(self, parts).astype(dtype)

    def decode_tensor(self, tensor: QTensor) -> Float[Array, "*shape"]:
        """Return the float32 array of a ``QTensor`` that ``formats.encode_tensor`` made."""
        sizes = tensor.blocks
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        stored = jnp.moveaxis(tensor.qvalue, axes[-1], -1)
        stored = jnp.squeeze(stored, axis=tuple(axes[:-1]))
        contraction = tuple(sizes[axis] for axis in axes)
        values = self.decode({"blocks": stored})[..., : math.prod(contraction)]
        values = jnp.moveaxis(values.reshape(*stored.shape[:-1], *contraction), range(-len(axes), 0), axes)
        return checkpoint_name(values, CODEC_MARK + self.name)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Count the bytes of an encoded array of this shape, a scale for the whole tensor left out."""
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


def blocks_of(x: Float[Array, "... K"], size: int) -> Float[Array, "... T size"]:
    """Return ``x`` with its last axis cut into blocks."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def joined(blocks: Array) -> Array:
    """Return an array whose last two axes are one."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])
