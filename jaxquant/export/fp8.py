"""The methods ``fp8`` (blocks of 128 by 128, as DeepSeek's) and ``fbgemm_fp8`` (rows).

``weight_scale_inv`` multiplies, despite its name.
"""

from __future__ import annotations

import numpy as np

from jaxquant.export.folder import Scheme, Tensors
from jaxquant.export.layouts import E4M3_MAX, FP8_BLOCKS, block_amax, decode_scaled, encode_fp8, scale_of
from jaxquant.export.llama import HEAD
from jaxquant.export.source import Source

BLOCK = (FP8_BLOCKS.rows, FP8_BLOCKS.columns)
SCALE_BOUND = 1200.0
"""Bound of what a dynamic scale covers in ``fbgemm_fp8``; that of the published checkpoints."""


def _block(source: Source, module: str, weight: np.ndarray) -> Tensors:
    kept = source.kept(module, FP8_BLOCKS)
    if kept is not None:
        return {".weight": kept.elements, ".weight_scale_inv": kept.scale}
    scale = scale_of(block_amax(weight, BLOCK), E4M3_MAX)
    return {".weight": encode_fp8(weight, scale, BLOCK), ".weight_scale_inv": scale}


def _decode_block(tensors: Tensors) -> np.ndarray:
    return decode_scaled(tensors[".weight"], tensors[".weight_scale_inv"], BLOCK)


def _rows(source: Source, module: str, weight: np.ndarray) -> Tensors:
    scale = scale_of(np.abs(weight).max(1, keepdims=True), E4M3_MAX)
    return {".weight": encode_fp8(weight, scale), ".weight_scale": scale}


def _decode_rows(tensors: Tensors) -> np.ndarray:
    return decode_scaled(tensors[".weight"], tensors[".weight_scale"])


SCHEMES = (
    Scheme(
        "fp8_block",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": [HEAD],
        },
        _block,
        _decode_block,
    ),
    Scheme(
        "fbgemm_fp8",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": SCALE_BOUND, "modules_to_not_convert": [HEAD]},
        _rows,
        _decode_rows,
    ),
)
