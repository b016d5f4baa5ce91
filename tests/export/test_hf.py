"""Hugging Face configs, parsed into rules: exclusions, groups, specs, errors."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.compat.max import QuantizationEncoding
from jaxquant.core.qtensor import dequantize
from jaxquant.export import hf
from jaxquant.export.hf import read_quantization
from jaxquant.ops.dot_general import dot_general
from jaxquant.ops.operand import quantize_kernel
from tests.export.hf_published import CT_DYNAMIC, DEEPSEEK, FBGEMM, FP8, GLM_NVFP4, QUARK, compressed, config, scheme
from tests.numerics import dot_bound


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
        **dict.fromkeys(("mtp__fc", "lm_head", "model__layers__0__mlp__gate", "model__vision_tower__fc1"), False),
        **dict.fromkeys(("model__lm_head", "model__layers__0__mlp__gate_proj"), True),
    )
    decided(
        QUARK | {"exclude": ["*lm_head", "re:.*self_attn.*", "model.vision"]},
        **dict.fromkeys(("lm_head", "model__self_attn__q_proj", "model__vision__fc1"), False),
        model__mlp__up_proj=True,
    )
    decided(
        GLM_NVFP4 | {"ignore": ["*.mlp.gate*", "*.self_attn.*", "model.layers.1.*"], "exclude_modules": ["x?[ab]"]},
        model__layers__0__mlp__gate=False,
        model__layers__0__mlp__gate_proj=True,
        model__language_model__layers__0__self_attn__q_proj=False,
        **{"layers__1__mlp__up_proj": False, "layers__11__mlp__up_proj": True, "x1a": False, "x1c": True},
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


CHANNEL = scheme("channel")
REFUSED = [
    (TypeError, "quantization_config.quant_method must be a string, got 3", {"quant_method": 3}),
    (TypeError, "ignore must be a list of strings, got 'lm_head'", CT_DYNAMIC | {"ignore": "lm_head"}),
    (ValueError, "quantization_config.quant_method 'x'; known methods are", {"quant_method": "x"}),
    (ValueError, "ignore[0] 're:(' is not a regular exp", compressed(CHANNEL, None, ["re:("])),
    (ValueError, "format 'marlin' is not known", compressed(CHANNEL, None, format="marlin")),
    (ValueError, "weights.group_size must be specified", compressed(scheme("group"), None)),
    (ValueError, "group_size must be 16 for NVFP4, got 32", GLM_NVFP4 | {"group_size": 32}),
    (NotImplementedError, "quant_method 'gptq' is not supported: its groups", {"quant_method": "gptq"}),
    (
        NotImplementedError,
        "targets[0] 'Conv1D' is a class",
        compressed(CHANNEL, None) | {"config_groups": {"group_0": {"targets": ["Conv1D"], "weights": CHANNEL}}},
    ),
    (NotImplementedError, "quant_algo 'W4A8_AWQ' is not", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}),
]


def test_what_cannot_be_read_is_named():
    for kind, message, quantization in REFUSED:
        with pytest.raises(kind, match=re.escape(message)):
            read_quantization(config(quantization))


def test_two_configs_that_differ_are_refused():
    both = config(DEEPSEEK) | {"text_config": {"quantization_config": FBGEMM}}
    with pytest.raises(ValueError, match=r"quantization_config and text_config\.quantization_config differ"):
        read_quantization(both)
    assert read_quantization(config(DEEPSEEK) | {"text_config": {"quantization_config": DEEPSEEK}}) is not None
    assert read_quantization({}) is None
    # The first key of compressed-tensors.
    old, now = read_quantization({"compression_config": CT_DYNAMIC}), read_quantization(config(CT_DYNAMIC))
    assert old.specs == now.specs


def test_recipes_of_zero_points_and_of_static_scales_above_tiles_compute_what_checkpoints_mean():
    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(5, 64), (64, 8)]))
    product = (((1,), (0,)), ((), ()))
    group = scheme("group", bits=4, kind="int", group_size=32, symmetric=False)
    spec = read_quantization(config(compressed(group, None, format="pack-quantized"))).spec("a")
    recipe = hf.to_recipe(spec, "W4A16_ASYM")
    groups = np.asarray(w).reshape(2, 32, 8)
    low, high = np.minimum(groups.min(1, keepdims=True), 0), np.maximum(groups.max(1, keepdims=True), 0)
    scale = (high - low) / np.float32(15)
    point = np.round(-8 - low / scale)
    decoded = ((np.clip(np.round(groups / scale + point), -8, 7) - point) * scale).reshape(64, 8)
    assert (np.abs(dot_general(x, w, product, recipe=recipe) - x @ decoded) <= dot_bound(x, decoded)).all()

    recipe = hf.to_recipe(read_quantization(config(GLM_NVFP4)).spec("model.layers.5.mlp.up_proj"), "NVFP4")
    outer = np.float32(2 / 2688)  # scale for inputs up to 2; some inputs are larger
    tiles = np.asarray(x).reshape(5, 4, 16)
    code = np.clip(np.abs(tiles).max(-1, keepdims=True) / 6 / outer, 0, 448).astype(ml_dtypes.float8_e4m3fn)
    step = code.astype(np.float32) * outer
    codes = np.clip(tiles / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    kernel = quantize_kernel(w, (0,), recipe=recipe).astype("float32")
    kernel = dataclasses.replace(kernel, input_scale=jnp.full((1, 1), outer))
    served = dot_general(x, kernel, product, recipe=recipe)
    inputs, weights = (codes * step).reshape(5, 64), np.asarray(dequantize(kernel))
    assert (np.abs(served - inputs @ weights) <= dot_bound(inputs, weights)).all()
    assert np.abs(inputs).max() <= 2.01 < np.abs(x).max()


def test_an_encoding_of_max_has_its_blocks():
    encoding = QuantizationEncoding.Q4_K
    data = jax.eval_shape(encoding.quantize, jax.ShapeDtypeStruct((2, 512), jnp.float32))
    assert (encoding.block_size, data.shape, data.dtype) == (144, (2, 288), jnp.uint8)
    with pytest.raises(ValueError, match="must be a multiple of"):
        encoding.dequantize(jnp.zeros((2, 17), jnp.uint8))
    with pytest.raises(NotImplementedError, match="quantization encoding gptq"):
        QuantizationEncoding.GPTQ.quantize(jnp.ones(32))
