"""How weights of quantized linear layers lie in checkpoints: encoded and decoded, one function of each a layout.

Weights are [out, in] float32 in numpy. All are decoded in float32, products rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.config.recipes import RECIPES
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import quantize
from jaxquant.formats import codec

E4M3_MAX, E2M1_MAX = 448.0, 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_SMALLEST = float(np.finfo(np.float32).tiny)
_CHUNK = 1 << 22
_BLOCKS_AT_ONCE, _FEW = 1 << 20, 1 << 16
Tensors = dict[str, np.ndarray]


class Kept(NamedTuple):
    """A weight [out, in] with the numbers that it had: elements, scales, and the one above them [1], 1 for none."""

    elements: np.ndarray
    scale: np.ndarray
    outer: np.ndarray


class Blocks(NamedTuple):
    """What the elements of a format are, and which of them share a scale.

    Attributes:
      dtype, scale_dtype: of elements and scales, by name.
      rows, columns: of a block of a weight [out, in].
      has_outer: whether one float32 scale stands above the others.
    """

    dtype: str
    scale_dtype: str
    rows: int
    columns: int
    has_outer: bool = False

    def of(self, tensor: QTensor) -> Kept | None:
        """Return a tensor [out, in] with a scale for each of these blocks; None where it has other numbers."""
        if tensor.codec is not None or tensor.zero_point is not None:
            return None
        numbers = (tensor.qvalue.dtype.name, tensor.scale.dtype.name, tensor.outer_scale is not None)
        if numbers != (self.dtype, self.scale_dtype, self.has_outer):
            return None
        places = []
        for size, own, wanted in zip(tensor.shape, tensor.blocks, (self.rows, self.columns), strict=True):
            if own < size and own % wanted:
                return None
            places.append(np.arange(0, size, wanted) // own)
        outer = np.ones(1, np.float32) if tensor.outer_scale is None else np.asarray(tensor.outer_scale).reshape(1)
        return Kept(np.asarray(tensor.qvalue), np.asarray(tensor.scale)[np.ix_(*places)], outer)


FP8_BLOCKS = Blocks("float8_e4m3fn", "float32", 128, 128)
NVFP4_BLOCKS = Blocks("float4_e2m1fn", "float8_e4m3fn", 1, 16, True)
MXFP4_BLOCKS = Blocks("float4_e2m1fn", "float8_e8m0fnu", 1, 32)


def scale_of(amax: np.ndarray | list[float] | float, largest: float) -> np.ndarray:
    """Return ``amax · (1 / largest)`` in float32, as training computes it; 1 for what is zeros."""
    scale = np.asarray(amax, np.float32) * np.float32(1 / largest)
    return np.where(scale >= _SMALLEST, scale, np.float32(1)).astype(np.float32)


def cast_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to float8_e4m3fn, saturating."""
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def encode_fp8(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None = None) -> np.ndarray:
    """Return ``e4m3(weight / scale)``, rows in parts: a scale for all, for each row, or for each block."""
    out = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    for rows in row_chunks(weight.shape, 1 if block is None else block[0]):
        out[rows] = cast_e4m3(weight[rows] / _spread(scale, weight.shape, block, rows))
    return out


