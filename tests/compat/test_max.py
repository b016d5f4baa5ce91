"""MAX's QuantConfig: parsing of published checkpoints' configs, errors, and views of a config."""

from __future__ import annotations

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.compat import max as hf
from jaxquant.compat.max import QuantFormat, parse_quant_config
from jaxquant.export.hf import read_quantization
from tests.export.hf_published import (
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
    MINISTRAL,
    MXFP8,
    NVFP4_TENSORS,
    QUARK,
    QWEN3_STATIC,
    ROWWISE,
    SCALE_INV,
    STATIC,
    TENSOR,
    compressed,
    config,
    parse,
    scheme,
    tensors,
)

ALL = object()
CHANNEL, TOKEN = scheme("channel"), scheme("token", True)

# Parsed fields: format, input (granularity, origin, dtype, block), weight (granularity, dtype, block), (m, n, k).
CHANNELS = "compressed-tensors-fp8", (COLWISE, DYNAMIC, FP8, None), (ROWWISE, "float32", None), (1, 1, -1)
FLOATS_ALONE = "compressed-tensors-fp8", None, (ROWWISE, "float32", None), None
INT8 = "int8-w8a8", (COLWISE, DYNAMIC, "float32", None), (ROWWISE, "float32", None), (1, 1, -1)
NVFP4 = "nvfp4", (BLOCK, STATIC, "float32", (1, 16)), (BLOCK, FP8, (1, 16)), (1, 1, 16)
MXFP4 = "mxfp4", (BLOCK, DYNAMIC, "float32", (1, 32)), (BLOCK, "float8_e8m0fnu", (1, 32)), (1, 1, 32)
MX8 = "mxfp8", (BLOCK, DYNAMIC, "float8_e8m0fnu", (1, 32)), (BLOCK, "float8_e8m0fnu", (1, 32)), (1, 1, 32)


def whole(format: str) -> tuple:
    """Return the spec of a static scale per tensor."""
    return format, (TENSOR, STATIC, "float32", None), (TENSOR, "float32", None), (-1, -1, -1)


def blocks(format: str) -> tuple:
    """Return the spec of blocks of 128 by 128."""
    return format, (BLOCK, DYNAMIC, "float32", (1, 128)), (BLOCK, "float32", (128, 128)), (1, 128, 128)


PRESET = compressed(scheme("block", block_structure=[128, 128]), scheme("group", True, group_size=128))
STATIC_INPUT = {"layers__0__mlp__down_proj__input_scale": ((1,), "float32")}
MLP_OF_2 = [f"model.layers.2.{part}" for part in _PROJECTIONS[:3]]
NO_ATTENTION = compressed(CHANNEL, TOKEN, ["lm_head", "re:.*self_attn.*"])
FROM_1 = range(1, 126)
W8A8 = compressed(scheme("channel", kind="int"), scheme("token", True, kind="int"), format="int-quantized")
CASES = {
    # name: (config, layers, tensors, dtype), parsed fields, MLP layers, attention layers
    "RedHat FP8-dynamic": ((CT_DYNAMIC, 4, tensors(), FP8), CHANNELS, ALL, ALL),
    "FP8 static": ((CT_STATIC, 4, tensors(shape=(1,), **STATIC_INPUT), FP8), whole("compressed-tensors-fp8"), ALL, ALL),
    "FP8_BLOCK preset": ((PRESET, 4, tensors(shape=(1, 1)), FP8), blocks("compressed-tensors-fp8"), ALL, ALL),
    "weight-only FP8": ((compressed(scheme("channel"), None), 4, tensors(), FP8), FLOATS_ALONE, ALL, ALL),
    "attention ignored by regex": ((NO_ATTENTION, 4, tensors(), FP8), CHANNELS, ALL, ()),
    "MLP of layer 2 ignored": ((compressed(CHANNEL, TOKEN, MLP_OF_2), 4, tensors(), FP8), CHANNELS, (0, 1, 3), ALL),
    "Llama-3.1-405B-FP8": ((FBGEMM, 126, tensors(), FP8), ("fbgemm-fp8", *CHANNELS[1:]), FROM_1, FROM_1),
    "DeepSeek-V3": ((DEEPSEEK, 61, SCALE_INV, FP8), blocks("blockscaled-fp8"), ALL, ALL),
    "Ministral-3": ((MINISTRAL, 4, tensors("weight_scale_inv", shape=()), FP8), whole("fbgemm-fp8"), ALL, ALL),
    "Qwen3-32B-FP8-Static": ((QWEN3_STATIC, 64, tensors(shape=()), FP8), whole("modelopt-fp8"), ALL, ALL),
    "GLM-5.1-NVFP4": ((GLM_NVFP4, 78, NVFP4_TENSORS, "uint8"), NVFP4, range(3, 78), ()),
    "NVFP4 by tensor names": ((None, 4, NVFP4_TENSORS, "uint8"), NVFP4, ALL, ALL),
    "gpt-oss-20b": ((GPT_OSS, 24, {}, BF16), MXFP4, ALL, ()),
    "Kimi-K2.5-MXFP4 by quark": ((QUARK, 61, {}, BF16), MXFP4, ALL, ()),
    "mxfp8": ((MXFP8, 4, tensors(dtype="uint8"), FP8), MX8, ALL, ALL),
    "W8A8 int8": ((W8A8, 4, tensors(), "int8"), INT8, ALL, ALL),
}


