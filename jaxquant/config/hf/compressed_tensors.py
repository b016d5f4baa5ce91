"""The method ``compressed-tensors``: groups of targets, each with a scheme for weights and one for inputs."""

from __future__ import annotations

import re

from jaxquant.config.hf.exclusions import REGEX, compressed_tensors_pattern
from jaxquant.config.hf.quantization import CheckpointQuantization, LayerRule
from jaxquant.config.hf.section import Section
from jaxquant.config.hf.spec import (
    LayerSpec,
    OperandSpec,
    ScaleGranularity,
    ScaleOrigin,
    block,
    mx_layer,
    nvfp4_layer,
)

FORMATS = (
    "dense",
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_ELEMENTS = {("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1fn", ("int", 8): "int8", ("int", 4): "int4"}
_WEIGHTS = {"tensor": ScaleGranularity.TENSOR, "channel": ScaleGranularity.ROWWISE, "token": ScaleGranularity.COLWISE}
_PACKINGS = {
    "pack-quantized": "pack-quantized",
    "nvfp4-pack-quantized": "nvfp4-pack",
    "mxfp4-pack-quantized": "mxfp4-pack",
}


def read(config: Section) -> CheckpointQuantization:
    """Read a ``quantization_config``.

    ``ignore`` comes first, then targets from the most to the least specific: exact names, regexes, classes.

    Raises:
      ValueError: a missing or impossible value, by its key.
      TypeError: a value of another kind.
      NotImplementedError: a scheme that jaxquant does not have.

    Source: ``QuantizationConfig`` and ``PRESET_SCHEMES`` of compressed-tensors.
    """
    groups = config.section("config_groups")
    if not groups.data:
        raise ValueError(f"{groups.place} must be specified and have a group")
    whole_format = _format(config, None)
    rules = [
        LayerRule(compressed_tensors_pattern(name, f"{config.where('ignore')}[{index}]"), None, config.where("ignore"))
        for index, name in enumerate(config.texts("ignore"))
    ]
    targeted: list[tuple[int, LayerRule]] = []
    for key in groups.data:
        if not isinstance(key, str):
            raise TypeError(f"{groups.place} has the key {key!r}, which is not a string")
        group = groups.section(key)
        spec = _layer(group, _format(group, whole_format))
        targets = ("Linear",) if group.data.get("targets") is None else group.texts("targets")
        if not targets:
            raise ValueError(f"{group.where('targets')} is empty: the group is of no layer; target 'Linear' for all")
        for index, target in enumerate(targets):
            place = f"{group.where('targets')}[{index}]"
            if re.fullmatch(r"[A-Z]\w*", target) and target != "Linear":
                raise NotImplementedError(
                    f"{place} {target!r} names a class, which the names of tensors do not tell; "
                    "target 'Linear', module names or 're:' patterns"
                )
            rule = LayerRule(compressed_tensors_pattern(target, place), spec, place)
            targeted.append((2 if target == "Linear" else 1 if target.startswith(REGEX) else 0, rule))
    rules += [rule for _, rule in sorted(targeted, key=lambda pair: pair[0])]
    return CheckpointQuantization("compressed-tensors", tuple(rules), kv_cache(config))


def kv_cache(config: Section) -> str | None:
    """Return the dtype of ``kv_cache_scheme`` (a scheme, or "FP8" as modelopt has it), or None."""
    value = config.data.get("kv_cache_scheme")
    if value is None or isinstance(value, str):
        return _kv_name(value, config.where("kv_cache_scheme"))
    return _element(config.section("kv_cache_scheme"))


def _kv_name(value: str | None, place: str) -> str | None:
    known = {"FP8": "float8_e4m3fn", "INT8": "int8", "NVFP4": "float4_e2m1fn"}
    if not value:
        return None
    if value.upper() not in known:
        raise ValueError(f"{place} {value!r} is not known; known ones are {', '.join(known)}")
    return known[value.upper()]


def _format(section: Section, default: str | None) -> str | None:
    if not section.has("format"):
        return default
    value = section.text("format")
    if value not in FORMATS:
        raise ValueError(f"{section.where('format')} {value!r} is not known; known ones are {', '.join(FORMATS)}")
    return value


def _element(scheme: Section) -> str:
    kind, bits = scheme.text("type", "int"), scheme.integer("num_bits", 8)
    if kind not in ("int", "float"):
        raise ValueError(f"{scheme.where('type')} must be 'int' or 'float', got {kind!r}")
    if (kind, bits) not in _ELEMENTS:
        raise NotImplementedError(
            f"{scheme.where('num_bits')} {bits} with type {kind!r} is not supported; jaxquant has 4 and 8 bits of both"
        )
    return _ELEMENTS[kind, bits]


def _layer(group: Section, format: str | None) -> LayerSpec | None:
    if not group.has("weights"):
        if group.has("input_activations"):
            raise NotImplementedError(f"{group.place} quantizes inputs without weights, which no checkpoint needs")
        return None
    weights = group.section("weights")
    if weights.data.get("dynamic"):
        raise ValueError(
            f"{weights.where('dynamic')}: dynamic weight scaling is not supported for compressed-tensors FP8 method"
        )
    if weights.has("actorder") and weights.data["actorder"] not in ("weight", "static", False):
        raise NotImplementedError(
            f"{weights.where('actorder')} {weights.data['actorder']!r} is not supported; export with actorder 'weight'"
        )
    has_input = group.has("input_activations")
    element, tile = _element(weights), weights.integer("group_size", 1) if weights.data.get("group_size") != -1 else 1
    is_four_bits = element == "float4_e2m1fn"
    if format == "nvfp4-pack-quantized" or (is_four_bits and tile == 16):
        _expect(weights, is_four_bits and tile == 16, "type 'float', num_bits 4 and group_size 16", "NVFP4")
        return nvfp4_layer("nvfp4-pack", has_input)
    if format == "mxfp4-pack-quantized" or (is_four_bits and tile == 32):
        _expect(weights, is_four_bits and tile == 32, "type 'float', num_bits 4 and group_size 32", "MXFP4")
        return mx_layer(element, "mxfp4-pack", has_input)
    if format == "mxfp8-quantized":
        _expect(
            weights, element == "float8_e4m3fn" and tile == 32, "type 'float', num_bits 8 and group_size 32", "MXFP8"
        )
        return mx_layer(element, "plain", has_input)
    input_spec = _input(group.section("input_activations")) if has_input else None
    packing = _PACKINGS.get(format or "", "pack-quantized" if element == "int4" else "plain")
    return LayerSpec(_weight(weights, element), input_spec, packing)


def _expect(section: Section, holds: bool, need: str, format: str) -> None:
    if not holds:
        raise ValueError(f"{section.place} must have {need} for {format}")


def _strategy(scheme: Section) -> str:
    if scheme.has("strategy"):
        return scheme.text("strategy")
    size = scheme.data.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _weight(scheme: Section, element: str) -> OperandSpec:
    strategy, symmetric = _strategy(scheme), scheme.boolean("symmetric", True)
    if strategy in _WEIGHTS:
        return OperandSpec(element, _WEIGHTS[strategy], symmetric=symmetric)
    if strategy in ("group", "tensor_group"):
        return block(element, 1, scheme.integer("group_size"), symmetric=symmetric)
    if strategy == "block":
        size = scheme.pair("block_structure")
        if size is None:
            raise ValueError(f"{scheme.where('block_structure')} must be specified for strategy 'block'")
        return block(element, *size, symmetric=symmetric)
    raise ValueError(f"unsupported FP8 weight strategy: {strategy} ({scheme.where('strategy')})")


def _input(scheme: Section) -> OperandSpec:
    element, strategy, symmetric = _element(scheme), _strategy(scheme), scheme.boolean("symmetric", True)
    dynamic = scheme.data.get("dynamic", False)
    if dynamic not in (True, False, "local"):
        raise ValueError(f"{scheme.where('dynamic')} must be true, false or 'local', got {dynamic!r}")
    origin = ScaleOrigin.DYNAMIC if dynamic else ScaleOrigin.STATIC
    if strategy in _WEIGHTS:
        return OperandSpec(element, _WEIGHTS[strategy], origin, symmetric=symmetric)
    if strategy in ("group", "tensor_group"):
        return block(element, 1, scheme.integer("group_size"), origin, symmetric=symmetric)
    raise ValueError(f"unsupported FP8 input activation strategy: {strategy} ({scheme.where('strategy')})")
