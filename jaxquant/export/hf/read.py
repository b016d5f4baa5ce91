"""Reader of a checkpoint's quantization from a Hugging Face config, and the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxquant.export.hf import compressed_tensors, fp4, fp8, modelopt
from jaxquant.export.hf.quantization import CheckpointQuantization
from jaxquant.export.hf.section import Section
from jaxquant.export.hf.tensors import read_tensors

KEYS = ("quantization_config", "compression_config")
"""Keys of a quantization config; early versions of compressed-tensors wrote the second key."""
SECOND_SCALE = "weight_scale_2"
SIDECAR = "hf_quant_config.json"
"""File next to the config in which ModelOpt writes the quantization config."""
NO_VALUES = ("quant_method", "version", "producer", "dequantize")
"""Keys that do not change values, or that ``find_section`` reads."""

METHODS: dict[str, Callable[[Section], CheckpointQuantization | None]] = {
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm,
    "fp8": fp8.read_fp8,
    "modelopt": modelopt.read,
    "mxfp4": fp4.read_mxfp4,
    "mxfp8": fp8.read_mxfp8,
    "quark": fp4.read_quark,
}
"""Reader of each ``quant_method``."""
REFUSED = {
    "gptq": "its groups may be permuted, its zero points have their own packing; use a compressed-tensors W4A16 export",
    "awq": "its weights are packed in a different order; use a compressed-tensors W4A16 export",
    "bitsandbytes": "jaxquant has no matmul for its NF4 code book; start from the float checkpoint",
}
"""Unsupported methods, each with the reason and an alternative."""


def find_section(
    config: Mapping[str, Any], sidecar: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> tuple[Section, str] | None:
    """Return the quantization config and its method, or None for a float checkpoint.

    The quantization config is the ``quantization_config`` of the config or of its ``text_config``. If both have none,
    it is the contents of ``hf_quant_config.json``. Without these, a tensor named ``…weight_scale_2`` means modelopt's
    NVFP4.

    Raises:
      ValueError: there are two different quantization configs.
      TypeError: a value has the wrong type.
    """
    root = Section(config, "")
    places = [place.section(key) for key in KEYS for place in (root, root.section("text_config"))]
    sections = [section for section in places if section.data]
    if len(sections) > 1 and dict(sections[0].data) != dict(sections[1].data):
        raise ValueError(f"{sections[0].place} and {sections[1].place} differ; keep one of them")
    if sections:
        section = sections[0]
        method = section.text("quant_method", "")
        if not method and (section.has("quant_algo") or section.section("producer").text("name", "") == "modelopt"):
            method = "modelopt"
        return section, method.lower()
    if sidecar:
        section = modelopt.normalize_sidecar(Section(sidecar, "hf_quant_config.json"))
        return section, section.text("quant_method").lower()
    if any(isinstance(name, str) and SECOND_SCALE in name for name in tensors or ()):
        return Section({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "tensor names"), "modelopt"
    return None


def read_quantization(
    config: Mapping[str, Any], tensors: Mapping[str, Any] | None = None, sidecar: Mapping[str, Any] | None = None
) -> CheckpointQuantization | None:
    """Return the quantization of a checkpoint.

    Args:
      config: contents of ``config.json``.
      tensors: mapping from tensor names to arrays, ``(shape, dtype)`` pairs or safetensors header entries; used if
        there is neither a quantization config nor a sidecar.
      sidecar: contents of ``hf_quant_config.json``, or None.

    Returns:
      Ordered rules, each with the spec of its layers; or None for a float checkpoint.

    Raises:
      ValueError: a value is missing or invalid; the message names its key.
      TypeError: a value has the wrong type; the message names its key.
      NotImplementedError: jaxquant does not support the method, the scheme, or a key that may change values.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"the Hugging Face config must be a dict, got {type(config).__name__}; load config.json")
    place = find_section(config, sidecar, read_tensors(tensors))
    if place is None:
        return None
    section, method = place
    if method in REFUSED:
        raise NotImplementedError(f"{section.where('quant_method')} {method!r} is not supported: {REFUSED[method]}")
    if method not in METHODS:
        shown = repr(method) if method else "is missing"
        raise ValueError(f"{section.where('quant_method')} {shown}; known methods are {', '.join(METHODS)}")
    if section.place == "tensor names":
        return modelopt.read(section, is_sniffed=True)
    section.pass_over(*NO_VALUES)
    quantization = METHODS[method](section)
    section.check_read()
    return quantization
