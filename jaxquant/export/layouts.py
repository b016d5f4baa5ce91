"""How weights of quantized linear layers lie in checkpoints: encoded and decoded, one function of each a layout.

Weights are [out, in] float32 in numpy. All are decoded in float32, products rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.config.hf.spec import LayerSpec
from jaxquant.formats import codec

E4M3_MAX, E2M1_MAX = 448.0, 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_SMALLEST = float(np.finfo(np.float32).tiny)
_CHUNK = 1 << 22
_BLOCKS_AT_ONCE, _FEW = 1 << 20, 1 << 16
Tensors = dict[str, np.ndarray]


def scale_of(amax: np.ndarray | list[float] | float, largest: float) -> np.ndarray:
    """Return ``amax / largest`` in float32; 1 for what is zeros."""
    scale = np.asarray(amax, np.float32) / np.float32(largest)
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


def decode_scaled(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None = None) -> np.ndarray:
    """Return ``weight · scale``, for elements of any type and scales as in ``encode_fp8``."""
    out = np.empty(weight.shape, np.float32)
    for rows in row_chunks(weight.shape, 1 if block is None else block[0]):
        out[rows] = weight[rows].astype(np.float32) * _spread(scale, weight.shape, block, rows)
    return out


def _spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int] | None, rows: slice) -> np.ndarray:
    scale = scale.astype(np.float32)
    if block is None:
        return scale if scale.size == 1 else scale.reshape(-1, 1)[rows]
    start, stop, _ = rows.indices(shape[0])
    part = np.repeat(scale[start // block[0] : -(-stop // block[0])], block[0], axis=0)[: stop - start]
    return np.repeat(part, block[1], axis=1)[:, : shape[1]]


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


def unpack_int4(packed: np.ndarray, columns: int) -> np.ndarray:
    """Undo ``pack_int4``."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = np.ascontiguousarray(packed).view(np.uint32)[..., None] >> shifts & 0xF
    return nibbles.reshape(packed.shape[0], -1)[:, :columns].astype(np.int8) - np.int8(8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack four-bit codes two to a byte, the even one in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Return float32 of e2m1 codes, low nibble first."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([values, -values])
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.float32)
    out[..., 0::2], out[..., 1::2] = table[packed & 0xF], table[packed >> 4]
    return out


def encode_nvfp4(weight: np.ndarray, tensor_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return packed e2m1 and e4m3 scales of 16 neighbours, below a scale of the tensor: ``max|x| / 2688`` or more."""
    rows, depth = weight.shape
    outer = np.float32(tensor_scale)
    packed = np.empty((rows, depth // 2), np.uint8)
    scales = np.empty((rows, depth // 16), ml_dtypes.float8_e4m3fn)
    for part in row_chunks(weight.shape, 1):
        blocks = weight[part].reshape(-1, depth // 16, 16)
        scale = cast_e4m3(np.abs(blocks).max(-1) / np.float32(E2M1_MAX) / outer)
        product = scale.astype(np.float32) * outer
        inverse = np.divide(1, product, out=np.zeros_like(product), where=product >= _SMALLEST)
        elements = np.clip(blocks * inverse[..., None], -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
        packed[part] = pack_nibbles(elements.view(np.uint8).reshape(-1, depth) & 0xF)
        scales[part] = scale
    return packed, scales


def decode_nvfp4(packed: np.ndarray, scale: np.ndarray, tensor_scale: np.ndarray | float) -> np.ndarray:
    """Return ``e2m1 · (scale · tensor_scale)``."""
    product = scale.astype(np.float32) * np.asarray(tensor_scale, np.float32).reshape(())
    return unpack_e2m1(packed) * np.repeat(product, 16, axis=-1)


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
    parts = encode_blocks("mxfp4", weight)
    return parts["qvalue"], parts["scale"]


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return ``e2m1 · 2**(scale − 127)``."""
    power = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int32) - 127))
    return (unpack_e2m1(packed) * np.repeat(power, 32, axis=-1)).astype(np.float32)


def row_chunks(shape: tuple[int, ...], multiple: int) -> list[slice]:
    """Cut rows in parts of a few million elements, of a multiple of rows each."""
    size = max(1, _CHUNK // max(1, shape[1]) // multiple) * multiple
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]


