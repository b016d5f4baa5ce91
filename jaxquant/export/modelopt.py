"""NVIDIA's modelopt: FP8 and NVFP4 with static input scales, and its ``hf_quant_config.json``.

Source: the checkpoint exporter of nvidia-modelopt; vLLM's ``modelopt.py``, which asks for every key below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxquant.export.folder import Scheme, Tensors
from jaxquant.export.layouts import (
    E4M3_MAX,
    NVFP4_RANGE,
    decode_nvfp4,
    decode_scaled,
    encode_fp8,
    scale_of,
)
from jaxquant.export.llama import HEAD
from jaxquant.export.source import Source

PRODUCER = {"name": "modelopt", "version": "0.29.0"}
"""Loaders tell the dialect by it: the first version with all keys that are written here."""


def _fp8(source: Source, module: str, weight: np.ndarray) -> Tensors:
    scale = scale_of(source.fused_amax(module), E4M3_MAX)
    inputs = scale_of(source.fused_input_amax(module), E4M3_MAX)
    return {".weight": encode_fp8(weight, scale), ".weight_scale": scale, ".input_scale": inputs}


def _decode_fp8(tensors: Tensors) -> np.ndarray:
    return decode_scaled(tensors[".weight"], tensors[".weight_scale"])


def _nvfp4(source: Source, module: str, weight: np.ndarray) -> Tensors:
    packed, scale, outer = source.nvfp4(module, weight, float(scale_of(source.fused_amax(module), NVFP4_RANGE)))
    inputs = scale_of(source.fused_input_amax(module), NVFP4_RANGE)
    return {".weight": packed, ".weight_scale": scale, ".weight_scale_2": outer.reshape(()), ".input_scale": inputs}


def _decode_nvfp4(tensors: Tensors) -> np.ndarray:
    return decode_nvfp4(tensors[".weight"], tensors[".weight_scale"], tensors[".weight_scale_2"])


def _files(algorithm: str, group: int | None) -> dict[str, Any]:
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": [HEAD]}
    if group is not None:
        quantization["group_size"] = group
    return {"hf_quant_config.json": {"producer": PRODUCER, "quantization": quantization}}


def _config(algorithm: str, operand: dict[str, Any]) -> dict[str, Any]:
    group = {"input_activations": operand, "weights": operand, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
        "producer": PRODUCER,
    }


SCHEMES = (
    Scheme(
        "modelopt_fp8",
        _config("FP8", {"dynamic": False, "num_bits": 8, "type": "float"}),
        _fp8,
        _decode_fp8,
        files=_files("FP8", None),
    ),
    Scheme(
        "modelopt_nvfp4",
        _config("NVFP4", {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}),
        _nvfp4,
        _decode_nvfp4,
        16,
        files=_files("NVFP4", 16),
    ),
)
