"""Encoders and decoders of the layouts of quantized weights in checkpoints.

Weights are float32 arrays [out, in]. All formats are decoded in float32, and each product is rounded once. Encoders
accept numpy arrays, which are encoded chunk by chunk on the default device, and tracers of ``jax.jit``; the bits are
equal on one device. Steps below float32's normal range are flushed to zero.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from jaxquant.config.recipes import RECIPES
from jaxquant.core.blocks import apply_blocks, reduce_blocks
from jaxquant.core.dtypes import element
from jaxquant.core.quantize import quantize
from jaxquant.core.rounding import prevent_excess_precision
from jaxquant.core.scales import scale_of_amax
from jaxquant.core.tensor_spec import TensorSpec, keep_grid
from jaxquant.formats import codec
from jaxquant.formats.packing import pack, pack_codes

E4M3_MAX, E2M1_MAX = 448.0, 6.0
NVFP4_RANGE = E4M3_MAX * E2M1_MAX
_SMALLEST = float(np.finfo(np.float32).tiny)
_HOST_CHUNK, _CHUNK, _SMALL_CHUNK = 1 << 22, 1 << 20, 1 << 16
"""Numbers of elements in a chunk: for numpy, for encoders of large arrays, and for encoders of small arrays."""
Tensors = dict[str, Any]


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def to_host(x: Any) -> Any:
    """Return an array in host memory; a tracer is returned unchanged."""
    return x if _is_traced(x) else np.asarray(x)


def transpose(matrix: Any) -> Any:
    """Return the transposed matrix, contiguous in host memory."""
    return matrix.T if _is_traced(matrix) else np.ascontiguousarray(matrix.T)


def concatenate(parts: Sequence[Any]) -> Any:
    """Return arrays concatenated along the first axis, in host memory unless one of them is traced."""
    return (jnp if any(map(_is_traced, parts)) else np).concatenate(parts)


def is_true(condition: Any, *, if_traced: bool) -> bool:
    """Return whether a condition is true, or ``if_traced`` for a tracer, whose value is not known."""
    return if_traced if _is_traced(condition) else bool(condition)


def by_rows(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled encoder of rows that accepts a tracer, or an array in host memory, which it encodes in chunks.

    Results in float4_e2m1fn are packed. Keyword-only arguments are static. If ``block`` is one of them, chunks hold
    complete blocks of rows.
    """
    static = inspect.getfullargspec(encode).kwonlyargs
    compiled = jax.jit(encode, static_argnames=static)

    @functools.wraps(encode)
    def run(rows: Any, *others: Any, **options: Any) -> Any:
        run_chunk = lambda part: jax.tree.map(_pack_e2m1_results, compiled(part, *others, **options))  # noqa: E731
        return _in_chunks(run_chunk, rows, options.get("block", (1,))[0])

    return run


def _pack_e2m1_results(x: Any) -> Any:
    # Not in the compiled program: XLA:CPU cannot compile every program that rounds to e2m1 and packs.
    return pack_e2m1(to_host(x)) if x.dtype == ml_dtypes.float4_e2m1fn else x


