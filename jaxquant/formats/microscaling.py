"""MX and NVFP4: small floats with a scale for each 32 or 16 neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.formats.codec import Codec, Parts, merge_last, split_blocks
from jaxquant.formats.minifloat import (
    E8M0_BIAS,
    E8M0_NAN,
    MINIFLOATS,
    SMALLEST_NORMAL,
    amax,
    decode_minifloat,
    encode_e8m0,
    encode_minifloat,
    power_of_two,
    times_power_of_two,
)
from jaxquant.formats.packing import pack_codes, unpack_codes

MX_BLOCK = 32
NVFP4_BLOCK = 16
NVFP4_MAX = 6.0 * 448.0


def encode_mx(x: Float[Array, "... K"], dtype: str, rounding: str = "up") -> Parts:
    """Encode ``x ≈ element · 2**(scale − 127)`` in blocks of 32.

    ``scale = encode_e8m0(max|x| of the block)``; elements are ``x · 2**(127 − scale)`` rounded to nearest even. A block
    that contains a value that is not finite decodes to NaN.

    Args:
      x: float array; K must be a multiple of 32.
      dtype: element type, a key of ``MINIFLOATS``.
      rounding: rounding of the scale, ``up`` or ``floor``; see ``encode_e8m0``.

    Returns:
      ``qvalue``, uint8: the elements, packed with the low bits first; and ``scale``, uint8: one scale for each block.

    Source: OCP Microscaling Formats (MX) v1.0, sections 5.1 and 6.3.
    """
    kind = MINIFLOATS[dtype]
    blocks = split_blocks(x.astype(jnp.float32), MX_BLOCK)
    scale = encode_e8m0(amax(blocks), kind, rounding)
    inverse = power_of_two(E8M0_BIAS - scale.astype(jnp.int32))[..., None]
    codes = encode_minifloat(jnp.where(jnp.isfinite(blocks), blocks * inverse, 0), kind)
    return {"qvalue": pack_codes(merge_last(codes), kind.bits), "scale": scale}


def decode_mx(parts: Parts, dtype: str) -> Float[Array, "... K"]:
    """Return ``element · 2**(scale − 127)``, exactly: subnormal results are kept, and scale 255 is NaN."""
    kind = MINIFLOATS[dtype]
    values = split_blocks(decode_minifloat(unpack_codes(parts["qvalue"], kind.bits), kind), MX_BLOCK)
    scale = parts["scale"].astype(jnp.int32)[..., None]
    scaled = times_power_of_two(values, scale - E8M0_BIAS)
    return merge_last(jnp.where(scale == E8M0_NAN, jnp.nan, scaled))


def encode_nvfp4(x: Float[Array, "... K"]) -> Parts:
    """Encode ``x ≈ e2m1 · (scale · tensor_scale)``, with an e4m3 scale for 16 neighbours and a float32 tensor scale.

    ``tensor_scale = max|x| / 2688``, ``scale = e4m3(max|x| of the block / 6 / tensor_scale)``, elements
    ``x / (scale · tensor_scale)`` rounded to nearest even and clipped to ±6. A block with scale 0 is encoded as zeros.
    An array of zeros has tensor_scale 1.

    Returns:
      ``qvalue``, uint8, low nibble first; ``scale``, float8_e4m3fn, one for each block; ``tensor_scale``, float32,
      shape ().

    Source: NVIDIA's two-level scaling, as in ModelOpt and torchao's ``nvfp4_quantize``.
    """
    kind, scales = MINIFLOATS["float4_e2m1fn"], MINIFLOATS["float8_e4m3fn"]
    blocks = split_blocks(x.astype(jnp.float32), NVFP4_BLOCK)
    block_amax = amax(blocks)
    largest = amax(block_amax.reshape(-1))
    # A quotient below the smallest normal number would be flushed to 0.
    tensor_scale = jnp.where(largest == 0, 1.0, jnp.maximum(largest / NVFP4_MAX, SMALLEST_NORMAL))
    scale = prevent_excess_precision(jnp.minimum(block_amax / kind.max / tensor_scale, scales.max).astype(scales.name))
    product = scale.astype(jnp.float32) * tensor_scale
    inverse = jnp.where(product >= SMALLEST_NORMAL, 1 / product, 0)[..., None]
    codes = encode_minifloat(blocks * inverse, kind)
    return {"qvalue": pack_codes(merge_last(codes), 4), "scale": scale, "tensor_scale": tensor_scale}


def decode_nvfp4(parts: Parts) -> Float[Array, "... K"]:
    """Return ``e2m1 · (scale · tensor_scale)``, each product rounded to float32."""
    values = decode_minifloat(unpack_codes(parts["qvalue"], 4), MINIFLOATS["float4_e2m1fn"])
    scale = parts["scale"].astype(jnp.float32) * parts["tensor_scale"]
    return merge_last(split_blocks(values, NVFP4_BLOCK) * scale[..., None])


def _mx_codec(name: str, dtype: str) -> Codec:
    size = MX_BLOCK * MINIFLOATS[dtype].bits // 8 + 1

    def encode_last(x: jax.Array) -> Parts:
        return encode_mx(x, dtype)

    def decode_last(parts: Parts) -> jax.Array:
        return decode_mx(parts, dtype)

    return Codec(name, MX_BLOCK, size, encode_last, decode_last)


ROWS = (
    _mx_codec("mxfp8", "float8_e4m3fn"),
    _mx_codec("mxfp8_e5m2", "float8_e5m2"),
    _mx_codec("mxfp6_e2m3", "float6_e2m3fn"),
    _mx_codec("mxfp6_e3m2", "float6_e3m2fn"),
    _mx_codec("mxfp4", "float4_e2m1fn"),
    Codec("nvfp4", NVFP4_BLOCK, NVFP4_BLOCK // 2 + 1, encode_nvfp4, decode_nvfp4),
)