def decode_scaled(
    weight: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None = None,
    zero_point: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``(weight − zero_point) · scale``, for elements of any type and scales as in ``encode_fp8``."""
    out = np.empty(weight.shape, np.float32)
    for rows in row_chunks(weight.shape, 1 if block is None or scale.size == 1 else block[0]):
        part = weight[rows].astype(np.float32)
        if zero_point is not None:
            part -= _spread(zero_point, weight.shape, block, rows)
        np.multiply(part, _spread(scale, weight.shape, block, rows), out=out[rows])
    return out


def check_finite(array: np.ndarray, name: str) -> np.ndarray:
    """Return what was decoded, after a look at every value, a part at a time.

    Raises:
      ValueError: one is infinite or not a number; names the tensor.
    """
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        if not np.isfinite(flat[start : start + _CHUNK]).all():
            raise ValueError(f"{name} decodes to values that are not finite; its scales are damaged, export it again")
    return array


def _spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None, rows: slice) -> np.ndarray:
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    if block is None:
        return scale.reshape(-1, 1)[rows]
    start, stop, _ = rows.indices(shape[0])
    part = np.repeat(scale[start // block[0] : -(-stop // block[0])], block[0], axis=0)[: stop - start]
    return part if part.shape[1] == 1 else np.repeat(part, block[1], axis=1)[:, : shape[1]]


def block_amax(weight: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the largest magnitude of each block; those at the edges may be smaller."""
    by_rows = np.maximum.reduceat(np.abs(weight), np.arange(0, weight.shape[0], block[0]), axis=0)
    return np.maximum.reduceat(by_rows, np.arange(0, weight.shape[1], block[1]), axis=1)


def encode_int(weight: np.ndarray, bits: int, group: int | None) -> Tensors:
    """Return integers and scales ``max|x| / (2**bits − 1) · 2``, of rows or of groups in a row, rounded to bfloat16."""
    half = (2**bits - 1) / 2
    size = group or weight.shape[1]
    amax = np.abs(weight).reshape(weight.shape[0], -1, size).max(-1)
    scale = scale_of(amax, half)
    if group is not None:
        scale = scale.astype(ml_dtypes.bfloat16)
    limit = 2 ** (bits - 1)
    codes = np.empty(weight.shape, np.int8)
    for rows in row_chunks(weight.shape, 1):
        steps = np.repeat(scale[rows].astype(np.float32), size, axis=1)
        codes[rows] = np.clip(np.rint(weight[rows] / steps), -limit, limit - 1)
    return {"codes": codes, "scale": scale}


def pack_int4(codes: np.ndarray) -> np.ndarray:
    """Pack integers plus 8 eight to an int32, the first in the lowest bits."""
    unsigned = (codes.astype(np.int16) + 8).astype(np.uint32)
    unsigned = np.pad(unsigned, ((0, 0), (0, -codes.shape[1] % 8))).reshape(codes.shape[0], -1, 8)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(unsigned << shifts, axis=-1).view(np.int32)


def unpack_int(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Return int8 of ``columns`` integers a row that lie in int32 as ``pack_int4`` packs them, of 4 or 8 bits each."""
    stored = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 4:
        stored = np.stack([stored & 0xF, stored >> 4], -1).reshape(len(stored), -1)
    return (stored[:, :columns] - np.uint8(2 ** (bits - 1))).view(np.int8)


def pack_e2m1(elements: np.ndarray) -> np.ndarray:
    """Pack float4_e2m1fn two to a byte, the even one in the low bits."""
    codes = np.asarray(elements).view(np.uint8) & 0xF
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Return float4_e2m1fn of nibbles, the low one first."""
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    out[..., 0::2], out[..., 1::2] = packed & 0xF, packed >> 4
    return out.view(ml_dtypes.float4_e2m1fn)


def encode_nvfp4(weight: np.ndarray, tensor_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 and e4m3 scales of 16 neighbours, below a scale of the tensor: ``max|x| / 2688`` or more."""
    rows, depth = weight.shape
    outer = np.float32(tensor_scale)
    packed = np.empty((rows, depth // 2), np.uint8)
    scales = np.empty((rows, depth // 16), ml_dtypes.float8_e4m3fn)
    for part in row_chunks(weight.shape, 1):
        blocks = weight[part].reshape(-1, depth // 16, 16)
        scale = cast_e4m3(np.abs(blocks).max(-1) * np.float32(1 / E2M1_MAX) / outer)
        product = scale.astype(np.float32) * outer
        steps = np.where(product >= _SMALLEST, product, np.float32(1))[..., None]
        elements = np.clip(blocks / steps, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
        packed[part] = pack_e2m1(elements.reshape(-1, depth))
        scales[part] = scale
    return packed, scales


def decode_nvfp4(packed: np.ndarray, scale: np.ndarray, tensor_scale: np.ndarray | float) -> np.ndarray:
    """Return ``e2m1 · (scale · tensor_scale)``."""
    product = scale.astype(np.float32) * np.asarray(tensor_scale, np.float32).reshape(())
    return unpack_e2m1(packed).astype(np.float32) * np.repeat(product, 16, axis=-1)


def encode_blocks(format: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Encode an array along its last axis, some thousand blocks at a time, all calls in one shape that compiles once.

    Args:
      format: name of a codec whose parts have a row for each block.
      x: float, its last axis a multiple of the block.
    """
    row = codec(format)
    blocks = x.reshape(-1, row.elements_per_block)
    found = _in_parts(lambda part: row.encode(jnp.asarray(part, jnp.float32)), blocks, row.elements_per_block)
    return {name: part.reshape(*x.shape[:-1], -1) for name, part in found.items()}


def decode_blocks(format: str, data: np.ndarray) -> np.ndarray:
    """Decode what ``encode_blocks`` made of a format of bytes alone, to float32; as it, in one shape."""
    row = codec(format)
    blocks = data.reshape(-1, row.bytes_per_block)
    found = _in_parts(lambda part: {"": row.decode({"blocks": jnp.asarray(part)})}, blocks, row.elements_per_block)
    return found[""].reshape(*data.shape[:-1], -1)


def _in_parts(run: Callable[[np.ndarray], dict[str, jax.Array]], blocks: np.ndarray, elements: int) -> Tensors:
    size = max(1, _BLOCKS_AT_ONCE // elements)
    small = _FEW // elements
    step = small if len(blocks) <= small else size
    parts = []
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        filled = np.pad(part, ((0, step - len(part)), (0, 0))) if len(part) < step else part
        parts.append({name: np.asarray(each)[: len(part)] for name, each in run(filled).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def encode_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 [..., in / 2] and E8M0 bytes [..., in / 32]."""
    found = _in_parts(_mxfp4, weight.reshape(-1, 32), 32)
    packed, scale = pack_e2m1(found["qvalue"]), found["scale"].view(np.uint8)
    return packed.reshape(*weight.shape[:-1], -1), scale.reshape(*weight.shape[:-1], -1)


@jax.jit
def _mxfp4(blocks: jax.Array) -> dict[str, jax.Array]:
    recipe = RECIPES["mxfp4w"].recipe
    assert recipe is not None
    return quantize(blocks, recipe.fwd.rhs, (1,)).parts  # pyright: ignore[reportArgumentType]


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ``e2m1 · 2**(scale − 127)``."""
    power = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return unpack_e2m1(packed).astype(np.float32) * np.repeat(power, 32, axis=-1)


def row_chunks(shape: tuple[int, ...], multiple: int) -> list[slice]:
    """Cut rows in parts of a few million elements, of a multiple of rows each."""
    size = max(1, _CHUNK // max(1, shape[1]) // multiple) * multiple
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]
