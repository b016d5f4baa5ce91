"""Configs of published checkpoints: what MAX's QuantConfig says of them."""

from __future__ import annotations

import pytest

from jaxquant.config.hf import parse_quant_config
from tests.config.hf_published import (
    _PROJECTIONS,
    BF16,
    BLOCK,
    COLWISE,
    CT_DYNAMIC,
    CT_STATIC,
    DEEPSEEK,
    DYNAMIC,
    FBGEMM,
    FP8,
    GLM_NVFP4,
    GPT_OSS,
    KIMI_K3,
    KIMI_NVFP4,
    MINISTRAL,
    MXFP8,
    NVFP4_TENSORS,
    QUARK,
    QWEN3_MOE,
    QWEN3_STATIC,
    ROWWISE,
    SCALE_INV,
    STATIC,
    TENSOR,
    compressed,
    config,
    scheme,
    tensors,
)

ALL = object()

# What is read: format, input (granularity, origin, dtype, block), weight (granularity, dtype, block), (m, n, k).
CHANNELS = "compressed-tensors-fp8", (COLWISE, DYNAMIC, FP8, None), (ROWWISE, "float32", None), (1, 1, -1)
FLOATS_ALONE = "compressed-tensors-fp8", None, (ROWWISE, "float32", None), None
INT8 = "int8-w8a8", (COLWISE, DYNAMIC, "float32", None), (ROWWISE, "float32", None), (1, 1, -1)
NVFP4 = "nvfp4", (BLOCK, STATIC, "float32", (1, 16)), (BLOCK, FP8, (1, 16)), (1, 1, 16)
MXFP4 = "mxfp4", (BLOCK, DYNAMIC, "float32", (1, 32)), (BLOCK, "float8_e8m0fnu", (1, 32)), (1, 1, 32)
MX8 = "mxfp8", (BLOCK, DYNAMIC, "float8_e8m0fnu", (1, 32)), (BLOCK, "float8_e8m0fnu", (1, 32)), (1, 1, 32)


def whole(format: str) -> tuple:
    """A scale for each tensor, fixed beforehand."""
    return format, (TENSOR, STATIC, "float32", None), (TENSOR, "float32", None), (-1, -1, -1)


def blocks(format: str) -> tuple:
    """Blocks of 128 by 128."""
    return format, (BLOCK, DYNAMIC, "float32", (1, 128)), (BLOCK, "float32", (128, 128)), (1, 128, 128)


TOKENS = scheme("token", True)
PRESET = compressed(scheme("block", block_structure=[128, 128]), scheme("group", True, group_size=128))
STATIC_INPUT = {"layers__0__mlp__down_proj__input_scale": ((1,), "float32")}
MLP_OF_2 = [f"model.layers.2.{part}" for part in _PROJECTIONS[:3]]
MINIMAX = DEEPSEEK | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
W8A8 = compressed(scheme("channel", kind="int"), scheme("token", True, kind="int"), format="int-quantized")
CASES = {
    # name: (config, layers, tensors, dtype), what is read, MLP layers, attention layers
    "RedHat FP8-dynamic": ((CT_DYNAMIC, 4, tensors(), FP8), CHANNELS, ALL, ALL),
    "FP8 static": (
        (CT_STATIC, 4, tensors(shape=(1,), **STATIC_INPUT), FP8), whole("compressed-tensors-fp8"), ALL, ALL,
    ),
    "FP8_BLOCK preset": ((PRESET, 4, tensors(shape=(1, 1)), FP8), blocks("compressed-tensors-fp8"), ALL, ALL),
    "weight-only FP8": ((compressed(scheme("channel"), None), 4, tensors(), FP8), FLOATS_ALONE, ALL, ALL),
    "attention ignored by regex": (
        (compressed(scheme("channel"), TOKENS, ["lm_head", "re:.*self_attn.*"]), 4, tensors(), FP8), CHANNELS, ALL, (),
    ),
    "MLP of layer 2 ignored": (
        (compressed(scheme("channel"), TOKENS, MLP_OF_2), 4, tensors(), FP8), CHANNELS, (0, 1, 3), ALL,
    ),
    "Llama-3.1-405B-FP8": (
        (FBGEMM, 126, tensors(), FP8), ("fbgemm-fp8", *CHANNELS[1:]), range(1, 126), range(1, 126),
    ),
    "DeepSeek-V3": ((DEEPSEEK, 61, SCALE_INV, FP8), blocks("blockscaled-fp8"), ALL, ALL),
    "Qwen3-30B-A3B-FP8": ((QWEN3_MOE, 48, SCALE_INV, FP8), blocks("blockscaled-fp8"), ALL, ALL),
    "MiniMax-M2.5": ((MINIMAX, 62, SCALE_INV, FP8), blocks("blockscaled-fp8"), ALL, ALL),
    "Ministral-3": ((MINISTRAL, 4, tensors("weight_scale_inv", shape=()), FP8), whole("fbgemm-fp8"), ALL, ALL),
    "Qwen3-32B-FP8-Static": ((QWEN3_STATIC, 64, tensors(shape=()), FP8), whole("modelopt-fp8"), ALL, ALL),
    "GLM-5.1-NVFP4": ((GLM_NVFP4, 78, NVFP4_TENSORS, "uint8"), NVFP4, range(3, 78), ()),
    "Kimi-K2.5-NVFP4": ((KIMI_NVFP4, 61, NVFP4_TENSORS, "uint8"), NVFP4, ALL, ()),
    "NVFP4 by tensor names": ((None, 4, NVFP4_TENSORS, "uint8"), NVFP4, ALL, ALL),
    "gpt-oss-20b": ((GPT_OSS, 24, {}, BF16), MXFP4, ALL, ()),
    "Kimi-K3": ((KIMI_K3, 93, {}, BF16), MXFP4, ALL, ()),
    "Kimi-K2.5-MXFP4 by quark": ((QUARK, 61, {}, BF16), MXFP4, ALL, ()),
    "mxfp8": ((MXFP8, 4, tensors(dtype="uint8"), FP8), MX8, ALL, ALL),
    "W8A8 int8": ((W8A8, 4, tensors(), "int8"), INT8, ALL, ALL),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])
@pytest.mark.parametrize("case", CASES)
def test_published_configs_read_as_max_reads_them_or_better(case, nested):
    (quantization, layers, names, dtype), (format, inputs, weight, mnk), mlp, attention = CASES[case]
    result = parse_quant_config(config(quantization, layers, nested), names, dtype)
    assert result is not None
    assert result.format.value == format
    if inputs is None:
        assert result.input_scale is None
        assert not result.is_static
        assert not result.is_dynamic
    else:
        scale = result.input_scale
        assert (scale.granularity, scale.origin, scale.dtype, scale.block_size) == inputs
        assert (result.is_static, result.is_dynamic) == (inputs[1] is STATIC, inputs[1] is DYNAMIC)
    scale = result.weight_scale
    assert (scale.granularity, scale.dtype, scale.block_size) == weight
    every = range(layers)
    assert result.mlp_quantized_layers == set(every if mlp is ALL else mlp)
    assert result.attn_quantized_layers == set(every if attention is ALL else attention)
    assert result.embedding_output_dtype == "bfloat16" or not names
    if mnk is not None:
        assert result.scales_granularity_mnk == mnk
