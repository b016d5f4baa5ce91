"""Reader of NVIDIA modelopt configs: one algorithm for all layers, or an algorithm for each listed layer."""

from __future__ import annotations

from typing import Any

from jaxquant.export.hf import compressed_tensors
from jaxquant.export.hf.exclusions import modelopt_pattern
from jaxquant.export.hf.quantization import CheckpointQuantization, LayerRule, head_rules, name_rules, read_lists
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import LayerSpec, ScaleOrigin, block, channel_layer, mx_layer, nvfp4_layer, tensor_layer

_E4M3 = "float8_e4m3fn"


ALGORITHMS: dict[str, LayerSpec] = {
    "FP8": tensor_layer(_E4M3, ScaleOrigin.STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": channel_layer(),
    "FP8_PB_WO": LayerSpec(block(_E4M3, 128, 128), None),
    "NVFP4": nvfp4_layer("modelopt"),
    "W4A16_NVFP4": nvfp4_layer("modelopt", with_input=False),
    "MXFP8": mx_layer(_E4M3, "plain"),
}
"""Layer spec of each algorithm; the ``group_size`` of a config must equal the spec's block size."""
MIXED = "MIXED_PRECISION"


def read_spec(section: Section, key: str) -> LayerSpec:
    """Return the layer spec of the algorithm that a key of a section names.

    Raises:
      NotImplementedError: the algorithm is not supported; the message names the key.
      ValueError: ``group_size`` is not the block size of the algorithm.
    """
    name = section.text(key).upper()
    if name not in ALGORITHMS:
        raise NotImplementedError(
            f"{section.where(key)} {section.get(key)!r} is not supported; supported values are {', '.join(ALGORITHMS)}"
        )
    size = ALGORITHMS[name].weight.block_size
    if size is not None and section.has("group_size") and section.integer("group_size") != size[1]:
        raise ValueError(
            f"{section.where('group_size')} must be {size[1]} for {name}, got {section.data['group_size']}"
        )
    return ALGORITHMS[name]


def normalize_sidecar(sidecar: Section) -> Section:
    """Convert ``hf_quant_config.json`` to a ``quantization_config``: ``exclude_modules`` becomes ``ignore``."""
    quantization = sidecar.section("quantization")
    data: dict[str, Any] = {key: value for key, value in quantization.data.items() if key != "exclude_modules"}
    producer = sidecar.section("producer")
    data["quant_method"] = producer.text("name", "modelopt")
    if quantization.has("exclude_modules"):
        data["ignore"] = [*quantization.texts("ignore"), *quantization.texts("exclude_modules")]
    return Section(data, quantization.place)


def read(config: Section, is_sniffed: bool = False) -> CheckpointQuantization | None:
    """Return the quantization of modelopt's config or sidecar, or None if only the KV cache is quantized.

    Args:
      config: section with ``quant_algo``.
      is_sniffed: whether the method was inferred from tensor names; such a checkpoint has no list of exclusions.
    """
    algorithm = config.text("quant_algo", "")
    kv_caches = [compressed_tensors.read_kv_cache(config, key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    kv_cache = kv_caches[0] or kv_caches[1]
    if not algorithm and not config.has("config_groups"):
        if kv_cache is None:
            raise ValueError(f"{config.where('quant_algo')} must be specified")
        return None
    rules = read_lists(config, ("ignore", "exclude_modules"), modelopt_pattern)
    if algorithm:
        config.pass_over("config_groups")  # repeats the algorithm in the format of compressed-tensors
    if is_sniffed:
        rules += head_rules()
    if algorithm.upper() == MIXED or config.has("quantized_layers"):
        rules += _read_mixed(config)
    elif not algorithm:
        groups = compressed_tensors.read(Section({**config.data, "ignore": None}, config.place, config.read_places))
        rules += groups.rules
    else:
        rules.append(LayerRule(".*", read_spec(config, "quant_algo"), config.where("quant_algo")))
    return CheckpointQuantization("modelopt", tuple(rules), kv_cache)


def _read_mixed(config: Section) -> list[LayerRule]:
    layers = config.section("quantized_layers")
    if not layers.data:
        raise ValueError(f"{layers.place} must be specified for quant_algo {MIXED}")
    names: dict[tuple[int, LayerSpec], list[str]] = {}
    for name in layers.data:
        if not isinstance(name, str):
            raise TypeError(f"{layers.place} has the key {name!r}, which is not a string")
        entry = layers.section(name)
        names.setdefault((-name.count("."), read_spec(entry, "quant_algo")), []).append(name)
    # A name also covers the modules below it, and the nearest name decides, so the deepest names come first.
    deepest = sorted(names, key=lambda key: key[0])
    return [rule for key in deepest for rule in name_rules(names[key], key[1], layers.place, covers_children=True)]
