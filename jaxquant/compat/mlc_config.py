"""MLC's rules for layers that stay in float, and the jaxquant config that trains with an MLC scheme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxquant.compat.mlc_presets import (
    HEAD_NAMES,
    HEAD_ORIGIN,
    MAX_ROUTER_OUTPUTS,
    ROUTER_ORIGIN,
    ROUTER_SUFFIX,
    BlockScaleQuantize,
    read_mlc_quantization,
)
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Rule
from jaxquant.export.hf import to_recipe


def skip_reason(name: str, out_features: int, no_quantization: Iterable[str] = ()) -> str:
    """Return the reason why MLC leaves a linear layer in float, or "" if MLC quantizes the layer.

    MLC quantizes routers with more than 256 experts. jaxquant keeps such routers in float by default, because a layer
    is also a router if the model ranks its results (``jaxquant.trace``).

    Args:
      name: dotted name of the layer.
      out_features: number of outputs.
      no_quantization: modules that are marked ``no_quantization``; these and their submodules stay in float.

    Raises:
      TypeError: no_quantization is a single name instead of a list.
    """
    if isinstance(no_quantization, str):
        raise TypeError(f"no_quantization must be a list of modules, got {no_quantization!r}")
    marked = [module for module in no_quantization if f"{name}.".startswith(f"{module}.")]
    if marked:
        return f"inside {marked[0]!r}, which is marked no_quantization"
    if name in HEAD_NAMES:
        return "output head"
    return ROUTER_ORIGIN if name.endswith(ROUTER_SUFFIX) and out_features <= MAX_ROUTER_OUTPUTS else ""


def quant_config(
    config: str | Mapping[str, Any] | BlockScaleQuantize, huggingface_config: Mapping[str, Any]
) -> QuantConfig:
    """Return the config that trains with an MLC scheme: ``fp8_block``, with rules for the layers that stay in float.

    Args:
      config: name of a preset, mapping of fields (``kind: block-scale``), or scheme.
      huggingface_config: ``config.json`` of the checkpoint.

    Raises:
      NotImplementedError: training does not support the block size, the element type or the static scales.
      ValueError, TypeError: raised by ``read_mlc_quantization``.
    """
    read = read_mlc_quantization(config, huggingface_config)
    listed = (rule for rule in read.rules if rule.origin not in (ROUTER_ORIGIN, HEAD_ORIGIN))  # excluded by default
    rules = tuple(Rule(rule.path, None) for rule in listed if rule.spec is None)
    if not read.specs:
        return QuantConfig(rules=rules)
    (spec,) = read.specs
    scale_fmt = "ue8m0" if spec.weight.power_of_two_scale else ""
    made = QuantConfig(quantization="fp8_block", scale_fmt=scale_fmt, rules=rules)
    served, trained = to_recipe(spec, "mlc").fwd, made.recipe()
    if trained is None or (served.lhs, served.rhs) != (trained.fwd.lhs, trained.fwd.rhs):
        raise NotImplementedError(
            f"training does not support weight_dtype {spec.weight.dtype}, weight_block_size {spec.weight.block_size} "
            f"and use_activation_scale {spec.has_static_input}; use float8_e4m3fn, (128, 128) and False"
        )
    return made
