"""NVIDIA's modelopt: one algorithm for all layers, or one for each of a list of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxquant.config.hf import compressed_tensors
from jaxquant.config.hf.exclusions import modelopt_pattern
from jaxquant.config.hf.quantization import CheckpointQuantization, LayerRule, head_and_routers, listed
from jaxquant.config.hf.section import Section
from jaxquant.config.hf.spec import LayerSpec, OperandSpec, ScaleGranularity, ScaleOrigin, block, mx_layer, nvfp4_layer

_E4M3 = "float8_e4m3fn"


def _per_tensor() -> LayerSpec:
    tensor = ScaleGranularity.TENSOR
    return LayerSpec(OperandSpec(_E4M3, tensor), OperandSpec(_E4M3, tensor, ScaleOrigin.STATIC))


def _per_channel() -> LayerSpec:
    rows, tokens = ScaleGranularity.ROWWISE, ScaleGranularity.COLWISE
    return LayerSpec(OperandSpec(_E4M3, rows), OperandSpec(_E4M3, tokens, ScaleOrigin.DYNAMIC))


ALGORITHMS: dict[str, tuple[Callable[[], LayerSpec], int | None]] = {
    "FP8": (_per_tensor, None),
    "FP8_PER_CHANNEL_PER_TOKEN": (_per_channel, None),
    "FP8_PB_WO": (lambda: LayerSpec(block(_E4M3, 128, 128), None), 128),
    "NVFP4": (lambda: nvfp4_layer("modelopt"), 16),
    "W4A16_NVFP4": (lambda: nvfp4_layer("modelopt", with_input=False), 16),
    "MXFP8": (lambda: mx_layer(_E4M3, "plain"), 32),
}
"""Each algorithm's layer, and the ``group_size`` that it has."""
MIXED = "MIXED_PRECISION"


def layer(algorithm: str, section: Section, place: str) -> LayerSpec:
    """Return the layer of an algorithm.

    Raises:
      NotImplementedError: another algorithm; names the key.
      ValueError: a ``group_size`` that the algorithm does not have.
    """
    name = algorithm.upper()
    if name not in ALGORITHMS:
        raise NotImplementedError(f"{place} {algorithm!r} is not supported; supported ones are {', '.join(ALGORITHMS)}")
    make, size = ALGORITHMS[name]
    if size is not None and section.has("group_size") and section.integer("group_size") != size:
        raise ValueError(f"{section.where('group_size')} must be {size} for {name}, got {section.data['group_size']}")
    return make()


def normalize_sidecar(sidecar: Section) -> Section:
    """Return a ``hf_quant_config.json`` as a ``quantization_config``: ``exclude_modules`` becomes ``ignore``."""
    quantization = sidecar.section("quantization")
    data: dict[str, Any] = {key: value for key, value in quantization.data.items() if key != "exclude_modules"}
    producer = sidecar.section("producer")
    data["quant_method"] = producer.text("name", "modelopt")
    if quantization.has("exclude_modules"):
        data["ignore"] = [*quantization.texts("ignore"), *quantization.texts("exclude_modules")]
    return Section(data, quantization.place)


def read(config: Section, is_sniffed: bool = False) -> CheckpointQuantization | None:
    """Read modelopt's ``quantization_config`` or its sidecar; None where only the KV cache is quantized.

    Args:
      config: with ``quant_algo``.
      is_sniffed: whether the method was told from tensor names, without any list of exclusions.
    """
    algorithm = config.text("quant_algo", "")
    said = [compressed_tensors.kv_cache(config, key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    kv_cache = said[0] or said[1]
    if not algorithm and not config.has("config_groups"):
        if kv_cache is None:
            raise ValueError(f"{config.where('quant_algo')} must be specified")
        return None
    rules = listed(config, ("ignore", "exclude_modules"), modelopt_pattern)
    if algorithm:
        config.pass_over("config_groups")  # the algorithm in compressed-tensors' words
    if is_sniffed:
        rules += head_and_routers()
    if algorithm.upper() == MIXED or config.has("quantized_layers"):
        rules += _mixed(config)
    elif not algorithm:
        groups = compressed_tensors.read(Section({**config.data, "ignore": None}, config.place, config.asked))
        rules += groups.rules
    else:
        place = config.where("quant_algo")
        rules.append(LayerRule(".*", layer(algorithm, config, place), place))
    return CheckpointQuantization("modelopt", tuple(rules), kv_cache, algorithm.upper() or None)


def _mixed(config: Section) -> list[LayerRule]:
    layers = config.section("quantized_layers")
    if not layers.data:
        raise ValueError(f"{layers.place} must be specified for quant_algo {MIXED}")
    names: dict[LayerSpec, list[str]] = {}
    for name in layers.data:
        if not isinstance(name, str):
            raise TypeError(f"{layers.place} has the key {name!r}, which is not a string")
        entry = layers.section(name)
        spec = layer(entry.text("quant_algo"), entry, entry.where("quant_algo"))
        names.setdefault(spec, []).append(name)
    return [LayerRule("(?!)", spec, layers.place, frozenset(group)) for spec, group in names.items()]
