"""MLC's block-scale schemes: presets, and conversion to the quantization of a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxquant.core.typed import build, check_fields
from jaxquant.export.hf import fp8
from jaxquant.export.hf.exclusions import transformers_pattern
from jaxquant.export.hf.quantization import CheckpointQuantization, LayerRule, read_lists
from jaxquant.export.hf.read import NO_VALUES, find_section

HEAD_NAMES = ("head", "lm_head", "lm_head.linear", "embed_out")
"""Full names of output heads, which MLC does not quantize."""
ROUTER_SUFFIX, MAX_ROUTER_OUTPUTS = "gate", 256
"""Last part of the names of routers, which MLC leaves in float up to this number of experts."""
ROUTER_ORIGIN, HEAD_ORIGIN = "MoE gate", "output head"
"""Origins of the rules for routers and output heads."""
_DEFAULT_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class BlockScaleQuantize:
    """MLC block-scale scheme.

    Attributes:
      name: name of the scheme.
      kind: ``block-scale-quant``, or ``block-scale``, which is the default in MLC although MLC rejects it.
      weight_dtype: dtype of weights and inputs, ``float8_e4m3fn`` or ``float8_e5m2``.
      model_dtype: dtype of all other tensors, ``float16`` or ``bfloat16``.
      quantize_linear: whether linear layers are quantized.
      weight_block_size: number of rows and columns that share a scale, or None for the block size of the checkpoint.
      use_activation_scale: whether the checkpoint has input scales.
    """

    name: str
    kind: Literal["block-scale", "block-scale-quant"] = "block-scale-quant"
    weight_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    model_dtype: Literal["float16", "bfloat16"] = "bfloat16"
    quantize_linear: bool = True
    weight_block_size: tuple[int, int] | None = None
    use_activation_scale: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weight_block_size is not None and min(self.weight_block_size) < 1:
            raise ValueError(f"weight_block_size of {self.name!r} must be above 0, got {self.weight_block_size}")


PRESETS = {
    name: BlockScaleQuantize(name, use_activation_scale=is_static)
    for name, is_static in {
        "fp8_e4m3fn_bf16_block_scale": False,
        "fp8_e4m3fn_bf16_block_scale_static_activation": True,
    }.items()
}


def block_scale_quantize(config: str | Mapping[str, Any]) -> BlockScaleQuantize:
    """Return a scheme from the name of a preset or from its fields.

    Raises:
      ValueError: the preset or a field does not exist, or a field has an unsupported value.
      TypeError: a value has the wrong type.
    """
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"MLC quantization {config!r} is not known; use one of {', '.join(PRESETS)}")
        return PRESETS[config]
    if isinstance(config, Mapping):  # a null field means its default, as in all checkpoint configs
        config = {name: value for name, value in config.items() if value is not None}
    return build(BlockScaleQuantize, config, "quantization")


def read_mlc_quantization(
    config: str | Mapping[str, Any] | BlockScaleQuantize, huggingface_config: Mapping[str, Any]
) -> CheckpointQuantization:
    """Return the quantization of a checkpoint by an MLC scheme: weights in blocks, inputs in ``1 × columns`` tiles.

    The output head, MoE gates and the checkpoint's ``modules_to_not_convert`` stay in float.

    Args:
      config: name of a preset, mapping of fields, or scheme.
      huggingface_config: contents of the checkpoint's ``config.json``; the block size is read from it.

    Raises:
      ValueError: the checkpoint is not block-scaled fp8, or has another block size, element type or scale origin.
      TypeError: a value has the wrong type.
      NotImplementedError: the checkpoint has a key that may change values and is not supported.
    """
    scheme = config if isinstance(config, BlockScaleQuantize) else block_scale_quantize(config)
    found = find_section(huggingface_config)
    if found is None or found[1] != "fp8":
        got = "none" if found is None else repr(found[1])
        raise ValueError(f"MLC quantization {scheme.name!r} requires a checkpoint with quant_method 'fp8', got {got}")
    section = found[0]
    origin = fp8.read_origin(section, "dynamic")
    if origin.is_static != scheme.use_activation_scale:
        raise ValueError(
            f"{section.where('activation_scheme')} is {section.data.get('activation_scheme')!r}, but "
            f"use_activation_scale of {scheme.name!r} is {scheme.use_activation_scale}; use the other preset"
        )
    stored = section.pair("weight_block_size")
    if stored is None and origin.is_dynamic:
        raise ValueError(f"{section.where('weight_block_size')} must be specified for {scheme.name!r}")
    size = stored or scheme.weight_block_size or _DEFAULT_BLOCK
    if scheme.weight_block_size not in (None, size):
        raise ValueError(
            f"weight_block_size of {scheme.name!r} is {scheme.weight_block_size}, but the checkpoint requires {size}"
        )
    dtype, ue8m0 = fp8.read_formats(section)
    if section.has("fmt") and dtype != scheme.weight_dtype:
        raise ValueError(
            f"weight_dtype of {scheme.name!r} is {scheme.weight_dtype}, but must equal {section.where('fmt')} {dtype}"
        )
    spec = fp8.block_layer(scheme.weight_dtype, size, origin, ue8m0)
    rules = read_lists(section, ["modules_to_not_convert"], transformers_pattern)
    heads = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, HEAD_NAMES))})"
    rules += [LayerRule(heads, None, HEAD_ORIGIN), LayerRule(f".*{ROUTER_SUFFIX}", None, ROUTER_ORIGIN)]
    if scheme.quantize_linear:
        rules.append(LayerRule(".*", spec, scheme.name))
    section.pass_over(*NO_VALUES)
    section.check_read()
    return CheckpointQuantization("mlc", tuple(rules))
