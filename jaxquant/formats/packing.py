"""Packing of four-bit and six-bit elements into bytes, for memory and files, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

PACKED_DTYPES = ("int4", "uint4", "float4_e2m1fn")
"""Element types that ``pack`` supports, all with four bits."""


def pack(x: jax.Array, axis: int = -1) -> jax.Array:
    """Pack four-bit elements two to a byte: ``byte = bits(x[2i]) | bits(x[2i + 1]) << 4``, low nibble first.

    Args:
      x: elements of one of ``PACKED_DTYPES``.
      axis: axis along which neighbours share a byte. If its size is odd, the last high nibble is 0.

    Returns:
      uint8, with the size of ``axis`` halved and rounded up.

    Raises:
      TypeError: the dtype is not supported.
    """
    _check(x.dtype.name)
    nibbles = jnp.moveaxis(jax.lax.bitcast_convert_type(x, "uint4").astype(jnp.uint8), axis, -1)
    if nibbles.shape[-1] % 2:
        nibbles = jnp.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, 1)])
    return jnp.moveaxis(pack_codes(nibbles, 4), -1, axis)


def unpack(packed: jax.Array, dtype: str, size: int, axis: int = -1) -> jax.Array:
    """Unpack the result of ``pack``.

    Args:
      packed: uint8 array.
      dtype: name of the element type, one of ``PACKED_DTYPES``.
      size: number of elements along ``axis``; if it is odd, the last high nibble is dropped.
      axis: axis that was packed.

    Raises:
      TypeError: ``dtype`` does not have four bits, or ``packed`` is not uint8.
      ValueError: ``size`` does not match the number of bytes.
    """
    _check(dtype)
    if packed.dtype.name != "uint8":
        raise TypeError(
            f"packed elements are uint8, got {packed.dtype.name}; pass the result of jaxquant.formats.packing.pack"
        )
    if packed.shape[axis] != -(-size // 2):
        raise ValueError(
            f"size {size} does not match axis {axis} of the packed shape {packed.shape}; "
            f"{packed.shape[axis]} bytes hold {2 * packed.shape[axis] - 1} or {2 * packed.shape[axis]} elements"
        )
    moved = jnp.moveaxis(packed, axis, -1)
    nibbles = jnp.stack([moved & 0xF, moved >> 4], axis=-1).reshape(*moved.shape[:-1], 2 * moved.shape[-1])
    elements = jax.lax.bitcast_convert_type(nibbles[..., :size].astype(jnp.uint4), dtype)
    return jnp.moveaxis(elements, -1, axis)


def pack_codes(codes: UInt8[Array, "... K"], bits: int) -> UInt8[Array, "... B"]:
    """Pack the low ``bits`` of each byte into a stream, along the last axis: 8 bits unchanged, 2 codes of 4 bits in a
    byte, 4 codes of 6 bits in 3 bytes.

    Element i starts at bit ``i · bits``, counted from the lowest bit of the first byte.

    Args:
      codes: values below ``2**bits``, with a last axis that fills complete bytes.
      bits: number of bits: 4, 6 or 8.
    """
    if bits == 8:
        return codes
    # Read neighbours as one word. XLA:CPU would fuse strided slices into the producer of the codes, and then compute
    # elements one by one.
    if bits == 4:
        pair = jax.lax.bitcast_convert_type(_grouped(codes, 2), jnp.uint16)
        return (pair | pair >> 4).astype(jnp.uint8)
    four = jax.lax.bitcast_convert_type(_grouped(codes, 4), jnp.uint32)
    stream = four & 0x3F | four >> 2 & 0xFC0 | four >> 4 & 0x3F000 | four >> 6 & 0xFC0000
    three = jax.lax.bitcast_convert_type(stream, jnp.uint8)[..., :3]
    return three.reshape(*codes.shape[:-1], codes.shape[-1] * 3 // 4)


def unpack_codes(packed: UInt8[Array, "... B"], bits: int) -> UInt8[Array, "... K"]:
    """Unpack the result of ``pack_codes``."""
    if bits == 8:
        return packed
    if bits == 4:
        return _interleave(packed & 0xF, packed >> 4)
    a, b, c = (packed[..., index::3] for index in range(3))
    return _interleave(a & 0x3F, a >> 6 | (b & 0xF) << 2, b >> 4 | (c & 3) << 4, c >> 2)


def _grouped(codes: jax.Array, count: int) -> jax.Array:
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // count, count)


def _interleave(*parts: jax.Array) -> jax.Array:
    stacked = jnp.stack(parts, axis=-1)
    return stacked.reshape(*stacked.shape[:-2], stacked.shape[-2] * stacked.shape[-1])


def _check(dtype: str) -> None:
    if dtype not in PACKED_DTYPES:
        raise TypeError(f"{dtype} is not a four-bit element type; use one of {', '.join(PACKED_DTYPES)}")
