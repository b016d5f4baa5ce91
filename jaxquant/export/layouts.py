"""Encoders and decoders of the layouts of quantized weights in checkpoints.

Weights are float32 numpy arrays [out, in]. All formats are decoded in float32, and each product is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.config.recipes import RECIPES
from jaxquant.core.dtypes import element
from jaxquant.core.quantize import quantize
from jaxquant.core.scales import scale_of_amax
from jaxquant.core.tensor_spec import TensorSpec, keep_grid
from jaxquant.formats import codec

E4M3_MAX, E2M1_MAX = 448.0, 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_SMALLEST = float(np.finfo(np.float32).tiny)
_CHUNK = 1 << 22
_CODEC_CHUNK, _SMALL_CODEC_CHUNK = 1 << 20, 1 << 16
Tensors = dict[str, np.ndarray]


def scale_of(amax: np.ndarray | list[float] | float, largest: float) -> np.ndarray:
    """Return the scale ``amax · (1 / largest)`` in float32, computed as in training; 1 for an amax of zero."""
    scale = np.asarray(amax, np.float32) * np.float32(1 / largest)
    return np.where(scale >= _SMALLEST, scale, np.float32(1)).astype(np.float32)


def weight_scale(weight: np.ndarray, dtype: str, block: tuple[int, int]) -> np.ndarray:
    """Return the scale of each block, computed as in training."""
    spec = keep_grid(TensorSpec(dtype))
    if spec.has_grid_scale:
        weight = np.where(weight < 0, weight * np.float32(spec.negative_factor), weight)
    amax = jnp.asarray(block_amax(weight, block))
    return np.asarray(scale_of_amax(amax, element(dtype).max, spec, _SMALLEST)[0])


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to nearest in an element type, saturating at its limits; integer types are returned as int8."""
    kind = element(dtype)
    if kind.kind == "int":
        return np.clip(np.rint(x), -kind.max - 1, kind.max).astype(np.int8)
    return np.clip(x, -kind.max, kind.max).astype(kind.dtype)


def encode_scaled(weight: np.ndarray, scale: np.ndarray, dtype: str, block: tuple[int, int] | None) -> np.ndarray:
    """Return ``cast(weight / scale)``, computed in chunks of rows; ``scale`` is per tensor, per row or per block."""
    parts = row_chunks(weight.shape, 1 if block is None else block[0])
    return np.concatenate([cast(weight[rows] / _expand(scale, weight.shape, block, rows), dtype) for rows in parts])


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
    part = np.repeat(scale[start // block[0] : -(-stop // block[0])], block[0], axis=0)[: stop - start]
    return part if part.shape[1] == 1 else np.repeat(part, block[1], axis=1)[:, : shape[1]]


def block_amax(weight: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the largest magnitude of each block; blocks at the edges may be smaller."""
    by_rows = np.maximum.reduceat(np.abs(weight), np.arange(0, weight.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, weight.shape[1], block[1]), axis=1)


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Pack eight integers, each plus 8, into an int32; the first integer is in the lowest bits."""
    unsigned = (codes.astype(np.int8) + 8).view(np.uint8)
    return _pack_nibbles(np.pad(unsigned, ((0, 0), (0, -codes.shape[1] % 8)))).view(np.int32)


def unpack_int(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Unpack integers of 4 or 8 bits to int8 [rows, ``columns``]; inverse of ``pack_int4`` for 4 bits."""
    stored = np.ascontiguousarray(packed).view(np.uint8)
    stored = _unpack_nibbles(stored) if bits == 4 else stored
    return (stored[:, :columns] - np.uint8(2 ** (bits - 1))).view(np.int8)


def pack_e2m1(elements: np.ndarray) -> np.ndarray:
    """Pack pairs of float4_e2m1fn elements into bytes, the element with the even index in the low bits."""
    return _pack_nibbles(np.asarray(elements).view(np.uint8) & 0xF)


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Unpack float4_e2m1fn elements from bytes; the low four bits are the first element of a pair."""
    return _unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_nvfp4(weight: np.ndarray, tensor_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 elements, and an e4m3 scale for each 16 neighbouring elements of a row.

    The e4m3 scales are relative to ``tensor_scale``, which must be at least ``max|x| / 2688``.
    """
    rows, depth = weight.shape
    outer = np.float32(tensor_scale)
    packed = np.empty((rows, depth // 2), np.uint8)
    scales = np.empty((rows, depth // 16), ml_dtypes.float8_e4m3fn)
    for part in row_chunks(weight.shape, 1):
        blocks = weight[part].reshape(-1, depth // 16, 16)
        scale = cast(np.abs(blocks).max(-1) * np.float32(1 / E2M1_MAX) / outer, "float8_e4m3fn")
        product = scale.astype(np.float32) * outer
        steps = np.where(product >= _SMALLEST, product, np.float32(1))[..., None]
        packed[part] = pack_e2m1(cast(blocks / steps, "float4_e2m1fn").reshape(-1, depth))
        scales[part] = scale
    return packed, scales


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


def _in_chunks(run: Callable[[np.ndarray], dict[str, jax.Array]], blocks: np.ndarray, elements: int) -> Tensors:
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


def row_chunks(shape: tuple[int, ...], multiple: int) -> list[slice]:
    """Split rows into chunks of a few million elements; each chunk holds a multiple of ``multiple`` rows."""
    size = max(1, _CHUNK // max(1, shape[1]) // multiple) * multiple
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]
