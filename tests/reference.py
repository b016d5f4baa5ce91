"""The definition of a recipe in numpy, for ``[M, K] · [K, N]``, independent of the package's code."""

from __future__ import annotations

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import formats

BOUNDS = {
    "int8": 127.5,
    "int4": 7.5,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0,
    "float4_e2m1fn": 6.0,
}


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to a dtype (nearest even, saturating) and return float32."""
    x = np.asarray(x, np.float32)
    if dtype.startswith("int"):
        top = np.floor(BOUNDS[dtype])
        return np.rint(np.clip(x, -top, top)).astype(np.float32)
    top = BOUNDS[dtype]
    return np.clip(x, -top, top).astype(getattr(ml_dtypes, dtype)).astype(np.float32)


def absmax_scale(x: np.ndarray, dtype: str, axis: int | None) -> np.ndarray:
    """Return the scale that elements along ``axis`` share (None: all elements)."""
    scale = np.max(np.abs(x), axis=axis, keepdims=True).astype(np.float32) * np.float32(1 / BOUNDS[dtype])
    return np.where(scale < np.sqrt(np.finfo(np.float32).tiny), np.float32(1), scale).astype(np.float32)


def grid_scale(x: np.ndarray, dtype: str, axis: int | None) -> np.ndarray:
    """Return the scale of a float32 weight with integer codes; the decoded values have the same scale."""
    x, top = np.asarray(x, np.float32), np.float32(np.floor(BOUNDS[dtype]))
    statistic = np.max(np.maximum(x, -x * (top / (top + 1))), axis=axis, keepdims=True)
    coarse, fine = (significant(statistic * (1 / top), bits) for bits in (8, 11))
    coarse = significant(significant(coarse * top, 8) * (1 / top), 8)
    return np.where(fine * top == statistic, fine, coarse)


def significant(x: np.ndarray, bits: int) -> np.ndarray:
    """Round to a number of significant bits, ties to even."""
    fraction, exponent = np.frexp(np.asarray(x, np.float32))
    return np.ldexp(np.rint(fraction * 2.0**bits) / 2.0**bits, exponent).astype(np.float32)


def quantize(x: np.ndarray, dtype: str, axis: int | None, reciprocal: bool = False, keeps_grid: bool = False):
    """Return qvalue (as float32) and scale."""
    scale = (grid_scale if keeps_grid else absmax_scale)(x, dtype, axis)
    scaled = x * (np.float32(1) / scale) if reciprocal else x / scale
    if keeps_grid:
        return np.rint(np.clip(scaled, -np.ceil(BOUNDS[dtype]), np.floor(BOUNDS[dtype]))).astype(np.float32), scale
    return cast(scaled.astype(np.float32), dtype), scale


def quantize_blocks(x: np.ndarray, dtype: str, block: tuple[int, int], powers_of_two: bool):
    """Return qvalue and the scale of each element, computed block by block in a loop."""
    qvalue, scales = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            part = x[i : i + block[0], j : j + block[1]]
            amax = np.max(np.abs(part)).astype(np.float32)
            scale = amax * np.float32(1 / BOUNDS[dtype])
            if powers_of_two:
                scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(amax) / BOUNDS[dtype])))
            qvalue[i : i + block[0], j : j + block[1]] = cast(part / scale, dtype)
            scales[i : i + block[0], j : j + block[1]] = scale
    return qvalue, scales


def through_gguf(x: np.ndarray, codec: str, axis: int) -> np.ndarray:
    """Encode an array in blocks along an axis and decode it with llama.cpp; the last block is padded with zeros."""
    kind = gguf.GGMLQuantizationType[codec.upper()]
    size = gguf.GGML_QUANT_SIZES[kind][0]
    rows = np.moveaxis(x, axis, -1).astype(np.float32)
    padded = np.pad(rows, [(0, 0)] * (x.ndim - 1) + [(0, -rows.shape[-1] % size)])
    blocks = np.asarray(formats.codec(codec).encode(jnp.asarray(padded))["blocks"])
    return np.moveaxis(gguf.quants.dequantize(blocks, kind)[..., : rows.shape[-1]], -1, axis).astype(np.float64)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)
