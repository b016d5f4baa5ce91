"""MLC's block-scale presets, parsed for a checkpoint."""

from __future__ import annotations

import pytest

from jaxquant.compat.mlc_presets import BlockScaleQuantize, block_scale_quantize, read_mlc_quantization
from jaxquant.export.hf import ScaleOrigin

DYNAMIC = "fp8_e4m3fn_bf16_block_scale"
STATIC = f"{DYNAMIC}_static_activation"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
MINISTRAL = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["model.vision_tower"]}


def read(scheme, checkpoint: dict):
    return read_mlc_quantization(scheme, {"quantization_config": checkpoint})


def test_presets_take_the_block_of_the_checkpoint():
    spec = read(DYNAMIC, BLOCKS).spec("model.layers.0.mlp.up_proj")
    assert (spec.weight.block_size, spec.input.block_size) == ((128, 64), (1, 64))
    assert (spec.weight.dtype, spec.input.origin) == ("float8_e4m3fn", ScaleOrigin.DYNAMIC)
    static = read(STATIC, MINISTRAL).spec("a")
    assert (static.weight.block_size, static.input.origin) == ((128, 128), ScaleOrigin.STATIC)


def test_fields_in_place_of_a_preset():
    fields = {"name": "mine", "weight_dtype": "float8_e5m2", "model_dtype": "float16", "weight_block_size": [128, 64]}
    assert read(fields, BLOCKS).spec("a").weight.dtype == "float8_e5m2"
    assert read(BlockScaleQuantize("mine", quantize_linear=False), BLOCKS).spec("a") is None
    nulls = dict.fromkeys(("kind", "weight_dtype", "model_dtype", "quantize_linear", "weight_block_size"))
    assert block_scale_quantize({"name": "x", "use_activation_scale": None} | nulls) == BlockScaleQuantize("x")
    spec = read(DYNAMIC, BLOCKS | {"scale_fmt": "ue8m0", "fmt": "e4m3"}).spec("a")
    assert spec.weight.power_of_two_scale
    assert spec.input.power_of_two_scale


def test_the_head_gates_and_excluded_modules_stay_in_float():
    quantization = read(STATIC, MINISTRAL)
    for module in ("lm_head", "head", "lm_head.linear", "embed_out", "model.layers.0.mlp.gate", "model.vision_tower.a"):
        assert quantization.spec(module) is None, module
    assert quantization.spec("model.layers.0.mlp.gate_proj") is not None


REFUSED = [
    ("fp8", BLOCKS, "MLC quantization 'fp8' is not known; use one of"),
    (DYNAMIC, {"quant_method": "fbgemm_fp8"}, "requires a checkpoint with quant_method 'fp8', got 'fbgemm_fp8'"),
    (DYNAMIC, {}, "requires a checkpoint with quant_method 'fp8', got none"),
    (DYNAMIC, {"quant_method": "fp8"}, "weight_block_size must be specified"),
    (DYNAMIC, MINISTRAL, "activation_scheme is 'static', but use_activation_scale of .* is False"),
    ({"name": "x", "weight_block_size": [64, 64]}, BLOCKS, r"is \(64, 64\), but the checkpoint requires \(128, 64\)"),
    ({"name": "x", "kind": "group"}, BLOCKS, "quantization.kind must be one of 'block-scale', 'block-scale-quant'"),
    (DYNAMIC, BLOCKS | {"fmt": "e5m2"}, "weight_dtype of .* is float8_e4m3fn, but must equal .*fmt float8_e5m2"),
    ({"name": "x", "weight_block_size": [128, 0]}, BLOCKS, "weight_block_size of 'x' must be above 0"),
    ({"name": None}, BLOCKS, "needs field 'name'"),
    (DYNAMIC, BLOCKS | {"group_size": 64}, r"quantization_config\.group_size 64 is not supported"),
]


def test_what_does_not_fit_is_refused():
    for scheme, checkpoint, message in REFUSED:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            read(scheme, checkpoint)
