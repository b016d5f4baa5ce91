"""MAX's ``QuantizationEncoding``: GGML's block formats by name, with the sizes of their blocks."""

from __future__ import annotations

import enum

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxquant.formats import BlockParameters, Codec, block_parameters, codec


class QuantizationEncoding(enum.Enum):
    """Format of a quantized weight in bytes."""

    Q4_0 = "Q4_0"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    GPTQ = "GPTQ"

    @property
    def name(self) -> str:
        """Lower-case name, such as ``q4_k``."""
        return self.value.lower()

    @property
    def is_gguf(self) -> bool:
        """Whether GGUF files use the format."""
        return self is not QuantizationEncoding.GPTQ

    @property
    def _codec(self) -> Codec:
        if not self.is_gguf:
            raise NotImplementedError(
                "quantization encoding gptq has no blocks of bytes; use one of q4_0, q4_k, q5_k, q6_k"
            )
        return codec(self.name)

    @property
    def block_parameters(self) -> BlockParameters:
        """Number of elements and number of bytes in a block.

        Raises:
          NotImplementedError: GPTQ has no blocks of bytes.
        """
        return block_parameters(self._codec.name)

    @property
    def elements_per_block(self) -> int:
        return self._codec.elements_per_block

    @property
    def block_size(self) -> int:
        """Number of bytes in a block."""
        return self._codec.bytes_per_block

    def quantize(self, tensor: Float[Array, "... K"]) -> UInt8[Array, "... B"]:
        """Encode each row of a float array; K elements become ``K / elements_per_block · block_size`` bytes.

        Raises:
          ValueError: K is not a multiple of ``elements_per_block``.
          NotImplementedError: GPTQ has no blocks of bytes.
        """
        return self._codec.encode(jnp.asarray(tensor))["blocks"]

    def dequantize(self, data: UInt8[Array, "... B"]) -> Float[Array, "... K"]:
        """Decode the result of ``quantize`` to float32.

        Raises:
          ValueError: the size of the last axis is not a multiple of ``block_size``.
          TypeError: the data is not uint8.
          NotImplementedError: GPTQ has no blocks of bytes.
        """
        data, size = jnp.asarray(data), self.block_size
        if data.dtype != jnp.uint8:
            raise TypeError(f"{self.name} blocks must be uint8, got {data.dtype.name}; view the bytes as uint8")
        if data.ndim == 0 or data.shape[-1] % size:
            raise ValueError(f"the last axis of data {data.shape} must be a multiple of the block size {size}")
        return self._codec.decode({"blocks": data})
