"""Quantization configs of published checkpoints, and builders of further configs."""

from __future__ import annotations

from jaxquant.compat.max import parse_quant_config
from jaxquant.export.hf import ScaleGranularity, ScaleOrigin

TENSOR, ROWWISE, COLWISE, BLOCK = ScaleGranularity
STATIC, DYNAMIC = ScaleOrigin
FP8, BF16 = "float8_e4m3fn", "bfloat16"


def scheme(strategy: str | None, dynamic=False, bits: int = 8, kind: str = "float", **rest) -> dict:
    strategies = {} if strategy is None else {"strategy": strategy}
    return {"num_bits": bits, "type": kind, "dynamic": dynamic, **strategies, **rest}


def compressed(weights: dict, inputs: dict | None, ignore=("lm_head",), format="float-quantized", **rest) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        **rest,
    }


def config(quantization: dict | None, layers: int = 4, nested: bool = False) -> dict:
    section = {} if quantization is None else {"quantization_config": quantization}
    inner = {"num_hidden_layers": layers, **section}
    return {"text_config": inner} if nested else inner


def tensors(scale="weight_scale", dtype="float32", shape=(8, 1), **more) -> dict:
    found = {f"layers.0.mlp.down_proj.{scale}": (shape, dtype), "embed_tokens.weight": ((8, 8), "bfloat16")}
    return found | {name.replace("__", "."): value for name, value in more.items()}


CT_DYNAMIC = compressed(scheme("channel"), scheme("token", True))
CT_STATIC = compressed(scheme("tensor"), scheme("tensor"))
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MINISTRAL = {
    "activation_scheme": "static",
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
_PROJECTIONS = [
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *(f"self_attn.{part}_proj" for part in "qkvo"),
]
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": [f"model.layers.0.{part}" for part in _PROJECTIONS],
}
QWEN3_MOE = DEEPSEEK | {
    "modules_to_not_convert": [
        "lm_head",
        *(
            f"model.layers.{i}.{part}"
            for i in range(48)
            for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ),
    ]
}
QWEN3_STATIC = {
    "config_groups": {"group_0": {"weights": scheme(None), "input_activations": scheme(None), "targets": ["Linear"]}},
    "ignore": ["lm_head"],
    "quant_algo": "FP8",
    "kv_cache_scheme": "FP8",
    "producer": {"name": "modelopt", "version": "0.31"},
}
GLM_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "kv_cache_scheme": scheme(None),
    "ignore": [
        "lm_head",
        "model.layers.0*",
        "model.layers.1.*",
        "model.layers.2.*",
        *(f"model.layers.{i}.{part}" for i in range(3, 78) for part in ("mlp.shared_experts*", "self_attn*")),
    ],
}
KIMI_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": [
        *(f"language_model.model.layers.{i}.self_attn*" for i in range(61)),
        "language_model.lm_head",
        "mm_projector*",
        "vision_tower*",
    ],
}
GPT_OSS = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
KIMI_K3 = compressed(
    scheme("group", bits=4, group_size=32, scale_dtype="torch.uint8"),
    None,
    ignore=["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"],
    format="mxfp4-pack-quantized",
)
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "scale_format": "e8m0",
            "group_size": 32,
            "qscheme": "per_group",
            "round_method": "half_even",
        },
        "input_tensors": {"dtype": "fp4", "scale_format": "e8m0", "group_size": 32},
    },
    "exclude": ["re:.*self_attn.*", "lm_head"],
}
MXFP8 = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}


def parse(quantization: dict | None, names: dict | None = None, dtype: str = FP8, layers: int = 4):
    return parse_quant_config(config(quantization, layers), tensors() if names is None else names, dtype)


SCALE_INV = tensors("weight_scale_inv", shape=(1, 1))
NVFP4_TENSORS = tensors(dtype=FP8, shape=(8, 1)) | {"layers.0.mlp.down_proj.weight_scale_2": ((), "float32")}
