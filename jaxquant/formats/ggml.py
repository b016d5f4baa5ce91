"""GGML's block formats, decoded as llama.cpp and GGUF files define them.

Blocks are bytes along the last axis, little endian. All products below are exact in float32, except the last product of
Q6_K, which rounds once. A fused multiply-add therefore changes no bit.

Source: ggml/src/ggml-common.h and ggml-quants.c of ggml; ``gguf.quants`` of llama.cpp.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxquant.formats import ggml_encode
from jaxquant.formats.codec import Codec, Parts, merge_last, split_blocks

SUPER_BLOCK = 256


def _floats(two_bytes: UInt8[Array, "... n 2"]) -> Float[Array, "... n"]:
    return jax.lax.bitcast_convert_type(two_bytes, jnp.float16).astype(jnp.float32)


def _bit_fields(data: UInt8[Array, "... n"], shifts: tuple[int, ...], mask: int) -> UInt8[Array, "... shifts n"]:
    """Return the bit fields of each byte, fields first."""
    fields = jnp.asarray(shifts, jnp.uint8).reshape((1,) * (data.ndim - 1) + (-1, 1))
    return data[..., None, :] >> fields & mask


def _decode_bf16(data: UInt8[Array, "... 2"]) -> Float[Array, "... 1"]:
    # Shift the bits, because a cast may flush subnormal numbers.
    bits = data[..., 0].astype(jnp.uint32) << 16 | data[..., 1].astype(jnp.uint32) << 24
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[..., None]


def _decode_f16(data: UInt8[Array, "... 2"]) -> Float[Array, "... 1"]:
    return _floats(data)[..., None]


def _halves(first: UInt8[Array, "... n"], second: UInt8[Array, "... n"]) -> UInt8[Array, "... 2 n"]:
    """Return both arrays, one after the other, with ``where`` instead of a concatenation.

    XLA:CPU compiles a concatenation of short rows to a branch for each element, which prevents vectorization of the
    loops around it.
    """
    return jnp.where(jnp.arange(2)[:, None] == 0, first[..., None, :], second[..., None, :])


def _decode_q4_0(data: UInt8[Array, "... 18"]) -> Float[Array, "... 32"]:
    """Return ``d · (q − 8)``: float16 d, then 16 bytes whose low nibbles are elements 0 to 15."""
    nibbles = merge_last(_halves(data[..., 2:] & 0xF, data[..., 2:] >> 4)).astype(jnp.float32)
    return _floats(data[..., :2])[..., None] * (nibbles - 8)


def _decode_q8_0(data: UInt8[Array, "... 34"]) -> Float[Array, "... 32"]:
    """Return ``d · q``: float16 d, then 32 int8."""
    values = jax.lax.bitcast_convert_type(data[..., 2:], jnp.int8).astype(jnp.float32)
    return values * _floats(data[..., :2])[..., None]


def unpack_scales(data: UInt8[Array, "... 12"]) -> tuple[UInt8[Array, "... 8"], UInt8[Array, "... 8"]]:
    """Return the eight 6-bit scales and the eight 6-bit minimums of a Q4_K or Q5_K block."""
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = _halves(first & 0x3F, third & 0xF | first >> 2 & 0x30)
    minimums = _halves(second & 0x3F, third >> 4 | second >> 2 & 0x30)
    return merge_last(scales), merge_last(minimums)


def _decode_affine_k(data: UInt8[Array, "... bytes"], bits: int) -> Float[Array, "... 256"]:
    """Return ``d · scale · q − dmin · minimum`` of Q4_K and Q5_K, with eight sub-blocks of 32.

    Layout: float16 d and dmin; 12 bytes of scales and minimums; in Q5_K 32 bytes of fifth bits (bit j belongs to
    sub-block j); 128 bytes, in which the low and high nibbles of the 32 bytes from 32p on are sub-blocks 2p and 2p + 1.
    """
    scales, minimums = unpack_scales(data[..., 4:16])
    nibbles = split_blocks(data[..., -128:], 32)
    values = jnp.stack([nibbles & 0xF, nibbles >> 4], axis=-2).reshape(*data.shape[:-1], 8, 32)
    if bits == 5:
        values = values | _bit_fields(data[..., 16:48], tuple(range(8)), 1) << 4
    step = _floats(data[..., 0:2])[..., None] * scales.astype(jnp.float32)
    offset = _floats(data[..., 2:4])[..., None] * minimums.astype(jnp.float32)
    return merge_last(step[..., None] * values.astype(jnp.float32) - offset[..., None])


def _decode_q6_k(data: UInt8[Array, "... 210"]) -> Float[Array, "... 256"]:
    """Return ``d · scale · (q − 32)``, with sixteen sub-blocks of 16.

    Layout: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8 scales, float16 d. In each half of 128
    elements, the four groups of 32 are the low nibbles of the first 32 bytes, the low nibbles of the next 32 bytes, the
    high nibbles of the first 32 bytes, and the high nibbles of the next 32 bytes.
    """
    low, high = split_blocks(data[..., :128], 64), split_blocks(data[..., 128:192], 32)  # [..., half, bytes]
    nibbles = (low[..., :32] & 0xF, low[..., 32:] & 0xF, low[..., :32] >> 4, low[..., 32:] >> 4)
    groups = [part | (high >> 2 * group & 3) << 4 for group, part in enumerate(nibbles)]
    quants = merge_last(merge_last(jnp.stack(groups, axis=-2)))
    scales = jax.lax.bitcast_convert_type(data[..., 192:208], jnp.int8).astype(jnp.float32)
    step = _floats(data[..., 208:])[..., None] * scales
    return merge_last(step[..., None] * (split_blocks(quants, 16).astype(jnp.float32) - 32))


def _ggml_codec(name: str, elements: int, size: int, encode_blocks, decode_blocks) -> Codec:
    def encode_last(x: jax.Array) -> Parts:
        return {"blocks": merge_last(encode_blocks(split_blocks(x.astype(jnp.float32), elements)))}

    def decode_last(parts: Parts) -> jax.Array:
        return merge_last(decode_blocks(split_blocks(parts["blocks"], size)))

    return Codec(name.lower(), elements, size, encode_last, decode_last, encoding=name)


ROWS = (
    _ggml_codec("F16", 1, 2, ggml_encode.encode_f16, _decode_f16),
    _ggml_codec("BF16", 1, 2, ggml_encode.encode_bf16, _decode_bf16),
    _ggml_codec("Q8_0", 32, 34, ggml_encode.encode_q8_0, _decode_q8_0),
    _ggml_codec("Q4_0", 32, 18, ggml_encode.encode_q4_0, _decode_q4_0),
    _ggml_codec("Q4_K", SUPER_BLOCK, 144, ggml_encode.encode_q4_k, functools.partial(_decode_affine_k, bits=4)),
    _ggml_codec("Q5_K", SUPER_BLOCK, 176, ggml_encode.encode_q5_k, functools.partial(_decode_affine_k, bits=5)),
    _ggml_codec("Q6_K", SUPER_BLOCK, 210, ggml_encode.encode_q6_k, _decode_q6_k),
)
