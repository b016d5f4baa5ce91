"""Encoders and decoders of the layouts of quantized weights in checkpoints.

Weights are float32 arrays [out, in]. All formats are decoded in float32, and each product is rounded once. Encoders
accept numpy arrays, which are encoded chunk by chunk in host memory, and tracers of ``jax.jit``; the bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from jaxquant.config.recipes import RECIPES
from jaxquant.core.blocks import reduce_blocks
from jaxquant.core.dtypes import element
from jaxquant.core.quantize import quantize
from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.core.scales import scale_of_amax
from jaxquant.core.tensor_spec import TensorSpec, keep_grid
from jaxquant.formats import codec
from jaxquant.formats.packing import pack

E4M3_MAX, E2M1_MAX = 448.0, 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_SMALLEST = float(np.finfo(np.float32).tiny)
_CHUNK = 1 << 22
_CODEC_CHUNK, _SMALL_CODEC_CHUNK = 1 << 20, 1 << 16
Tensors = dict[str, np.ndarray]


def is_traced(x: Any) -> bool:
    """Return whether an array is a tracer of ``jax.jit``, which is encoded on its devices."""
    return isinstance(x, Tracer)


def to_host(x: Any) -> Any:
    """Return an array in host memory; a tracer is returned unchanged."""
    return x if is_traced(x) else np.asarray(x)


def namespace(*arrays: Any) -> Any:
    """Return the module that computes with arrays: ``jax.numpy`` if one is a tracer, otherwise ``numpy``."""
    return jnp if any(map(is_traced, arrays)) else np


def transpose(matrix: Any) -> Any:
    """Return the transposed matrix, contiguous in host memory."""
    return matrix.T if is_traced(matrix) else np.ascontiguousarray(matrix.T)


def scale_of(amax: np.ndarray | list[float] | float, largest: float) -> np.ndarray:
    """Return the scale ``amax · (1 / largest)`` in float32, computed as in training; 1 for an amax of zero."""
    xp = namespace(amax)
    scale = xp.asarray(amax, np.float32) * np.float32(1 / largest)
    return xp.where(scale >= _SMALLEST, scale, np.float32(1)).astype(np.float32)


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """Return ``1 / scale`` in float32."""
    xp = namespace(scale)
    # XLA would simplify the reciprocal of a reciprocal; the minimum, which changes no number, prevents this.
    return xp.minimum(np.float32(1) / scale, np.finfo(np.float32).max)


def divide(x: Any, scale: Any) -> Any:
    """Return ``x / scale``, where the scale is broadcast."""
    # XLA would multiply by the reciprocal of a broadcast scale; the selection, which depends on x, prevents this.
    return x / (jnp.where(x == x, scale, np.float32(1)) if is_traced(x) else scale)


def shorten(scale: Any, dtype: Any) -> Any:
    """Round scales to bfloat16, or return them unchanged if that is not ``dtype``."""
    if dtype == ml_dtypes.bfloat16 and is_traced(scale):
        # XLA would drop a cast to bfloat16 before a cast to float32.
        scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    return scale.astype(dtype)


def weight_scale(weight: Any, dtype: str, block: tuple[int, int]) -> np.ndarray:
    """Return the scale of each block, computed as in training."""
    spec = keep_grid(TensorSpec(dtype))
    if spec.has_grid_scale:
        weight = namespace(weight).where(weight < 0, weight * np.float32(spec.negative_factor), weight)
    amax = jnp.asarray(block_amax(weight, block))
    return to_host(scale_of_amax(amax, element(dtype).max, spec, _SMALLEST)[0])


def cast(x: Any, dtype: str) -> Any:
    """Round to nearest in an element type, saturating at its limits; integer types are returned as int8."""
    kind, xp = element(dtype), namespace(x)
    if kind.kind == "int":
        return xp.clip(xp.rint(x), -kind.max - 1, kind.max).astype(np.int8)
    rounded = xp.clip(x, -kind.max, kind.max).astype(kind.dtype)
    return prevent_excess_precision(rounded) if is_traced(x) else rounded


def encode_scaled(weight: np.ndarray, scale: np.ndarray, dtype: str, block: tuple[int, int] | None) -> np.ndarray:
    """Return ``cast(weight / scale)``, computed in chunks of rows; ``scale`` is per tensor, per row or per block."""
    parts = encoded_chunks(weight, 1 if block is None else block[0])
    found = [cast(divide(weight[rows], _expand(scale, weight.shape, block, rows)), dtype) for rows in parts]
    return namespace(weight).concatenate(found)


def decode_scaled(
    weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None = None, zero_point: np.ndarray | None = None
) -> np.ndarray:
    """Return ``(weight − zero_point) · scale`` for elements of any type; ``scale`` is per tensor, row or block."""
    out = np.empty(weight.shape, np.float32)
    for rows in row_chunks(weight.shape, 1 if block is None or scale.size == 1 else block[0]):
        part = weight[rows].astype(np.float32)
        if zero_point is not None:
            part -= _expand(zero_point, weight.shape, block, rows)
        np.multiply(part, _expand(scale, weight.shape, block, rows), out=out[rows])
    return out


def check_finite(array: np.ndarray, name: str) -> np.ndarray:
    """Return a decoded array after checking every value, chunk by chunk.

    Raises:
      ValueError: a value is not finite; the message names the tensor.
    """
    if not is_finite(array):
        raise ValueError(f"{name} decodes to values that are not finite, so its scales are damaged; export it again")
    return array


def is_finite(array: np.ndarray) -> bool:
    """Return whether every value is finite, checked chunk by chunk."""
    flat = array.reshape(-1)
    return all(np.isfinite(flat[start : start + _CHUNK]).all() for start in range(0, flat.size, _CHUNK))


def _expand(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None, rows: slice) -> np.ndarray:
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    if block is None:
        return scale.reshape(-1, 1)[rows]
    start, stop, _ = rows.indices(shape[0])
    repeat = namespace(scale).repeat
    part = repeat(scale[start // block[0] : -(-stop // block[0])], block[0], axis=0)[: stop - start]
    return part if part.shape[1] == 1 else repeat(part, block[1], axis=1)[:, : shape[1]]


def block_amax(weight: Any, block: tuple[int, int]) -> Any:
    """Return the largest magnitude of each block; blocks at the edges may be smaller."""
    if is_traced(weight):
        return reduce_blocks(jnp.abs(weight), block, jnp.max)
    by_rows = np.maximum.reduceat(np.abs(weight), np.arange(0, weight.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, weight.shape[1], block[1]), axis=1)


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Pack eight integers, each plus 8, into an int32; the first integer is in the lowest bits."""
    unsigned = (codes.astype(np.int8) + 8).view(np.uint8)
    unsigned = namespace(codes).pad(unsigned, ((0, 0), (0, -codes.shape[1] % 8)))
    return _pack_nibbles(unsigned).view(np.int32)


