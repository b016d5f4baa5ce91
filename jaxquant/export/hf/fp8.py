"""Readers of the methods ``fp8`` (DeepSeek's blocks, or per-tensor scales), ``fbgemm_fp8`` and ``mxfp8``."""

from __future__ import annotations

from jaxquant.export.hf import compressed_tensors, modelopt
from jaxquant.export.hf.exclusions import modelopt_pattern, transformers_pattern
from jaxquant.export.hf.quantization import CheckpointQuantization, LayerRule, head_rules, name_rules, read_lists
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.spec import LayerSpec, ScaleOrigin, block, channel_layer, mx_layer, tensor_layer

EXCLUSION_KEYS = ("modules_to_not_convert", "ignored_layers")
EXPERTS = r".*\.experts(?:\..*)?"
_FMT = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_FMT |= {dtype: dtype for dtype in _FMT.values()}


def read_exclusions(config: Section) -> list[LayerRule]:
    """Return the rules of ``modules_to_not_convert`` and ``ignored_layers``, which have transformers' syntax."""
    return read_lists(config, EXCLUSION_KEYS, transformers_pattern)


def read_formats(config: Section) -> tuple[str, bool]:
    """Return the element type of ``fmt``, and whether ``scale_fmt`` requires powers of two."""
    dtype = _FMT[config.choice("fmt", _FMT, "e4m3")]
    return dtype, config.choice("scale_fmt", ("", "ue8m0", "float"), "") == "ue8m0"


def read_origin(config: Section, default: str = "") -> ScaleOrigin:
    """Return whether input scales are static or dynamic, from ``activation_scheme``; errors have MAX's wording."""
    scheme = config.text("activation_scheme", default)
    if not scheme:
        raise ValueError(f"{config.where('activation_scheme')}: activation_scheme must be specified")
    if scheme not in ("dynamic", "static"):
        raise ValueError(
            f"Unsupported activation_scheme for tensorwise FP8: {scheme!r} "
            f"({config.where('activation_scheme')} must be 'dynamic' or 'static', got {scheme!r})"
        )
    return ScaleOrigin(scheme)


def block_layer(dtype: str, size: tuple[int, int], origin: ScaleOrigin, ue8m0: bool = False) -> LayerSpec:
    """Return the spec of a layer with a scale for each block of the weight, and for each ``size[1]`` input features."""
    weight = block(dtype, *size, power_of_two_scale=ue8m0)
    return LayerSpec(weight, block(dtype, 1, size[1], origin, power_of_two_scale=ue8m0))


def read_fp8(config: Section) -> CheckpointQuantization:
    """Return the quantization of the method ``fp8``: blocks if the config has a block size, otherwise per tensor.

    The stored ``weight_scale_inv`` multiplies the elements, despite its name. ``scale_fmt: ue8m0`` means power-of-two
    scales. ``kv_cache_scheme: static`` is AutoFP8's name for a cache in e4m3 with stored scales. If a config also has a
    ``moe_quant_algo``, its experts use that algorithm.
    """
    origin = read_origin(config)
    dtype, ue8m0 = read_formats(config)
    size = config.pair("weight_block_size")
    spec = tensor_layer(dtype, origin, ue8m0) if size is None else block_layer(dtype, size, origin, ue8m0)
    rules = [*read_exclusions(config), *head_rules()]
    if config.text("moe_quant_algo", ""):
        config.pass_over("quant_algo")  # its value is "mixed"; other keys name the two algorithms
        # ``ignore`` belongs to the experts' algorithm: modules in this list use the method ``fp8``.
        rules += read_lists(config, ["ignore"], modelopt_pattern, spec)
        rules.append(LayerRule(EXPERTS, modelopt.read_spec(config, "moe_quant_algo"), config.where("moe_quant_algo")))
    rules.append(LayerRule(".*", spec, config.where("quant_method")))
    return CheckpointQuantization("fp8", tuple(rules), compressed_tensors.read_kv_cache(config, "kv_cache_scheme"))


def read_fbgemm(config: Section) -> CheckpointQuantization:
    """Return the quantization of ``fbgemm_fp8``: a scale for each weight row, and a bounded scale for each token."""
    spec = channel_layer(config.number("activation_scale_ub"))
    last = LayerRule(".*", spec, config.where("quant_method"))
    return CheckpointQuantization("fbgemm_fp8", (*read_exclusions(config), *head_rules(), last))


def read_mxfp8(config: Section) -> CheckpointQuantization:
    """Return the quantization of ``mxfp8``: weights and inputs are e4m3 with a scale for each 32 elements."""
    size = config.pair("weight_block_size")
    if size not in (None, (1, 32)):
        raise ValueError(f"{config.where('weight_block_size')} must be [1, 32] for mxfp8, got {list(size)}")
    rules = name_rules(config.texts("ignored_layers"), None, config.where("ignored_layers"), covers_children=True)
    rules += read_lists(config, ["modules_to_not_convert"], transformers_pattern)
    last = LayerRule(".*", mx_layer("float8_e4m3fn", "plain"), config.where("quant_method"))
    return CheckpointQuantization("mxfp8", (*rules, *head_rules(), last))