def _in_chunks(run: Callable[[Any], Any], rows: np.ndarray, multiple: int = 1) -> Any:
    """Return ``run(rows)``, computed in chunks of one shape, so that the function compiles once; a tracer is one chunk.

    Args:
      run: function whose results have a row for each row, or for each ``multiple`` rows.
      rows: array [rows, columns].
      multiple: number of which the rows of a chunk are a multiple.
    """
    if _is_traced(rows):
        return run(rows)
    small, large = (max(1, size // (rows.shape[1] * multiple)) * multiple for size in (_SMALL_CHUNK, _CHUNK))
    step = small if len(rows) <= small else large
    found = None
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        results = run(np.pad(part, ((0, step - len(part)), (0, 0))) if len(part) < step else part)
        if found is None:
            found = jax.tree.map(lambda x: np.empty((-(-len(rows) * len(x) // step), *x.shape[1:]), x.dtype), results)
        for whole, x in zip(jax.tree.leaves(found), jax.tree.leaves(results), strict=True):
            at = start * len(x) // step
            whole[at : at + len(x)] = x[: len(whole) - at]
    return found


def scale_of(amax: Any, largest: float) -> jax.Array:
    """Return the scale ``amax · (1 / largest)`` in float32, computed as in training; 1 for an amax of zero."""
    scale = jnp.asarray(amax, np.float32) * np.float32(1 / largest)
    return jnp.where(scale >= _SMALLEST, scale, np.float32(1))


def reciprocal(scale: Any) -> jax.Array:
    """Return ``1 / scale`` in float32."""
    # XLA would simplify the reciprocal of a reciprocal; the minimum, which changes no number, prevents this.
    return jnp.minimum(np.float32(1) / scale, np.finfo(np.float32).max)


def divide(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``x / scale``, where the scale is broadcast."""
    # XLA would multiply by the reciprocal of a broadcast scale; the selection, which depends on x, prevents this.
    return x / jnp.where(x == x, scale, np.float32(1))


def shorten(scale: Any, dtype: Any) -> Any:
    """Round scales to bfloat16, or return them unchanged if that is not ``dtype``."""
    if dtype != ml_dtypes.bfloat16:
        return scale
    # XLA would drop a cast to bfloat16 before a cast to float32.
    return jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7).astype(dtype)


def weight_scale(weight: jax.Array, dtype: str, block: tuple[int, int]) -> jax.Array:
    """Return the scale of each block, computed as in training."""
    spec = keep_grid(TensorSpec(dtype))
    if spec.has_grid_scale:
        weight = jnp.where(weight < 0, weight * np.float32(spec.negative_factor), weight)
    return scale_of_amax(reduce_blocks(jnp.abs(weight), block, jnp.max), element(dtype).max, spec, _SMALLEST)[0]


def cast(x: jax.Array, dtype: str) -> jax.Array:
    """Round to nearest in an element type, saturating at its limits; integer types are returned as int8."""
    kind = element(dtype)
    if kind.kind == "int":
        return jnp.clip(jnp.rint(x), -kind.max - 1, kind.max).astype(np.int8)
    return prevent_excess_precision(jnp.clip(x, -kind.max, kind.max).astype(kind.dtype))


@by_rows
def encode_scaled(weight: Any, scale: jax.Array, *, dtype: str) -> Any:
    """Return ``cast(weight / scale)`` for one scale."""
    return cast(divide(weight, scale), dtype)


@by_rows
def encode_scaled_blocks(weight: Any, *, dtype: str, block: tuple[int, int], scale_dtype: Any) -> Any:
    """Return ``cast(weight / scale)`` and the scale of each block, rounded by ``shorten``."""
    scale = shorten(weight_scale(weight, dtype, block), scale_dtype)
    return cast(apply_blocks(divide, weight, scale.astype(np.float32), block), dtype), scale


def decode_scaled(
    weight: np.ndarray, scale: np.ndarray, block: tuple[int, int], zero_point: np.ndarray | None
) -> np.ndarray:
    """Return ``(weight − zero_point) · scale`` for elements of any type; ``scale`` is per tensor, row or block."""
    out = np.empty(weight.shape, np.float32)
    for rows in row_chunks(weight.shape, 1 if scale.size == 1 else block[0]):
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
    """Return whether every value is finite, checked chunk by chunk; True for a tracer."""
    flat = array.reshape(-1)
    return _is_traced(array) or all(np.isfinite(flat[part]).all() for part in row_chunks(flat.shape))


def _expand(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int], rows: slice) -> np.ndarray:
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(())
    start, stop, _ = rows.indices(shape[0])
    part = np.repeat(scale[start // block[0] : -(-stop // block[0])], block[0], axis=0)[: stop - start]
    return part if part.shape[1] == 1 else np.repeat(part, block[1], axis=1)[:, : shape[1]]


@by_rows
def pack_int4(codes: Any) -> Any:
    """Pack eight integers, each plus 8, into an int32; the first integer is in the lowest bits."""
    unsigned = (codes.astype(np.int8) + 8).view(np.uint8)
    return pack_codes(jnp.pad(unsigned, ((0, 0), (0, -codes.shape[1] % 8))), 4).view(np.int32)


def unpack_int(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Unpack integers of 4 or 8 bits to int8 [rows, ``columns``]; inverse of ``pack_int4`` for 4 bits."""
    stored = np.ascontiguousarray(packed).view(np.uint8)
    stored = _unpack_nibbles(stored) if bits == 4 else stored
    return (stored[:, :columns] - np.uint8(2 ** (bits - 1))).view(np.int8)


def pack_e2m1(elements: Any) -> Any:
    """Pack pairs of float4_e2m1fn elements into bytes, the element with the even index in the low bits."""
    if _is_traced(elements):
        return pack(elements)
    codes = elements.view(np.uint8) & 0xF
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Unpack float4_e2m1fn elements from bytes; the low four bits are the first element of a pair."""
    return _unpack_nibbles(packed).view(ml_dtypes.float4_e2m1fn)


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@by_rows
def encode_nvfp4(weight: Any, tensor_scale: jax.Array) -> Any:
    """Return packed e2m1 elements, and an e4m3 scale for each 16 neighbouring elements of a row.

    The e4m3 scales are relative to ``tensor_scale``, which must be at least ``max|x| / 2688``.
    """
    blocks = weight.reshape(len(weight), -1, 16)
    scale = cast(divide(abs(blocks).max(-1) * np.float32(1 / E2M1_MAX), tensor_scale), "float8_e4m3fn")
    product = scale.astype(np.float32) * tensor_scale
    steps = jnp.where(product >= _SMALLEST, product, np.float32(1))[..., None]
    return cast(divide(blocks, steps), "float4_e2m1fn").reshape(weight.shape), scale


@by_rows
def encode_mxfp4(weight: Any) -> Any:
    """Return packed e2m1 elements [out, in / 2] and E8M0 scales as bytes [out, in / 32]."""
    recipe = RECIPES["mxfp4w"].recipe
    assert recipe is not None
    found: Any = quantize(weight.reshape(-1, 32), recipe.fwd.rhs, (1,))  # pyright: ignore[reportArgumentType]
    return found.qvalue.reshape(weight.shape), found.scale.view(np.uint8).reshape(len(weight), -1)


def encode_blocks(format: str, x: np.ndarray) -> np.ndarray:
    """Encode a float array along its last axis, which is a multiple of the block, in a format with one part."""
    row = codec(format)
    blocks = x.reshape(-1, row.elements_per_block)
    return _in_chunks(lambda part: row.encode(jnp.asarray(part))["blocks"], blocks).reshape(*x.shape[:-1], -1)


def decode_blocks(format: str, data: np.ndarray) -> np.ndarray:
    """Decode the bytes of a format to float32; the inverse of ``encode_blocks``."""
    row = codec(format)
    blocks = data.reshape(-1, row.bytes_per_block)
    return _in_chunks(lambda part: row.decode({"blocks": jnp.asarray(part)}), blocks).reshape(*data.shape[:-1], -1)


def row_chunks(shape: tuple[int, ...], multiple: int = 1) -> list[slice]:
    """Split rows into chunks of a few million elements; each chunk holds a multiple of ``multiple`` rows."""
    size = max(1, _HOST_CHUNK // max(1, math.prod(shape[1:])) // multiple) * multiple
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]
