"""Readers of the methods ``mxfp4`` (of gpt-oss, which quantizes only experts) and ``quark``."""

from __future__ import annotations

import warnings

from jaxquant.export.hf.exclusions import quark_pattern
from jaxquant.export.hf.fp8 import EXPERTS, read_exclusions
from jaxquant.export.hf.quantization import CheckpointQuantization, LayerRule, read_lists
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import mx_layer

_REDUNDANT_KEYS = (
    "qscheme", "round_method", "ch_axis", "is_dynamic", "observer_cls", "scale_type", "symmetric", "is_scale_quant",
    "mx_element_dtype", "scale_calculation_mode",
)  # fmt: skip
"""Ignored keys: they describe how Quark computed the stored numbers, or follow from the MX element type."""
_ROUND_UP = "ceil"
"""Quark's name for jaxquant's MX scales, which are ``amax / largest element``, rounded up to a power of two."""
_TOOL_KEYS = ("algo_config", "export", "quant_mode", "min_kv_scale", "kv_cache_post_rope")
_QUARK = {"fp4": "float4_e2m1fn", "fp6_e2m3": "float6_e2m3fn", "fp6_e3m2": "float6_e3m2fn", "fp8_e4m3": "float8_e4m3fn"}


def read_mxfp4(config: Section) -> CheckpointQuantization:
    """Return the quantization of gpt-oss's ``quantization_config``: MXFP4 weights of the experts, float inputs."""
    experts = LayerRule(EXPERTS, mx_layer("float4_e2m1fn", "gpt-oss", with_input=False), config.where("quant_method"))
    return CheckpointQuantization("mxfp4", (*read_exclusions(config), experts))


def read_quark(config: Section) -> CheckpointQuantization:
    """Return the quantization of AMD Quark's ``quantization_config`` with an MX element type."""
    whole = config.section("global_quant_config")
    weight = whole.section("weight")
    dtype, scale = weight.text("dtype"), weight.text("scale_format", "")
    if dtype not in _QUARK or scale != "e8m0":
        raise NotImplementedError(
            f"{weight.where('dtype')} {dtype!r} with scale_format {scale!r} is not supported; supported are "
            f"{', '.join(_QUARK)} with scale_format 'e8m0'"
        )
    if weight.integer("group_size", 32) != 32:
        raise ValueError(f"{weight.where('group_size')} must be 32 for MX, got {weight.data['group_size']}")
    if config.has("layer_quant_config") and config.section("layer_quant_config").data:
        raise NotImplementedError(f"{config.where('layer_quant_config')} is not supported; quantize all layers alike")
    weight.pass_over(*_REDUNDANT_KEYS)
    inputs = whole.section("input_tensors") if whole.has("input_tensors") else None
    if inputs is not None:
        inputs.pass_over(*_REDUNDANT_KEYS)
        for key, wanted in (("dtype", dtype), ("scale_format", scale), ("group_size", 32)):
            if inputs.has(key) and inputs.get(key) != wanted:
                raise NotImplementedError(f"{inputs.where(key)} must equal the weights' value, {wanted!r}")
        if inputs.has("scale_calculation_mode") and (mode := inputs.get("scale_calculation_mode")) != _ROUND_UP:
            warnings.warn(
                f"{inputs.where('scale_calculation_mode')} is {mode!r}, but jaxquant rounds the scales of inputs up "
                f"({_ROUND_UP!r}); outputs can differ from Quark's",
                stacklevel=2,
            )
    config.pass_over(*_TOOL_KEYS)
    rules = read_lists(config, ["exclude"], quark_pattern)
    spec = mx_layer(_QUARK[dtype], "quark", with_input=inputs is not None)
    rules.append(LayerRule(".*", spec, weight.place))
    return CheckpointQuantization("quark", tuple(rules))