def unpack_int(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Unpack integers of 4 or 8 bits to int8 [rows, ``columns``]; inverse of ``pack_int4`` for 4 bits."""
    stored = np.ascontiguousarray(packed).view(np.uint8)
    stored = _unpack_nibbles(stored) if bits == 4 else stored
    return (stored[:, :columns] - np.uint8(2 ** (bits - 1))).view(np.int8)


def pack_e2m1(elements: Any) -> Any:
    """Pack pairs of float4_e2m1fn elements into bytes, the element with the even index in the low bits."""
    if is_traced(elements):
        return pack(elements)
    return _pack_nibbles(np.asarray(elements).view(np.uint8) & 0xF)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Unpack float4_e2m1fn elements from bytes; the low four bits are the first element of a pair."""
    return _unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_nvfp4(weight: np.ndarray, tensor_scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 elements, and an e4m3 scale for each 16 neighbouring elements of a row.

    The e4m3 scales are relative to ``tensor_scale``, which must be at least ``max|x| / 2688``.
    """
    xp, depth = namespace(weight), weight.shape[1]
    packed, scales = [], []
    for part in encoded_chunks(weight, 1):
        blocks = weight[part].reshape(-1, depth // 16, 16)
        scale = cast(divide(abs(blocks).max(-1) * np.float32(1 / E2M1_MAX), tensor_scale), "float8_e4m3fn")
        product = scale.astype(np.float32) * tensor_scale
        steps = xp.where(product >= _SMALLEST, product, np.float32(1))[..., None]
        packed.append(pack_e2m1(cast(divide(blocks, steps), "float4_e2m1fn").reshape(-1, depth)))
        scales.append(scale)
    return xp.concatenate(packed), xp.concatenate(scales)


def encode_blocks(format: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Encode an array along its last axis, in chunks of equal shape, so that the encoder compiles once.

    Args:
      format: name of a codec that encodes each block to one row.
      x: float array; its last axis is a multiple of the block.
    """
    row = codec(format)
    blocks = x.reshape(-1, row.elements_per_block)
    found = _in_chunks(lambda part: row.encode(jnp.asarray(part, jnp.float32)), blocks, row.elements_per_block)
    return {name: part.reshape(*x.shape[:-1], -1) for name, part in found.items()}


def decode_blocks(format: str, data: np.ndarray) -> np.ndarray:
    """Decode the bytes of a format to float32, in chunks of one shape; the inverse of ``encode_blocks``."""
    row = codec(format)
    blocks = data.reshape(-1, row.bytes_per_block)
    found = _in_chunks(lambda part: {"": row.decode({"blocks": jnp.asarray(part)})}, blocks, row.elements_per_block)
    return found[""].reshape(*data.shape[:-1], -1)


def _in_chunks(run: Callable[[np.ndarray], dict[str, Any]], blocks: np.ndarray, elements: int) -> Tensors:
    if is_traced(blocks):
        return run(blocks)
    size = max(1, _CODEC_CHUNK // elements)
    small = _SMALL_CODEC_CHUNK // elements
    step = small if len(blocks) <= small else size
    parts = []
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        filled = np.pad(part, ((0, step - len(part)), (0, 0))) if len(part) < step else part
        parts.append({name: np.asarray(each)[: len(part)] for name, each in run(filled).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def encode_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 elements [..., in / 2] and E8M0 scales as bytes [..., in / 32]."""
    found = _in_chunks(_encode_mxfp4, weight.reshape(-1, 32), 32)
    packed, scale = pack_e2m1(found["qvalue"]), found["scale"].view(np.uint8)
    return packed.reshape(*weight.shape[:-1], -1), scale.reshape(*weight.shape[:-1], -1)


@jax.jit
def _encode_mxfp4(blocks: jax.Array) -> dict[str, jax.Array]:
    recipe = RECIPES["mxfp4w"].recipe
    assert recipe is not None
    return quantize(blocks, recipe.fwd.rhs, (1,)).parts  # pyright: ignore[reportArgumentType]


def encoded_chunks(weight: np.ndarray, multiple: int) -> list[slice]:
    """Return the chunks of rows that are encoded together: ``row_chunks``, or one chunk for a tracer."""
    return [slice(0, len(weight))] if is_traced(weight) else row_chunks(weight.shape, multiple)


def row_chunks(shape: tuple[int, ...], multiple: int) -> list[slice]:
    """Split rows into chunks of a few million elements; each chunk holds a multiple of ``multiple`` rows."""
    size = max(1, _CHUNK // max(1, shape[1]) // multiple) * multiple
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]
