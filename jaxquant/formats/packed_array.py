"""Encoded arrays as leaves of a model, and fake quantization to train a model for a format."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxquant.formats.codec import Codec, Parts
from jaxquant.formats.table import codec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["format", "shape", "axis"])
@dataclasses.dataclass(frozen=True)
class PackedArray:
    """An array in one of the tensor formats: a pytree of bytes and scales.

    Attributes:
      parts: arrays from the codec, with blocks along the last axis.
      format: name of the codec.
      shape: shape of the float array.
      axis: axis of ``shape`` that is split into blocks, not negative.
    """

    parts: Parts
    format: str
    shape: tuple[int, ...]
    axis: int

    @property
    def codec(self) -> Codec:
        return codec(self.format)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.size * part.dtype.itemsize for part in self.parts.values())

    def decode(self, dtype: str = "float32") -> Float[Array, ...]:
        """Return the float array, rounded once to ``dtype``."""
        return jnp.moveaxis(self.codec.decode(self.parts, dtype), -1, self.axis)


def pack_array(x: Float[Array, ...], format: str, axis: int = -1) -> PackedArray:
    """Encode an array.

    Args:
      x: array of any float dtype.
      format: name of a codec.
      axis: axis that is split into blocks; for a kernel, the contraction axis.

    Raises:
      ValueError: the format does not exist, or the axis cannot be split into blocks of the format.
      TypeError: the array is not a float array.
    """
    return PackedArray(codec(format).encode(x, axis), codec(format).name, x.shape, axis % x.ndim)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def fake_quantize(x: Float[Array, ...], format: str, axis: int = -1) -> Float[Array, ...]:
    """Return ``x`` encoded in a tensor format and decoded, with a straight-through gradient.

    ``decode(encode(x))`` in the dtype of ``x``, with ``d/dx = 1`` everywhere, so that a model can be trained for the
    format in which it will be served.

    Args:
      x: array of any float dtype.
      format: name of a codec.
      axis: axis that is split into blocks; for a kernel, the contraction axis.

    Raises:
      ValueError: the format does not exist, or the axis cannot be split into blocks of the format.
      TypeError: the array is not a float array.
    """
    row = codec(format)
    return jnp.moveaxis(row.decode(row.encode(x, axis), x.dtype.name), -1, axis)


@fake_quantize.defjvp
def _straight_through(format: str, axis: int, primals, tangents):
    return fake_quantize(primals[0], format, axis), tangents[0]