def decode_layer(spec: LayerSpec, tensors: Tensors, shape: tuple[int, int]) -> np.ndarray:
    """Decode a linear layer that a checkpoint's own config describes.

    Args:
      spec: what its config says of the layer.
      tensors: of the layer, by the end of their name (``.weight_scale``).
      shape: [out, in] that the model asks for.

    Raises:
      ValueError: a tensor that is missing, or of a shape or dtype that does not fit; names it.
      NotImplementedError: a layout that is not read.
    """
    for packing, names in _LAYOUTS:
        if packing == spec.packing and all(any(f".{name}" in tensors for name in each) for each in names):
            found = [next(tensors[f".{name}"] for name in each if f".{name}" in tensors) for each in names]
            return _checked(_DECODERS[packing, len(names)](spec, shape, *found), shape)
    wanted = " or ".join(", ".join("/".join(each) for each in names) for p, names in _LAYOUTS if p == spec.packing)
    if not wanted:
        raise NotImplementedError(f"weights packed as {spec.packing!r} are not read; start from another export")
    raise ValueError(f"a layer packed as {spec.packing!r} has {', '.join(tensors) or 'no tensors'}, and needs {wanted}")


def _checked(weight: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    if weight.shape != shape:
        raise ValueError(f"a weight decodes to shape {weight.shape}, and the model asks for {shape}")
    return weight


def _expect(name: str, array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(
            f"{name} is {array.dtype.name}{array.shape}, and its config makes it {np.dtype(dtype).name}{shape}"
        )


def _plain(spec: LayerSpec, shape: tuple[int, int], weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    kind = jnp.dtype(spec.weight.dtype)
    _expect("weight", weight, kind, shape)
    block = spec.weight.block_size
    if scale.dtype not in (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu, np.uint8):
        raise ValueError(f"weight_scale is {scale.dtype.name}, which is no type of scales")
    if scale.dtype == np.uint8:  # E8M0 as bytes
        scale = np.ascontiguousarray(scale).view(ml_dtypes.float8_e8m0fnu)
    if block is not None:
        wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if scale.shape != wanted:
            raise ValueError(f"weight_scale has shape {scale.shape}, and blocks of {block} of {shape} have {wanted}")
    elif scale.size not in (1, shape[0]):
        raise ValueError(f"weight_scale has shape {scale.shape}, neither one scale nor {shape[0]}")
    return decode_scaled(weight, scale, block)


def _int4(spec: LayerSpec, shape: tuple[int, int], packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    _expect("weight_packed", packed, np.int32, (shape[0], -(-shape[1] // 8)))
    size = spec.weight.block_size[1] if spec.weight.block_size else shape[1]
    if scale.shape != (shape[0], -(-shape[1] // size)):
        raise ValueError(f"weight_scale has shape {scale.shape}, and groups of {size} of {shape} have another")
    return decode_scaled(unpack_int4(packed, shape[1]), scale, (1, size))


def _nvfp4(
    spec: LayerSpec, shape: tuple[int, int], packed: np.ndarray, scale: np.ndarray, outer: np.ndarray
) -> np.ndarray:
    _expect("weight", packed, np.uint8, (shape[0], shape[1] // 2))
    _expect("weight_scale", scale, ml_dtypes.float8_e4m3fn, (shape[0], shape[1] // 16))
    if outer.size != 1 or not np.isfinite(outer.astype(np.float32)).all() or not (outer.astype(np.float32) > 0).all():
        raise ValueError(f"the scale of the tensor has shape {outer.shape}, or is not above 0")
    outer = outer.astype(np.float32)
    return decode_nvfp4(packed, scale, 1 / outer if spec.packing == "nvfp4-pack" else outer)


def _mxfp4(spec: LayerSpec, shape: tuple[int, int], packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    _expect("weight", packed, np.uint8, (shape[0], shape[1] // 2))
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        scale = np.ascontiguousarray(scale).view(np.uint8)
    _expect("weight_scale", scale, np.uint8, (shape[0], shape[1] // 32))
    return decode_mxfp4(packed, scale)


_SCALE = ("weight_scale", "weight_scale_inv")
_LAYOUTS = (
    ("plain", (("weight",), _SCALE)),
    ("pack-quantized", (("weight_packed",), ("weight_scale",))),
    ("nvfp4-pack", (("weight_packed",), ("weight_scale",), ("weight_global_scale",))),
    ("modelopt", (("weight",), ("weight_scale",), ("weight_scale_2",))),
    ("mxfp4-pack", (("weight_packed",), ("weight_scale",))),
)
_DECODERS = {
    ("plain", 2): _plain,
    ("pack-quantized", 2): _int4,
    ("nvfp4-pack", 3): _nvfp4,
    ("modelopt", 3): _nvfp4,
    ("mxfp4-pack", 2): _mxfp4,
}