@pytest.mark.parametrize("case", CASES)
def test_published_configs_read_as_max_reads_them_or_better(case):
    (quantization, layers, names, dtype), (format, inputs, weight, mnk), mlp, attention = CASES[case]
    result, nested = (parse_quant_config(config(quantization, layers, is_nested), names, dtype) for is_nested in (0, 1))
    assert result == nested
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


UP, Q_PROJ = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"
TWO_SCHEMES = compressed(CHANNEL, TOKEN, config_groups={
    "group_0": {"targets": ["re:.*self_attn.*"], "weights": CHANNEL, "input_activations": TOKEN},
    "group_1": {"targets": ["re:.*mlp.*"], "weights": scheme("tensor_group", bits=4, group_size=16)},
})  # fmt: skip
ERRORS = [
    (None, "expected a `quantization_config` field in Hugging Face config"),
    ({"quant_method": "foo"}, r"`quant_method` field \('foo'\) is provided but not"),
    ({"quant_method": "gptq"}, "Quant method: 'gptq'. Supported methods are"),
    (compressed(CHANNEL, scheme("row")), r"unsupported FP8 input activation strategy: row \(.*group_0.input_activati"),
    (compressed(scheme("channel", True), TOKEN), "weights.dynamic: dynamic weight scaling is not supported for compr"),
    ({"quant_method": "compressed-tensors"}, "config_groups must be specified"),
    (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme must be dynamic"),
    (DEEPSEEK | {"weight_block_size": [64, 64]}, r"weight_block_size must be \[128, 128\], got \[64, 64\]"),
    (compressed(CHANNEL, TOKEN, [UP]), "assumes uniform quantization for MLPs; layer 1 does not quantize mlp.up_proj"),
    (compressed(CHANNEL, TOKEN, [Q_PROJ]), "QKV and output projections; layer 1 does not quantize self_attn.q_proj"),
    (TWO_SCHEMES, "mlp.gate_proj has float4_e2m1fn weights, other layers float8_e4m3fn; a QuantConfig has a single"),
]
"""A config, and the error."""
MIXED_SCALES = tensors(layers__1__mlp__up_proj__weight_scale=((8, 1), BF16))
TENSOR_ERRORS = [
    (CT_DYNAMIC, {"embed_tokens.weight": ((8, 8), BF16)}, "there is no tensor layers.0.mlp.down_proj.weight_scale"),
    (FBGEMM, {}, "could not find weight scale dtype for FBGEMM FP8"),
    (FBGEMM, tensors(shape=(1, 2)), "only row-wise weight quantization"),
    (FBGEMM, MIXED_SCALES, "uniform weight scale dtype is supported for FBGEMM FP8"),
    (CT_DYNAMIC, {"layers.0.mlp.down_proj.weight_scale": ((8, 1), "float32")}, "original type from .* no lm_head"),
    (CT_DYNAMIC, tensors(a__bias=((8,), BF16), b__bias=((8,), "float32")), "Inconsistent bias dtypes found: bfloat16"),
]
"""A config, its tensors, and the error."""


def test_where_max_raises_we_name_the_key():
    for quantization, names, message in [*((each, None, message) for each, message in ERRORS), *TENSOR_ERRORS]:
        with pytest.raises(ValueError, match=message):
            parse(quantization, names, FP8)
    with pytest.raises(ValueError, match="num_hidden_layers must be a whole number from 1 to"):
        parse(CT_DYNAMIC, layers=2**70)
    with pytest.raises(ValueError, match="num_hidden_layers must be specified in hugg"):
        parse_quant_config({"quantization_config": CT_DYNAMIC}, tensors(), FP8)


def test_a_config_that_does_not_apply_to_the_dtype_is_none():
    for quantization, dtype in ((CT_DYNAMIC, "float16"), ({"quant_method": "gptq"}, "uint8"), (None, BF16)):
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
    ignored = [f"language_model.model.layers.1.{part}" for part in _PROJECTIONS]
    given = config(compressed(CHANNEL, TOKEN, ignored), 2, nested=True)
    result = parse_quant_config(given, names, FP8, "language_model.", "language_model.model.")
    assert result.weight_scale.dtype == "bfloat16"
    assert result.embedding_output_dtype == "float16"
    assert result.mlp_quantized_layers == result.attn_quantized_layers == {0}


def test_a_sidecar_is_read_beside_the_weights(tmp_path):
    excluded = ["*.self_attn.*", "model.layers.3.mlp*", "*.mlp.gate", "lm_head"]
    algorithm = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": excluded}
    sidecar = {"producer": {"name": "modelopt", "version": "0.30"}, "quantization": algorithm}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))
    given = config(None) | {"_name_or_path": str(tmp_path)}
    result = parse_quant_config(given, NVFP4_TENSORS, "uint8")
    assert (result.format, result.mlp_quantized_layers) == (QuantFormat.NVFP4, {0, 1, 2})
    assert not result.attn_quantized_layers
    read = read_quantization(config(None), sidecar=sidecar)
    assert read.kv_cache == FP8
    sidecar["quantization"] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    spec = read_quantization(config(None), sidecar=sidecar).spec("model.layers.0.mlp.up_proj")
    assert (spec.weight.granularity, spec.input.origin) == (TENSOR, STATIC)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"hf_quant_config.json is not JSON"):
        parse_quant_config(given, NVFP4_TENSORS, "uint8")


