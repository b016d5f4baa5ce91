"""The table of codecs, with one row for each tensor format."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxquant.core.qtensor import ENCODINGS
from jaxquant.core.typed import nearest
from jaxquant.formats import ggml, microscaling
from jaxquant.formats.codec import Codec, Parts
from jaxquant.formats.packing import PACKED_DTYPES, pack, unpack


def _four_bits(dtype: str) -> Codec:
    def encode_last(x: jax.Array) -> Parts:
        if x.dtype.name != dtype:
            limits = jnp.finfo(dtype) if "float" in dtype else jnp.iinfo(dtype)
            x = jnp.clip(x.astype(jnp.float32), float(limits.min), float(limits.max))
            x = (x if "float" in dtype else jnp.round(x)).astype(dtype)
        return {"qvalue": pack(x)}

    def decode_last(parts: Parts) -> jax.Array:
        return unpack(parts["qvalue"], dtype, 2 * parts["qvalue"].shape[-1]).astype(jnp.float32)

    return Codec(dtype, 2, 1, encode_last, decode_last)


CODECS: dict[str, Codec] = {row.name: row for row in (*map(_four_bits, PACKED_DTYPES), *microscaling.ROWS, *ggml.ROWS)}
"""Every tensor format by name. The first three contain only elements, two to a byte, without a scale."""

ENCODINGS.update({row.name: row for row in CODECS.values() if row.encoding is not None})


def codec(name: str) -> Codec:
    """Look up a codec by name, ignoring case.

    Raises:
      ValueError: the codec does not exist; the error suggests a similar name.
    """
    row = CODECS.get(name.lower())
    if row is None:
        raise ValueError(f"{name!r} is not a tensor format; {nearest(name, CODECS)}")
    return row


class BlockParameters(NamedTuple):
    """Sizes of a block.

    Attributes:
      elements_per_block: number of elements in a block.
      block_size: number of bytes in a block.
    """

    elements_per_block: int
    block_size: int


def block_parameters(name: str) -> BlockParameters:
    """Return the number of elements and bytes in a block of a format, such as ``(256, 144)`` for ``q4_k``."""
    row = codec(name)
    return BlockParameters(row.elements_per_block, row.bytes_per_block)
