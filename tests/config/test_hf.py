"""Hugging Face configs: the shapes of published checkpoints, MAX's views and errors, three exclusion dialects."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.config import hf
from jaxquant.config.hf import QuantFormat, ScaleGranularity, ScaleOrigin, parse_quant_config, read_quantization

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
GEMMA_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", *(f"model.language_model.layers.{i}.self_attn*" for i in range(60))],
}
MINIMAX_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": [
        "lm_head",
        *(f"model.layers.{i}.{part}" for i in range(62) for part in ("block_sparse_moe.gate", "self_attn*")),
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

ALL = object()
SCALE_INV = tensors("weight_scale_inv", shape=(1, 1))
NVFP4_TENSORS = tensors(dtype=FP8, shape=(8, 1)) | {"layers.0.mlp.down_proj.weight_scale_2": ((), "float32")}
CASES = {
    # name: config, layers, tensors, dtype → format, input (granularity, origin, dtype, block), weight (granularity,
    # dtype, block), MLP layers, attention layers, (m, n, k)
    "RedHat FP8-dynamic": (
        (CT_DYNAMIC, 4, tensors(), FP8),
        ("compressed-tensors-fp8", (COLWISE, DYNAMIC, FP8, None), (ROWWISE, "float32", None), ALL, ALL, (1, 1, -1)),
    ),
    "FP8 static": (
        (CT_STATIC, 4, tensors(shape=(1,), **{"layers__0__mlp__down_proj__input_scale": ((1,), "float32")}), FP8),
        (
            "compressed-tensors-fp8",
            (TENSOR, STATIC, "float32", None),
            (TENSOR, "float32", None),
            ALL,
            ALL,
            (-1, -1, -1),
        ),
    ),
    "FP8_BLOCK preset": (
        (
            compressed(scheme("block", block_structure=[128, 128]), scheme("group", True, group_size=128)),
            4,
            tensors(shape=(1, 1)),
            FP8,
        ),
        (
            "compressed-tensors-fp8",
            (BLOCK, DYNAMIC, "float32", (1, 128)),
            (BLOCK, "float32", (128, 128)),
            ALL,
            ALL,
            (1, 128, 128),
        ),
    ),
    "weight-only FP8": (
        (compressed(scheme("channel"), None), 4, tensors(), FP8),
        ("compressed-tensors-fp8", None, (ROWWISE, "float32", None), ALL, ALL, None),
    ),
    "attention ignored by regex": (
        (compressed(scheme("channel"), scheme("token", True), ["lm_head", "re:.*self_attn.*"]), 4, tensors(), FP8),
        ("compressed-tensors-fp8", (COLWISE, DYNAMIC, FP8, None), (ROWWISE, "float32", None), ALL, (), (1, 1, -1)),
    ),
    "MLP of layer 2 ignored": (
        (
            compressed(
                scheme("channel"), scheme("token", True), [f"model.layers.2.{part}" for part in _PROJECTIONS[:3]]
            ),
            4,
            tensors(),
            FP8,
        ),
        (
            "compressed-tensors-fp8",
            (COLWISE, DYNAMIC, FP8, None),
            (ROWWISE, "float32", None),
            (0, 1, 3),
            ALL,
            (1, 1, -1),
        ),
    ),
    "Llama-3.1-405B-FP8": (
        (FBGEMM, 126, tensors(), FP8),
        (
            "fbgemm-fp8",
            (COLWISE, DYNAMIC, FP8, None),
            (ROWWISE, "float32", None),
            range(1, 126),
            range(1, 126),
            (1, 1, -1),
        ),
    ),
    **{
        name: (
            (quantization, layers, SCALE_INV, FP8),
            (
                "blockscaled-fp8",
                (BLOCK, DYNAMIC, "float32", (1, 128)),
                (BLOCK, "float32", (128, 128)),
                ALL,
                ALL,
                (1, 128, 128),
            ),
        )
        for name, quantization, layers in (
            ("DeepSeek-V3", DEEPSEEK, 61),
            ("DeepSeek-V3.2", DEEPSEEK | {"scale_fmt": "ue8m0"}, 61),
            ("Qwen3-30B-A3B-FP8", QWEN3_MOE, 48),
            (
                "MiniMax-M2.5",
                DEEPSEEK
                | {
                    "fmt": "float8_e4m3fn",
                    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
                },
                62,
            ),
            ("Step-3.7", {key: value for key, value in DEEPSEEK.items() if key != "fmt"}, 45),
        )
    },
    "Ministral-3": (
        (MINISTRAL, 4, tensors("weight_scale_inv", shape=()), FP8),
        ("fbgemm-fp8", (TENSOR, STATIC, "float32", None), (TENSOR, "float32", None), ALL, ALL, (-1, -1, -1)),
    ),
    "Qwen3-32B-FP8-Static": (
        (QWEN3_STATIC, 64, tensors(shape=()), FP8),
        ("modelopt-fp8", (TENSOR, STATIC, "float32", None), (TENSOR, "float32", None), ALL, ALL, (-1, -1, -1)),
    ),
    **{
        name: (
            (quantization, layers, NVFP4_TENSORS, "uint8"),
            ("nvfp4", (BLOCK, STATIC, "float32", (1, 16)), (BLOCK, FP8, (1, 16)), mlp, (), (1, 1, 16)),
        )
        for name, quantization, layers, mlp in (
            ("GLM-5.1-NVFP4", GLM_NVFP4, 78, range(3, 78)),
            ("Kimi-K2.5-NVFP4", KIMI_NVFP4, 61, ALL),
            ("Gemma-4-31B-IT-NVFP4", GEMMA_NVFP4, 60, ALL),
            ("MiniMax-M2.5-NVFP4", MINIMAX_NVFP4, 62, ALL),
        )
    },
    "NVFP4 by tensor names": (
        (None, 4, NVFP4_TENSORS, "uint8"),
        ("nvfp4", (BLOCK, STATIC, "float32", (1, 16)), (BLOCK, FP8, (1, 16)), ALL, ALL, (1, 1, 16)),
    ),
    "gpt-oss-20b": (
        (GPT_OSS, 24, {}, BF16),
        (
            "mxfp4",
            (BLOCK, DYNAMIC, "float32", (1, 32)),
            (BLOCK, "float8_e8m0fnu", (1, 32)),
            ALL,
            (),
            (1, 1, 32),
        ),
    ),
    "Kimi-K3": (
        (KIMI_K3, 93, {}, BF16),
        (
            "mxfp4",
            (BLOCK, DYNAMIC, "float32", (1, 32)),
            (BLOCK, "float8_e8m0fnu", (1, 32)),
            ALL,
            (),
            (1, 1, 32),
        ),
    ),
    "Kimi-K2.5-MXFP4 by quark": (
        (QUARK, 61, {}, BF16),
        (
            "mxfp4",
            (BLOCK, DYNAMIC, "float32", (1, 32)),
            (BLOCK, "float8_e8m0fnu", (1, 32)),
            ALL,
            (),
            (1, 1, 32),
        ),
    ),
    "mxfp8": (
        (MXFP8, 4, tensors(dtype="uint8"), FP8),
        (
            "mxfp8",
            (BLOCK, DYNAMIC, "float8_e8m0fnu", (1, 32)),
            (BLOCK, "float8_e8m0fnu", (1, 32)),
            ALL,
            ALL,
            (1, 1, 32),
        ),
    ),
    "W8A8 int8": (
        (
            compressed(scheme("channel", kind="int"), scheme("token", True, kind="int"), format="int-quantized"),
            4,
            tensors(),
            "int8",
        ),
        ("int8-w8a8", (COLWISE, DYNAMIC, "float32", None), (ROWWISE, "float32", None), ALL, ALL, (1, 1, -1)),
    ),
}


@pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])
@pytest.mark.parametrize("case", CASES)
def test_published_configs_read_as_max_reads_them_or_better(case, nested):
    (quantization, layers, names, dtype), (format, inputs, weight, mlp, attention, mnk) = CASES[case]
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


def parse(quantization: dict | None, names: dict | None = None, dtype: str = FP8, layers: int = 4):
    return parse_quant_config(config(quantization, layers), tensors() if names is None else names, dtype)


ERRORS = {
    "no config": (lambda: parse(None), "expected a `quantization_config` field in Hugging Face config"),
    "unknown method": (lambda: parse({"quant_method": "foo"}), r"`quant_method` field \('foo'\) is provided but not"),
    "awq": (lambda: parse({"quant_method": "awq"}), r"\('awq'\) is provided but not recognized; its weights"),
    "gptq as fp8": (lambda: parse({"quant_method": "gptq"}), "Quant method: 'gptq'. Supported methods are"),
    "CT input strategy": (
        lambda: parse(compressed(scheme("channel"), scheme("row"))),
        r"unsupported FP8 input activation strategy: row \(.*group_0.input_activations.strategy",
    ),
    "CT weight strategy": (
        lambda: parse(compressed(scheme("row"), scheme("token", True))),
        r"unsupported FP8 weight strategy: row \(.*group_0.weights.strategy",
    ),
    "CT dynamic weights": (
        lambda: parse(compressed(scheme("channel", True), scheme("token", True))),
        "weights.dynamic: dynamic weight scaling is not supported for compressed-tensors",
    ),
    "CT no scale": (
        lambda: parse(CT_DYNAMIC, {"embed_tokens.weight": ((8, 8), BF16)}),
        "no tensor is named layers.0.mlp.down_proj.weight_scale",
    ),
    "CT no group": (lambda: parse({"quant_method": "compressed-tensors"}), "config_groups must be specified"),
    "fbgemm no scale": (lambda: parse(FBGEMM, {}), "could not find weight scale dtype for FBGEMM FP8"),
    "fbgemm scale shape": (lambda: parse(FBGEMM, tensors(shape=(1, 2))), "only row-wise weight quantization"),
    "fbgemm mixed scales": (
        lambda: parse(FBGEMM, tensors(layers__1__mlp__up_proj__weight_scale=((8, 1), BF16))),
        "uniform weight scale dtype is supported for FBGEMM FP8",
    ),
    "fp8 no scale": (lambda: parse(DEEPSEEK, {}), "could not find weight scale dtype for FP8 quantized weights"),
    "fp8 no scheme": (
        lambda: parse({"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "activation_scheme must be specified",
    ),
    "fp8 static blocks": (
        lambda: parse(DEEPSEEK | {"activation_scheme": "static"}),
        "activation_scheme must be dynamic",
    ),
    "fp8 block size": (
        lambda: parse(DEEPSEEK | {"weight_block_size": [64, 64]}),
        r"weight_block_size must be \[128, 128\], got \[64, 64\]",
    ),
    "fp8 tensorwise scheme": (
        lambda: parse({"quant_method": "fp8", "activation_scheme": "sometimes"}),
        "Unsupported activation_scheme for tensorwise FP8: 'sometimes'",
    ),
    "partial MLP": (
        lambda: parse(compressed(scheme("channel"), scheme("token", True), ["model.layers.1.mlp.up_proj"])),
        "assumes uniform quantization for MLPs; layer 1 leaves out mlp.up_proj",
    ),
    "partial attention": (
        lambda: parse(compressed(scheme("channel"), scheme("token", True), ["model.layers.1.self_attn.q_proj"])),
        "uniform quantization for attention QKV and output projections; layer 1 leaves out self_attn.q_proj",
    ),
    "no dtype of the head": (
        lambda: parse(CT_DYNAMIC, {"layers.0.mlp.down_proj.weight_scale": ((8, 1), "float32")}),
        "cannot determine original type from checkpoint",
    ),
    "biases": (
        lambda: parse(CT_DYNAMIC, tensors(a__bias=((8,), BF16), b__bias=((8,), "float32"))),
        "Inconsistent bias dtypes found: bfloat16, float32",
    ),
    "mixed modelopt": (
        lambda: parse(
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}},
            },
            dtype="uint8",
        ),
        "quant_algo MIXED_PRECISION has no one QuantConfig",
    ),
    "too many layers": (lambda: parse(CT_DYNAMIC, layers=2**70), "num_hidden_layers must be a whole number from 1 to"),
    "no layers": (
        lambda: parse_quant_config({"quantization_config": CT_DYNAMIC}, tensors(), FP8),
        "num_hidden_layers must be specified",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_where_max_raises_we_name_the_key(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [(CT_DYNAMIC, "float16"), ({"quant_method": "gptq"}, BF16), ({"quant_method": "gptq"}, "uint8"), (None, BF16)],
)
def test_a_config_that_does_not_apply_to_the_dtype_is_none(quantization, dtype):
    assert parse(quantization, tensors(), dtype) is None


def test_values_that_only_max_names():
    result = parse(FBGEMM, layers=126)
    assert result.input_scale.activation_scale_ub == 1200.0
    assert (result.quant_method, result.mlp_in_float8) == ("fbgemm_fp8", result.mlp_quantized_layers)
    assert parse(GLM_NVFP4, NVFP4_TENSORS, "uint8", 78).shared_experts_weight_dtype == "bfloat16"
    assert parse(CT_DYNAMIC, tensors(a__bias=((8,), BF16))).bias_dtype == "bfloat16"
    assert parse(CT_DYNAMIC).bias_dtype is None
    assert hf.Float8Config is hf.QuantConfig
    assert hf.Float8ScaleGranularity.BLOCK is BLOCK
    assert (str(BLOCK), str(STATIC), str(QuantFormat.NVFP4)) == ("block", "static", "nvfp4")


def test_prefixes_tell_the_decoder_from_other_towers():
    names = {
        "language_model.layers.0.mlp.down_proj.weight_scale": ((8, 1), BF16),
        "layers.0.mlp.down_proj.weight_scale": ((8, 1), "float32"),
        "language_model.embed_tokens.weight": ((8, 8), "float16"),
        "language_model.lm_head.weight": ((8, 8), "float32"),
        "embed_tokens.weight": ((8, 8), BF16),
    }
    quantization = compressed(
        scheme("channel"), scheme("token", True), [f"language_model.model.layers.1.{part}" for part in _PROJECTIONS]
    )
    result = parse_quant_config(
        config(quantization, 2, nested=True), names, FP8, "language_model.", "language_model.model."
    )
    assert result.weight_scale.dtype == "bfloat16"
    assert result.embedding_output_dtype == "float16"
    assert result.mlp_quantized_layers == result.attn_quantized_layers == {0}


def test_a_sidecar_is_read_beside_the_weights(tmp_path):
    sidecar = {
        "producer": {"name": "modelopt", "version": "0.30"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["*.self_attn.*", "model.layers.3.mlp*", "*.mlp.gate", "lm_head", "model.layers.61*"],
        },
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))
    whole = config(None) | {"_name_or_path": str(tmp_path)}
    result = parse_quant_config(whole, NVFP4_TENSORS, "uint8")
    assert (result.format, result.mlp_quantized_layers, result.attn_quantized_layers) == (
        QuantFormat.NVFP4,
        {0, 1, 2},
        frozenset(),
    )
    read = read_quantization(config(None), sidecar=sidecar)
    assert (read.kv_cache, read.algorithm) == (FP8, "NVFP4")
    sidecar["quantization"] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    spec = read_quantization(config(None), sidecar=sidecar).spec("model.layers.0.mlp.up_proj")
    assert (spec.weight.granularity, spec.input.origin) == (TENSOR, STATIC)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"hf_quant_config.json is not JSON"):
        parse_quant_config(whole, NVFP4_TENSORS, "uint8")


@pytest.mark.parametrize(
    ("gate", "up", "quantization", "fused"),
    [
        (np.ones((8, 1), np.float32), np.ones((4, 1), np.float32), CT_DYNAMIC, True),
        (np.ones((8, 1), np.float32), np.ones((8, 2), np.float32), CT_DYNAMIC, False),
        (np.ones((8, 1), np.float32), None, CT_DYNAMIC, False),
        (np.float32([0.5]), np.float32([0.5]), CT_STATIC, True),
        (np.float32([0.5]), np.float32([0.25]), CT_STATIC, False),
        (np.float32([0.5]), np.float32([0.25]), compressed(scheme("tensor"), scheme("tensor", True)), True),
        (((), "float32"), ((), "float32"), CT_STATIC, False),
    ],
)
def test_gate_and_up_fuse_where_their_scales_join(gate, up, quantization, fused):
    names = {"layers.1.mlp.gate_proj.weight_scale": gate, "layers.1.mlp.up_proj.weight_scale": up}
    result = parse(quantization, tensors() | {name: value for name, value in names.items() if value is not None})
    assert result.can_use_fused_mlp is fused


def test_granularities_that_no_matmul_has():
    def made(inputs, weight):
        return hf.QuantConfig(inputs, weight, frozenset(), frozenset(), QuantFormat.FBGEMM_FP8)

    row_input = hf.InputScaleSpec(ROWWISE, DYNAMIC, "float32")
    column_input = hf.InputScaleSpec(COLWISE, DYNAMIC, "float32")
    blocks = hf.WeightScaleSpec(BLOCK, "float32", (128, 128))
    for config_, message in (
        (made(row_input, blocks), "unsupported input scale granularity"),
        (made(column_input, hf.WeightScaleSpec(COLWISE, "float32")), "unsupported weight scale granularity"),
        (made(column_input, blocks), "k_input_granularity and k_weight_granularity must be the same, got -1 and 128"),
        (made(None, blocks), "inputs are not quantized"),
    ):
        with pytest.raises(ValueError, match=message):
            _ = config_.scales_granularity_mnk
    with pytest.raises(ValueError, match="block_size must be specified for block-wise scaling"):
        hf.WeightScaleSpec(BLOCK, "float32")
    with pytest.raises(ValueError, match="block_size must be a tuple of two integers"):
        hf.InputScaleSpec(BLOCK, DYNAMIC, "float32", None, (1, 2, 3))


def test_types_of_the_scales_that_quantizing_yields():
    nvfp4 = parse(GLM_NVFP4, NVFP4_TENSORS, "uint8", 78).quantized_scales_type((200, 1000))
    assert (nvfp4.shape, nvfp4.dtype) == ((2, 16, 32, 4, 4), jnp.float8_e4m3fn)
    mxfp4 = parse(GPT_OSS, {}, BF16).quantized_scales_type((3, 65))
    assert (mxfp4.shape, mxfp4.dtype) == ((3, 3), jnp.float8_e8m0fnu)
    block = parse(DEEPSEEK, SCALE_INV).quantized_scales_type((256, 512))
    assert (block.shape, block.dtype) == ((4, 256), jnp.float32)
    with pytest.raises(ValueError, match="Can not determine the quantized scales type"):
        parse(CT_DYNAMIC).quantized_scales_type((1, 2))
    assert hf.fp4_packed_k(64, parse(GPT_OSS, {}, BF16)) == 32
    assert hf.fp4_packed_k(64, None) == 64


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "uint8", "float32"])
@pytest.mark.parametrize("shape", [(128, 4), (200, 10), (1, 1)])
def test_scales_interleave_as_defined_and_come_back(shape, dtype):
    raw = np.random.default_rng(0).integers(1, 100, shape, np.uint8)
    scales = jax.lax.bitcast_convert_type(jnp.asarray(raw), dtype) if dtype != "float32" else jnp.asarray(raw, dtype)
    out = hf.interleave_scales(scales)
    assert out.dtype == scales.dtype
    assert out.shape == (-(-shape[0] // 128), -(-shape[1] // 4), 32, 4, 4)
    bits = np.asarray(out if dtype == "float32" else jax.lax.bitcast_convert_type(out, jnp.uint8))
    expected = np.zeros(out.shape)
    for r, c in np.ndindex(shape):
        expected[r // 128, c // 4, r % 32, r % 128 // 32, c % 4] = raw[r, c]
    np.testing.assert_array_equal(bits, expected)
    for stored in (out, out.reshape(-1, 4)):
        back = hf.deinterleave_scales(stored, shape)
        assert back.dtype == scales.dtype
        back = back if dtype == "float32" else jax.lax.bitcast_convert_type(back, jnp.uint8)
        np.testing.assert_array_equal(back, raw)
    with pytest.raises(ValueError, match="do not hold scales of shape"):
        hf.deinterleave_scales(out, (shape[0] + 128, shape[1]))


def decided(quantization: dict, **wanted) -> None:
    read = read_quantization(config(quantization))
    for module, expected in wanted.items():
        module = module.replace("__", ".")
        assert (read.spec(module) is not None) is expected, module
        rule = read.decide(module)
        if rule is not None and not rule.names and not module.endswith(("qkv_proj", "gate_up_proj")):
            assert re.fullmatch(rule.path, module.replace(".", "/")), (rule.path, module)


def test_three_dialects_of_exclusion():
    decided(
        DEEPSEEK | {"modules_to_not_convert": ["model.layers.0.mlp.gate", "visual", "layers.3.mlp.down_proj"]},
        model__layers__0__mlp__gate=False,
        model__layers__0__mlp__gate_proj=True,
        visual__blocks__0__qkv=False,
        model__visual=False,
        model__visual__qkv=True,  # transformers matches at the start or in full at the end
        model__layers__3__mlp__down_proj=False,
        model__layers__13__mlp__down_proj=True,
        lm_head=False,
        model__layers__1__block_sparse_moe__gate=False,
    )
    decided(
        compressed(scheme("channel"), None, ["lm_head", r"re:.*mlp\.gate$", "re:model.vision", "re:(?i)MTP"]),
        mtp__fc=False,
        lm_head=False,
        model__lm_head=True,
        model__layers__0__mlp__gate=False,
        model__layers__0__mlp__gate_proj=True,
        model__vision_tower__fc1=False,
    )
    decided(
        GLM_NVFP4 | {"ignore": ["*.mlp.gate*", "*.self_attn.*", "model.layers.1.*"], "exclude_modules": ["x?[ab]"]},
        model__layers__0__mlp__gate=False,
        model__layers__0__mlp__gate_proj=True,
        model__language_model__layers__0__self_attn__q_proj=False,
        layers__1__mlp__up_proj=False,
        layers__11__mlp__up_proj=True,
        x1a=False,
        x1c=True,
    )


def test_fused_layers_are_decided_by_their_parts():
    decided(compressed(scheme("channel"), None, [r"re:.*\.[qkv]_proj"]), a__qkv_proj=False, a__gate_up_proj=True)
    decided(compressed(scheme("channel"), None, ["a.qkv_proj"]), a__qkv_proj=False)
    with pytest.raises(ValueError, match=r"a.qkv_proj fuses a.q_proj, a.k_proj, a.v_proj, which the checkpoint"):
        read_quantization(config(compressed(scheme("channel"), None, ["a.q_proj"]))).spec("a.qkv_proj")


def test_groups_go_from_the_most_to_the_least_specific_target():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": scheme("channel"), "input_activations": None},
        "group_1": {
            "targets": [r"re:.*down_proj"],
            "weights": scheme("group", bits=4, kind="int", group_size=128),
            "format": "pack-quantized",
        },
        "group_2": {"targets": ["a.down_proj"], "weights": scheme("tensor_group", bits=4, group_size=16)},
    }
    read = read_quantization(config({"quant_method": "compressed-tensors", "config_groups": groups}))
    found = {name: read.spec(name) for name in ("a.up_proj", "b.down_proj", "a.down_proj")}
    assert [spec.weight.dtype for spec in found.values()] == [FP8, "int4", "float4_e2m1fn"]
    assert [spec.packing for spec in found.values()] == ["plain", "pack-quantized", "nvfp4-pack"]
    assert found["b.down_proj"].weight.block_size == (1, 128)
    assert found["a.down_proj"].weight.outer_scale


def test_layers_of_mixed_precision_and_of_a_hybrid():
    layers = {
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "MXFP8", "group_size": 32},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    read = read_quantization(config(mixed))
    found = [read.spec(name) for name in layers]
    assert [spec.weight.dtype for spec in found] == ["float4_e2m1fn", FP8, "float4_e2m1fn"]
    assert [spec.input is None for spec in found] == [False, False, True]
    assert read.spec("model.layers.0.self_attn.k_proj") is None
    hybrid = DEEPSEEK | {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    }
    read = read_quantization(config(hybrid))
    dtypes = {
        "layers.0.ffn.experts.3.w1": "float4_e2m1fn",
        "layers.0.attn.wq_a": FP8,
        "layers.0.ffn.shared_experts.w1": FP8,
        "mtp.0.ffn.experts.0.w1": FP8,
    }
    assert {name: read.spec(name).weight.dtype for name in dtypes} == dtypes
    assert read.spec("head") is None


def test_power_of_two_scales_and_general_blocks_are_kept():
    spec = read_quantization(config(DEEPSEEK | {"scale_fmt": "ue8m0", "weight_block_size": [64, 32]})).spec("a")
    assert spec.weight.power_of_two_scale
    assert (spec.weight.block_size, spec.input.block_size) == ((64, 32), (1, 32))
    assert not read_quantization(config(DEEPSEEK)).spec("a").input.power_of_two_scale


REFUSED = {
    "gptq": ({"quant_method": "gptq"}, NotImplementedError, "quant_method 'gptq' is not supported: its groups"),
    "awq": ({"quant_method": "awq"}, NotImplementedError, "quant_method 'awq' is not supported: its weights"),
    "unknown": ({"quant_method": "x"}, ValueError, "quantization_config.quant_method 'x'; known methods are"),
    "missing": ({"fmt": "e4m3"}, ValueError, "quantization_config.quant_method is missing; known methods"),
    "kind": ({"quant_method": 3}, TypeError, "quantization_config.quant_method must be a string, got 3"),
    "list": (
        compressed(scheme("channel"), None) | {"ignore": "lm_head"},
        TypeError,
        r"quantization_config.ignore must be a list of strings, got 'lm_head'",
    ),
    "regex": (compressed(scheme("channel"), None, ["re:("]), ValueError, r"ignore\[0\] 're:\(' is not a regular exp"),
    "exclusion regex": (
        DEEPSEEK | {"modules_to_not_convert": ["*gate"]},
        ValueError,
        r"modules_to_not_convert\[0\] '\*gate' is not a regular expression",
    ),
    "bits": (
        compressed(scheme("channel", bits=3, kind="int"), None),
        NotImplementedError,
        "group_0.weights.num_bits 3 with type 'int' is not supported",
    ),
    "order": (
        compressed(scheme("group", bits=4, kind="int", group_size=128, actorder="group"), None),
        NotImplementedError,
        "weights.actorder 'group' is not supported",
    ),
    "class": (
        compressed(scheme("channel"), None)
        | {"config_groups": {"group_0": {"targets": ["Conv1D"], "weights": scheme("channel")}}},
        NotImplementedError,
        r"targets\[0\] 'Conv1D' names a class",
    ),
    "format": (compressed(scheme("channel"), None, format="marlin"), ValueError, "format 'marlin' is not known"),
    "block": (
        compressed(scheme("block"), None),
        ValueError,
        "weights.block_structure must be specified for strategy 'block'",
    ),
    "group": (compressed(scheme("group"), None), ValueError, "weights.group_size must be specified"),
    "algorithm": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        NotImplementedError,
        "quantization_config.quant_algo 'W4A8_AWQ' is not supported; supported ones are FP8",
    ),
    "group of NVFP4": (GLM_NVFP4 | {"group_size": 32}, ValueError, "group_size must be 16 for NVFP4, got 32"),
    "quark": (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}},
        NotImplementedError,
        "global_quant_config.weight.dtype 'int8' with scale_format '' is not supported",
    ),
    "bound": (
        FBGEMM | {"activation_scale_ub": -1},
        ValueError,
        "activation_scale_ub must be a finite number above 0, got -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(case):
    quantization, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        read_quantization(config(quantization))


def test_two_configs_that_differ_are_refused():
    both = config(DEEPSEEK) | {"text_config": {"quantization_config": FBGEMM}}
    with pytest.raises(ValueError, match=r"quantization_config and text_config\.quantization_config differ"):
        read_quantization(both)
    assert read_quantization(config(DEEPSEEK) | {"text_config": {"quantization_config": DEEPSEEK}}) is not None
    assert read_quantization({}) is None
    with pytest.raises(TypeError, match="the Hugging Face config must be a dict, got list"):
        read_quantization([])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("entry", [{"shape": [8, 1], "dtype": "F32", "data_offsets": [0, 32]}, np.ones((8, 1), "f4")])
def test_tensors_are_headers_or_arrays(entry):
    names = {"__metadata__": {"format": "pt"}, "layers.0.mlp.down_proj.weight_scale": entry}
    names["embed_tokens.weight"] = {"shape": [8, 8], "dtype": "BF16"}
    result = parse(CT_DYNAMIC, names)
    assert (result.weight_scale.dtype, result.embedding_output_dtype) == ("float32", "bfloat16")
    for bad in (3, {"shape": [8]}, {"shape": [-1], "dtype": "F32"}, ((8,), "F33")):
        with pytest.raises(TypeError, match="tensor 'a'"):
            parse(CT_DYNAMIC, {"a": bad})


def test_specs_become_recipes():
    recipe = hf.to_recipe(read_quantization(config(CT_DYNAMIC)).spec("a"), "checkpoint")
    assert (recipe.fwd.rhs.granularity, recipe.fwd.lhs.granularity) == ("per_channel", "per_channel")
    assert (recipe.fwd.rhs.dtype, recipe.dlhs.lhs, recipe.drhs.rhs) == (FP8, None, None)
    weight_only = hf.to_recipe(
        read_quantization(config(compressed(scheme("group", group_size=64), None))).spec("a"), "x"
    )
    assert weight_only.fwd.lhs is None
    assert (weight_only.fwd.rhs.granularity, weight_only.fwd.rhs.tile_size) == ("per_tile", 64)


@pytest.mark.parametrize(
    ("quantization", "side", "expected"),
    [
        (FBGEMM, "input", {"granularity": "per_channel", "scale_bound": 1200.0}),
        (MINISTRAL, "input", {"granularity": "per_tensor", "scaling": "static"}),
        (DEEPSEEK, "weight", {"granularity": "per_block", "tile_size": 128, "free_size": 128}),
        (
            DEEPSEEK | {"scale_fmt": "ue8m0"},
            "input",
            {"granularity": "per_tile", "tile_size": 128, "scale_rounding": "up"},
        ),
        (MXFP8, "input", {"granularity": "per_tile", "tile_size": 32, "scale_dtype": "float8_e8m0fnu"}),
    ],
)
def test_fields_of_a_recipe_say_what_the_spec_says(quantization, side, expected):
    from jaxquant.config.hf.recipe import tensor_fields

    spec = read_quantization(config(quantization)).spec("model.layers.1.mlp.up_proj")
    assert tensor_fields(getattr(spec, side), side) == {"dtype": FP8} | expected


def test_what_no_recipe_says_is_refused():
    from jaxquant.config.hf.recipe import tensor_fields

    asymmetric = read_quantization(config(compressed(scheme("channel", symmetric=False), None))).spec("a")
    with pytest.raises(NotImplementedError, match="an asymmetric weight"):
        tensor_fields(asymmetric.weight, "weight")
    with pytest.raises(NotImplementedError, match="a weight scale that is colwise changes along the contraction"):
        tensor_fields(hf.OperandSpec(FP8, COLWISE), "weight")


@pytest.mark.parametrize(
    ("name", "scheme_"), [("q4_0", (32, 18)), ("q4_k", (256, 144)), ("q5_k", (256, 176)), ("q6_k", (256, 210))]
)
def test_quantization_encodings(name, scheme_):
    encoding = hf.QuantizationEncoding[name.upper()]
    assert (encoding.name, encoding.is_gguf) == (name, True)
    assert tuple(encoding.block_parameters) == (encoding.elements_per_block, encoding.block_size) == scheme_
    x = jax.ShapeDtypeStruct((2, 512), jnp.float32)
    data = jax.eval_shape(encoding.quantize, x)
    assert (data.shape, data.dtype) == ((2, 512 // scheme_[0] * scheme_[1]), jnp.uint8)
    assert jax.eval_shape(encoding.dequantize, data).shape == (2, 512)
    with pytest.raises(ValueError, match="is no multiple of"):
        encoding.dequantize(jnp.zeros((2, 17), jnp.uint8))
    with pytest.raises(TypeError, match="blocks are uint8"):
        encoding.dequantize(jnp.zeros((2, 18)))


def test_gptq_is_recognised():
    gptq = hf.QuantizationEncoding.GPTQ
    assert (gptq.name, gptq.is_gguf) == ("gptq", False)
    for call in (lambda: gptq.block_parameters, lambda: gptq.quantize(jnp.ones(32))):
        with pytest.raises(NotImplementedError, match="quantization encoding gptq"):
            call()
