"""Reader of the method ``compressed-tensors``: groups of layers, with a scheme for weights and a scheme for inputs."""

from __future__ import annotations

import functools
import re

from jaxquant.export.hf.exclusions import ANY_CLASS, REGEX, compressed_tensors_pattern
from jaxquant.export.hf.quantization import CheckpointQuantization, LayerRule, name_rules
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import LayerSpec, OperandSpec, ScaleGranularity, ScaleOrigin, block, mx_layer, nvfp4_layer

FORMATS = (
    "dense",
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_ELEMENTS = {("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1fn", ("int", 8): "int8", ("int", 4): "int4"}
_STRATEGIES = {
    "tensor": ScaleGranularity.TENSOR,
    "channel": ScaleGranularity.ROWWISE,
    "token": ScaleGranularity.COLWISE,
}
_TILED_FORMATS = {
    "nvfp4-pack-quantized": ("NVFP4", 4, 16, functools.partial(nvfp4_layer, "nvfp4-pack")),
    "mxfp4-pack-quantized": ("MXFP4", 4, 32, functools.partial(mx_layer, _ELEMENTS["float", 4], "mxfp4-pack")),
    "mxfp8-quantized": ("MXFP8", 8, 32, functools.partial(mx_layer, _ELEMENTS["float", 8], "plain")),
}
"""Formats of floats in tiles: name, bits and group size, and the function that creates the layer's spec."""
_KV_CACHES = {"FP8": "float8_e4m3fn", "INT8": "int8", "NVFP4": "float4_e2m1fn", "STATIC": "float8_e4m3fn"}


def read(config: Section) -> CheckpointQuantization:
    """Return the quantization that a ``quantization_config`` describes.

    The rules of ``ignore`` come first, then the rules of targets from the most to the least specific: exact names,
    regexes, classes.

    Raises:
      ValueError: a value is missing or invalid; the message names its key.
      TypeError: a value has the wrong type.
      NotImplementedError: jaxquant does not support the scheme.

    Source: ``QuantizationConfig`` and ``PRESET_SCHEMES`` of compressed-tensors.
    """
    groups = config.section("config_groups")
    if not groups.data:
        raise ValueError(f"{groups.place} must be specified and contain a group")
    whole_format = _read_format(config, None)
    config.pass_over("quantization_status", "global_compression_ratio", "run_compressed")
    sparsity = config.section("sparsity_config")
    if sparsity.text("format", "dense") != "dense":
        raise NotImplementedError(
            f"{sparsity.where('format')} {sparsity.get('format')!r} is not supported; decompress the checkpoint first"
        )
    config.pass_over("sparsity_config")  # dense weights are stored with their zeros
    rules = _rules("ignore", config, None)
    targeted: list[LayerRule] = []
    for key in groups.data:
        if not isinstance(key, str):
            raise TypeError(f"{groups.place} has the key {key!r}, which is not a string")
        group = groups.section(key)
        spec = _read_layer(group, _read_format(group, whole_format))
        if group.has("targets"):
            _check_targets(group)
        targeted += _rules("targets", group, spec) if group.has("targets") else [LayerRule(".*", spec, group.place)]
    rules += sorted(targeted, key=lambda rule: 0 if rule.names else 2 if rule.pattern == ".*" else 1)
    return CheckpointQuantization("compressed-tensors", tuple(rules), read_kv_cache(config, "kv_cache_scheme"))


def _rules(key: str, section: Section, spec: LayerSpec | None) -> list[LayerRule]:
    """Return the rules of ``ignore`` or ``targets``: one rule for all exact names, and one for each pattern."""
    written, place = section.texts(key), section.where(key)
    patterns = {index: name for index, name in enumerate(written) if name == ANY_CLASS or name.startswith(REGEX)}
    return name_rules(frozenset(written) - set(patterns.values()), spec, place) + [
        LayerRule(compressed_tensors_pattern(name, f"{place}[{index}]"), spec, place)
        for index, name in patterns.items()
    ]


def _check_targets(group: Section) -> None:
    targets = group.texts("targets")
    if not targets:
        raise ValueError(f"{group.where('targets')} is empty; use 'Linear' to target all layers")
    for index, target in enumerate(targets):
        if re.fullmatch(r"[A-Z]\w*", target) and target != ANY_CLASS:
            raise NotImplementedError(
                f"{group.where('targets')}[{index}] {target!r} is a class, but layers are matched by name; use "
                "'Linear', module names or 're:' patterns"
            )


def read_kv_cache(config: Section, key: str) -> str | None:
    """Return the dtype of the KV cache, or None.

    The value of the key is a scheme, or a name such as modelopt's "FP8" or AutoFP8's "static".
    """
    value = config.get(key)
    if value in (None, ""):
        return None
    if not isinstance(value, str):
        return _read_input(config.section(key)).dtype
    if value.upper() not in _KV_CACHES:
        raise ValueError(f"{config.where(key)} {value!r} is not known; known values are {', '.join(_KV_CACHES)}")
    return _KV_CACHES[value.upper()]


def _read_format(section: Section, default: str | None) -> str | None:
    return section.choice("format", FORMATS) if section.has("format") else default


def _read_element(scheme: Section) -> str:
    kind, bits = scheme.choice("type", ("int", "float"), "int"), scheme.integer("num_bits", 8)
    if (kind, bits) not in _ELEMENTS:
        raise NotImplementedError(
            f"{scheme.where('num_bits')} {bits} with type {kind!r} is not supported; num_bits must be 4 or 8, and "
            "type 'int' or 'float'"
        )
    return _ELEMENTS[kind, bits]


def _read_layer(group: Section, format: str | None) -> LayerSpec | None:
    if not group.has("weights"):
        if group.has("input_activations"):
            raise NotImplementedError(f"{group.place} quantizes inputs but not weights, which is not supported")
        return None
    weights = group.section("weights")
    if weights.get("dynamic"):
        raise ValueError(
            f"{weights.where('dynamic')}: dynamic weight scaling is not supported for compressed-tensors FP8 method"
        )
    if weights.has("actorder") and weights.get("actorder") not in ("weight", "static", False):
        raise NotImplementedError(
            f"{weights.where('actorder')} {weights.get('actorder')!r} is not supported; export with actorder 'weight'"
        )
    weight = _read_operand(weights, "weight")
    inputs = _read_input(group.section("input_activations")) if group.has("input_activations") else None
    for name, (wanted, bits, size, make) in _TILED_FORMATS.items():
        element = _ELEMENTS["float", bits]
        fits = (weight.dtype, weights.get("group_size")) == (element, size)
        if format != name and not (bits == 4 and fits):
            continue
        if not (fits and weight.symmetric):
            raise ValueError(
                f"{weights.place} must have type 'float', num_bits {bits}, group_size {size} and be symmetric for "
                f"{wanted}"
            )
        if inputs is not None and (inputs.dtype, inputs.block_size) != (element, (1, size)):
            raise NotImplementedError(
                f"{group.where('input_activations')} must have the same type and group_size as the weights for {wanted}"
            )
        return make(with_input=inputs is not None)
    is_packed = format == "pack-quantized" or (weight.dtype == "int4" and format in (None, "mixed-precision"))
    return LayerSpec(weight, inputs, "pack-quantized" if is_packed else "plain")


def _read_strategy(scheme: Section) -> str:
    """Return the strategy, which defines the elements that share a scale; observer and scale dtype are ignored."""
    scheme.pass_over("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    size = scheme.get("group_size")
    if scheme.has("strategy"):
        strategy = scheme.text("strategy")
        if size not in (None, -1) and strategy not in ("group", "tensor_group"):
            raise ValueError(f"{scheme.where('group_size')} requires strategy 'group', got {strategy!r}")
        return strategy
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _read_input(scheme: Section) -> OperandSpec:
    dynamic = scheme.get("dynamic") or False
    if dynamic not in (True, False, "local"):
        raise ValueError(f"{scheme.where('dynamic')} must be true, false or 'local', got {dynamic!r}")
    return _read_operand(scheme, "input activation", ScaleOrigin.DYNAMIC if dynamic else ScaleOrigin.STATIC)


def _read_operand(scheme: Section, side: str, origin: ScaleOrigin = ScaleOrigin.STATIC) -> OperandSpec:
    element, strategy, symmetric = _read_element(scheme), _read_strategy(scheme), scheme.boolean("symmetric", True)
    if strategy in _STRATEGIES:
        return OperandSpec(element, _STRATEGIES[strategy], origin, symmetric=symmetric)
    if strategy in ("group", "tensor_group"):
        size = 1, scheme.integer("group_size")
    elif strategy != "block" or side != "weight":
        raise ValueError(f"unsupported FP8 {side} strategy: {strategy} ({scheme.where('strategy')})")
    elif (size := scheme.pair("block_structure")) is None:
        raise ValueError(f"{scheme.where('block_structure')} must be specified for strategy 'block'")
    return block(element, *size, origin, symmetric=symmetric)
