"""MLC's block-scale quantization: its presets and what they mean for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxquant.config.hf.exclusions import transformers_pattern
from jaxquant.config.hf.quantization import CheckpointQuantization, LayerRule, listed
from jaxquant.config.hf.read import find_section
from jaxquant.config.hf.spec import LayerSpec, ScaleOrigin, block
from jaxquant.core.typed import build, check_fields

_FINAL = r"(?:.*\.)?(?:head|lm_head|lm_head\.linear|embed_out)"
_GATE = r".*gate"
_DEFAULT_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class BlockScaleQuantize:
    """One of MLC's block-scale schemes.

    Attributes:
      name: of the scheme.
      kind: always ``block-scale-quant``.
      weight_dtype: ``float8_e4m3fn`` or ``float8_e5m2``, of weights and inputs.
      model_dtype: ``float16`` or ``bfloat16``, of everything else.
      quantize_linear: whether linear layers are quantized.
      weight_block_size: rows and columns that share a scale; None takes the checkpoint's.
      use_activation_scale: whether the checkpoint has input scales.
    """

    name: str
    kind: Literal["block-scale-quant"] = "block-scale-quant"
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
    row.name: row
    for row in (
        BlockScaleQuantize("fp8_e4m3fn_bf16_block_scale"),
        BlockScaleQuantize("fp8_e4m3fn_bf16_block_scale_static_activation", use_activation_scale=True),
    )
}


def block_scale_quantize(config: str | Mapping[str, Any]) -> BlockScaleQuantize:
    """Return a scheme from a preset's name or from its fields.

    Raises:
      ValueError: no such preset, no such field, or a value that a field does not take.
      TypeError: another kind of value.
    """
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"MLC quantization {config!r} is not known; known ones are {', '.join(PRESETS)}")
        return PRESETS[config]
    if isinstance(config, Mapping):  # a null field has its default, as everywhere in a checkpoint's config
        config = {name: value for name, value in config.items() if value is not None}
    return build(BlockScaleQuantize, config, "quantization")


def read_mlc_quantization(
    config: str | Mapping[str, Any] | BlockScaleQuantize, huggingface_config: Mapping[str, Any]
) -> CheckpointQuantization:
    """Read an MLC scheme for a checkpoint: blocks of the weight, ``1 × columns`` tiles of the input.

    The output head and MoE gates are left in float, and what the checkpoint's ``modules_to_not_convert`` names.

    Args:
      config: preset, fields or scheme.
      huggingface_config: ``config.json`` of the checkpoint, whose block size counts.

    Raises:
      ValueError: a checkpoint that is not block-scaled fp8, or one whose block size or origin differs.
      TypeError: a value of another kind.
    """
    scheme = config if isinstance(config, BlockScaleQuantize) else block_scale_quantize(config)
    found = find_section(huggingface_config)
    if found is None or found[1] != "fp8":
        got = "none" if found is None else repr(found[1])
        raise ValueError(f"MLC quantization {scheme.name!r} needs a checkpoint with quant_method 'fp8', got {got}")
    section = found[0]
    is_static = section.text("activation_scheme", "dynamic") == "static"
    if is_static != scheme.use_activation_scale:
        raise ValueError(
            f"{section.where('activation_scheme')} is {section.data.get('activation_scheme')!r} and "
            f"use_activation_scale of {scheme.name!r} is {scheme.use_activation_scale}; choose the preset that fits"
        )
    stored = section.pair("weight_block_size")
    if stored is None and not is_static:
        raise ValueError(f"{section.where('weight_block_size')} must be specified for {scheme.name!r}")
    size = stored or scheme.weight_block_size or _DEFAULT_BLOCK
    if scheme.weight_block_size not in (None, size):
        raise ValueError(
            f"weight_block_size of {scheme.name!r} is {scheme.weight_block_size} and that of the checkpoint {size}"
        )
    origin = ScaleOrigin.STATIC if is_static else ScaleOrigin.DYNAMIC
    spec = LayerSpec(block(scheme.weight_dtype, *size), block(scheme.weight_dtype, 1, size[1], origin))
    rules = listed(section, ["modules_to_not_convert"], transformers_pattern)
    rules += [LayerRule(_FINAL, None, "output head"), LayerRule(_GATE, None, "MoE gate")]
    if scheme.quantize_linear:
        rules.append(LayerRule(".*", spec, scheme.name))
    return CheckpointQuantization("mlc", tuple(rules))
