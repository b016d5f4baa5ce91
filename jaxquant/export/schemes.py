"""Table of the formats of Hugging Face folders; the entry in ``config.json`` defines how layers are stored.

Source: ``PRESET_SCHEMES`` of compressed-tensors; DeepSeek's and fbgemm's checkpoints; the checkpoint exporter of
nvidia-modelopt, and vLLM's ``modelopt.py``, which requires every key below.
"""

from __future__ import annotations

from typing import Any

from jaxquant.export.folder import Scheme
from jaxquant.export.source import HEAD

PRODUCER = {"name": "modelopt", "version": "0.29.0"}
"""Producer entry, from which loaders select the variant of the format: the first version with all keys written here."""
SCALE_BOUND = 1200.0
"""Upper bound of dynamic scales in ``fbgemm_fp8``, as in the published checkpoints."""


def _compressed(name: str, format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Scheme:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
        "kv_cache_scheme": None,
    }
    return Scheme(name, config)


def _operand(bits: int, kind: str, strategy: str, dynamic: bool | str = False, **rest: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": dynamic, **rest}


def _modelopt(name: str, algorithm: str, operand: dict[str, Any]) -> Scheme:
    operand = {"dynamic": False, **operand}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": {"input_activations": operand, "weights": operand, "targets": ["Linear"]}},
        "ignore": [HEAD],
        "producer": PRODUCER,
    }
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": [HEAD]}
    if "group_size" in operand:
        quantization["group_size"] = operand["group_size"]
    files = {"hf_quant_config.json": {"producer": PRODUCER, "quantization": quantization}}
    return Scheme(name, config, (), files)


_CHANNEL, _TENSOR, _TOKEN = _operand(8, "float", "channel"), _operand(8, "float", "tensor"), ("token", True)
_NV = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_NV_WEIGHT = _operand(4, "float", "tensor_group", **_NV)
_NV_INPUT = _operand(4, "float", "tensor_group", "local", **_NV)
_MX = _operand(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

ROUNDED_BLOCKS = Scheme("fp8_block scale_fmt=ue8m0", {**_BLOCKS, "scale_fmt": "ue8m0"})
"""``fp8_block`` with power-of-two scales, which readers and servers support; ``fp8_block`` can store these scales."""

ROWS = (
    Scheme("hf", None),
    _compressed("ct_fp8_dynamic", "float-quantized", _CHANNEL, _operand(8, "float", *_TOKEN)),
    _compressed("ct_fp8_static", "float-quantized", _TENSOR, _TENSOR),
    _compressed("ct_int8", "int-quantized", _operand(8, "int", "channel"), _operand(8, "int", *_TOKEN)),
    _compressed("ct_w4a16", "pack-quantized", _operand(4, "int", "group", group_size=128), None),
    _compressed("ct_nvfp4", "nvfp4-pack-quantized", _NV_WEIGHT, _NV_INPUT),
    _compressed("ct_nvfp4a16", "nvfp4-pack-quantized", _NV_WEIGHT, None),
    _compressed("ct_mxfp4", "mxfp4-pack-quantized", _MX, None),
    Scheme("fp8_block", {**_BLOCKS, "modules_to_not_convert": [HEAD]}),
    Scheme(
        "fbgemm_fp8",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": SCALE_BOUND, "modules_to_not_convert": [HEAD]},
    ),
    Scheme(
        "mxfp4",
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                HEAD,
            ],
        },
    ),
    _modelopt("modelopt_fp8", "FP8", {"num_bits": 8, "type": "float"}),
    _modelopt("modelopt_nvfp4", "NVFP4", {"num_bits": 4, "type": "float", "group_size": 16}),
)
"""All formats of Hugging Face folders; ``hf`` is the float format."""