ONES, HALF, QUARTER = np.ones((8, 1), np.float32), np.float32([0.5]), np.float32([0.25])
FUSED = [
    (ONES, np.ones((4, 1), np.float32), CT_DYNAMIC, True),
    (ONES, np.ones((8, 2), np.float32), CT_DYNAMIC, False),
    (ONES, None, CT_DYNAMIC, False),
    (HALF, HALF, CT_STATIC, True),
    (HALF, QUARTER, CT_STATIC, False),
    (HALF, QUARTER, compressed(scheme("tensor"), scheme("tensor", True)), True),
    (((), "float32"), ((), "float32"), CT_STATIC, False),
]


def test_gate_and_up_fuse_where_their_scales_join():
    for gate, up, quantization, fused in FUSED:
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
    with pytest.raises(ValueError, match="Can not determine the quantized scales type; use NVFP4"):
        parse(CT_DYNAMIC).quantized_scales_type((1, 2))
    assert hf.fp4_packed_k(64, parse(GPT_OSS, {}, BF16)) == 32
    assert hf.fp4_packed_k(64, None) == 64


@pytest.mark.parametrize(("shape", "dtype"), [((200, 10), "float8_e4m3fn"), ((1, 1), "uint8"), ((128, 4), "float32")])
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
    with pytest.raises(ValueError, match=r"do not match scales of shape .*; pass interleaved"):
        hf.deinterleave_scales(out, (shape[0] + 128, shape[1]))


def test_a_config_may_have_its_fields_as_attributes_and_numpys_integers():
    inner = types.SimpleNamespace(**config(CT_DYNAMIC))
    shapes = tensors(shape=(np.int64(8), np.int64(1)))
    for given in (inner, types.SimpleNamespace(text_config=inner)):
        assert parse_quant_config(given, shapes, FP8) == parse(CT_DYNAMIC)
    with pytest.raises(TypeError, match="huggingface_config must be a dict, have to_dict"):
        parse_quant_config(object(), tensors(), FP8)
    with pytest.raises(TypeError, match="dtype must be a dtype, got None"):
        parse_quant_config(config(CT_DYNAMIC), tensors(), None)
