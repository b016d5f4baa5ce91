"""compressed-tensors: what vLLM and SGLang load, and transformers through its library.

Source: ``PRESET_SCHEMES`` and the compressors of compressed-tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxquant.export.folder import Scheme, Tensors
from jaxquant.export.layouts import (
    E4M3_MAX,
    MXFP4_BLOCKS,
    NVFP4_RANGE,
    decode_mxfp4,
    decode_nvfp4,
    decode_scaled,
    encode_fp8,
    encode_int,
    encode_mxfp4,
    pack_e2m1,
    pack_int4,
    scale_of,
    unpack_int,
)
from jaxquant.export.llama import HEAD
from jaxquant.export.source import Source

GROUP = 128


def _config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
        },
        "ignore": [HEAD],
        "kv_cache_scheme": None,
    }


def _scheme(bits: int, kind: str, strategy: str, dynamic: bool | str = False, **rest: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic, **rest}


def _fp8_channel(source: Source, module: str, weight: np.ndarray) -> Tensors:
    scale = scale_of(np.abs(weight).max(1, keepdims=True), E4M3_MAX)
    return {".weight": encode_fp8(weight, scale), ".weight_scale": scale}


def _fp8_tensor(source: Source, module: str, weight: np.ndarray) -> Tensors:
    scale = scale_of([source.fused_amax(module)], E4M3_MAX)
    inputs = scale_of([source.fused_input_amax(module)], E4M3_MAX)
    return {".weight": encode_fp8(weight, scale), ".weight_scale": scale, ".input_scale": inputs}


def _decode_scaled(tensors: Tensors) -> np.ndarray:
    return decode_scaled(tensors[".weight"], tensors[".weight_scale"])


def _int8(source: Source, module: str, weight: np.ndarray) -> Tensors:
    parts = encode_int(weight, 8, None)
    return {".weight": parts["codes"], ".weight_scale": parts["scale"]}


def _int4(source: Source, module: str, weight: np.ndarray) -> Tensors:
    parts = encode_int(weight, 4, GROUP)
    return {
        ".weight_packed": pack_int4(parts["codes"]),
        ".weight_scale": parts["scale"],
        ".weight_shape": np.array(weight.shape, np.int64),
    }


def _decode_int4(tensors: Tensors) -> np.ndarray:
    codes = unpack_int(tensors[".weight_packed"], 4, int(tensors[".weight_shape"][1]))
    return decode_scaled(codes, tensors[".weight_scale"], (1, GROUP))


def _nvfp4(source: Source, module: str, weight: np.ndarray) -> Tensors:
    inputs = (np.float32(1) / scale_of([source.fused_input_amax(module)], NVFP4_RANGE)).astype(np.float32)
    return _nvfp4_weight(source, module, weight) | {".input_global_scale": inputs}


def _nvfp4_weight(source: Source, module: str, weight: np.ndarray) -> Tensors:
    # Stored are reciprocals; what divides must be what multiplied.
    stored = np.float32(1) / scale_of(source.fused_amax(module), NVFP4_RANGE)
    packed, scale, outer = source.nvfp4(module, weight, float(np.float32(1) / stored))
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_global_scale": np.float32(1) / outer}


def _decode_nvfp4(tensors: Tensors) -> np.ndarray:
    return decode_nvfp4(
        tensors[".weight_packed"], tensors[".weight_scale"], 1 / tensors[".weight_global_scale"].astype(np.float32)
    )


def _mxfp4(source: Source, module: str, weight: np.ndarray) -> Tensors:
    kept = source.kept(module, MXFP4_BLOCKS)
    if kept is not None:
        return {".weight_packed": pack_e2m1(kept.elements), ".weight_scale": kept.scale.view(np.uint8)}
    packed, scale = encode_mxfp4(weight)
    return {".weight_packed": packed, ".weight_scale": scale}


def _decode_mxfp4(tensors: Tensors) -> np.ndarray:
    return decode_mxfp4(tensors[".weight_packed"], tensors[".weight_scale"])


_NV = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES = (
    Scheme(
        "ct_fp8_dynamic",
        _config("float-quantized", _scheme(8, "float", "channel"), _scheme(8, "float", "token", True)),
        _fp8_channel,
        _decode_scaled,
    ),
    Scheme(
        "ct_fp8_static",
        _config("float-quantized", _scheme(8, "float", "tensor"), _scheme(8, "float", "tensor")),
        _fp8_tensor,
        _decode_scaled,
    ),
    Scheme(
        "ct_int8",
        _config("int-quantized", _scheme(8, "int", "channel"), _scheme(8, "int", "token", True)),
        _int8,
        _decode_scaled,
    ),
    Scheme(
        "ct_w4a16",
        _config("pack-quantized", _scheme(4, "int", "group", group_size=GROUP), None),
        _int4,
        _decode_int4,
        GROUP,
    ),
    Scheme(
        "ct_nvfp4",
        _config(
            "nvfp4-pack-quantized",
            _scheme(4, "float", "tensor_group", **_NV),
            _scheme(4, "float", "tensor_group", "local", **_NV),
        ),
        _nvfp4,
        _decode_nvfp4,
        16,
    ),
    Scheme(
        "ct_nvfp4a16",
        _config("nvfp4-pack-quantized", _scheme(4, "float", "tensor_group", **_NV), None),
        _nvfp4_weight,
        _decode_nvfp4,
        16,
    ),
    Scheme(
        "ct_mxfp4",
        _config("mxfp4-pack-quantized", _scheme(4, "float", "group", **_MX), None),
        _mxfp4,
        _decode_mxfp4,
        32,
    ),
)
