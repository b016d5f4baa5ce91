"""Functions for MaxText's config: ``maybe_quantize_model``, Qwix rules, static scales, and the key/value cache."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends import load
from jaxquant.compat.maxtext.handle import Quantization, QuantMode, refuse_accumulation
from jaxquant.config.quant_config import HEAD, KV_ELEMENTS, QuantConfig, is_program_config
from jaxquant.core.calibration import Calibration, parse_calibration
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quantize import quantize
from jaxquant.core.recipe import TensorSpec
from jaxquant.core.rounding import saturating_cast
from jaxquant.inject.model import Model, quantize_model
from jaxquant.inject.model import maybe_quantize_model as quantize_any
from jaxquant.inject.nnx import copy_model
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT

Array = jax.Array
LAYERS = "decoder/.*layers.*"
"""Modules that MaxText's Qwix rules match: the layers of the decoder, without embedding, norms and head."""


def maybe_quantize_model(model: Model, config: Any, *example_inputs: Any, **example_kwargs: Any) -> Model:
    """Return a model whose linear layers run in the low precision that MaxText's config selects.

    Without example inputs, this function creates abstract inputs with the shapes of MaxText's batch. MaxText itself
    handles the config's settings of caches and checkpoints.

    A model may contain the handle of ``configure_quantization``. If the handle's mode is "convert" or "serve", the
    model is returned unchanged. In mode "train", the model is quantized on the handle's backend, and the handle's ops
    stay in float.

    Args:
      model: Linen or NNX module.
      config: MaxText's config or another object with its fields, or a config of ``jaxquant.maybe_quantize_model``.
      example_inputs, example_kwargs: arguments of ``jaxquant.maybe_quantize_model``.

    Raises:
      ValueError: MaxText's config accumulates gradients and a recipe has quant state; or raised by
        ``jaxquant.maybe_quantize_model``.
      TypeError, NotImplementedError: raised by ``jaxquant.maybe_quantize_model``.
    """
    if not is_program_config(config):
        return quantize_any(model, config, *example_inputs, **example_kwargs)
    if not (example_inputs or example_kwargs):
        example_inputs, example_kwargs = make_example_inputs(model, config)
    program, config = config, QuantConfig.from_any(config)
    handle = find_handle(model) if isinstance(model, (nn.Module, nnx.Module)) else None
    if handle is not None:
        if handle.quant_mode is not QuantMode.TRAIN:
            return model
        if handle.backend != config.resolved_backend:
            config = dataclasses.replace(config, quant_backend=handle.backend)
        model = without_op_state(model) if isinstance(model, nnx.Module) else model  # pyright: ignore[reportAssignmentType]
    if (resolver := config.resolver()) is not None:
        refuse_accumulation(program, resolver)
    return quantize_model(model, config, *example_inputs, **example_kwargs)


def make_example_inputs(model: Any, config: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs for the model of a MaxText config: tokens, positions, segment ids, and MTP inputs.

    Args:
      model: any model.
      config: any config.

    Returns:
      Abstract positional and keyword arguments; both are empty if the config or the model is not MaxText's.
    """
    if "enable_dropout" not in inspect.signature(type(model).__call__).parameters:
        return (), {}
    rows, length = (getattr(config, name, None) for name in ("micro_batch_size_to_train_on", "max_target_length"))
    if not is_program_config(config) or not isinstance(rows, int) or not isinstance(length, int):
        return (), {}
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    options: dict[str, Any] = {"enable_dropout": False}
    if getattr(config, "mtp_num_layers", 0):
        options |= {"decoder_target_tokens": ids, "decoder_target_mask": ids}
    return (ids, ids, ids), options


def find_handle(model: Any) -> Quantization | None:
    """Return the handle of ``configure_quantization`` in a model, or None."""
    if isinstance(model, nnx.Module):
        nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
        values = [value for node in nodes for value in vars(node).values()]
        return next((value for value in values if isinstance(value, Quantization)), None)
    if isinstance(model, Mapping):
        values = list(model.values())
    else:
        values = [getattr(model, field.name, None) for field in dataclasses.fields(model)]
    found = (find_handle(value) if _may_contain_handle(value) else value for value in values)
    return next((value for value in found if isinstance(value, Quantization)), None)


def without_op_state(model: nnx.Module) -> nnx.Module:
    """Return a copy of a model without the variables of the handle's ops; a trace does not use these variables."""
    copy = copy_model(model)
    nnx.pop(copy, nnx.variablelib.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True))
    return copy


def _may_contain_handle(value: Any) -> bool:
    """Return whether a value is a Linen module, or a mapping such as the arguments of a submodule."""
    is_linen = dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "init_with_output")
    return is_linen or isinstance(value, Mapping)


# -- Qwix --------------------------------------------------------------------------------------------------------------


def get_quantization_rule(config: Any) -> list[Any] | None:
    """Return the Qwix rules of a config for ``qwix.quantize_model``.

    The rules of the config come first, then rules for its switches (such as ``quantize_router_proj``), then a rule for
    the layers of the decoder.

    Args:
      config: any value that ``QuantConfig.from_any`` accepts.

    Returns:
      List of ``qwix.QtRule`` whose first match wins, or None if the config quantizes nothing.

    Raises:
      NotImplementedError: Qwix does not support the recipe.
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.
    """
    config = QuantConfig.from_any(config)
    resolver, base = config.resolver(), config.recipe()
    if resolver is None:
        return None
    resolver.check_no_float_blocks()
    entries = [] if config.quantize_router_proj else [(".*/gate", None)]
    entries += [(HEAD, base)] if config.quantize_logits_proj and HEAD not in dict(resolver.patterns) else []
    entries += [(f"{LAYERS}|mtp_block/.*" if config.quantize_mtp else LAYERS, base)] if base is not None else []
    entries = [*resolver.patterns, *entries]
    return load("qwix").make_rules(entries)  # pyright: ignore[reportAttributeAccessIssue]


def get_qt_provider(config: Any) -> Any:
    """Return the Qwix provider of a config; see ``get_quantization_rule``."""
    rules = get_quantization_rule(config)
    return None if rules is None else load("qwix").make_provider(rules)  # pyright: ignore[reportAttributeAccessIssue]


# -- scales and cache -------------------------------------------------------------------------------------------------


def get_static_scale(qtype: Any, calibration_method: str) -> float:
    """Return the scale of a constant symmetric range: ``max / bound`` of the dtype, or 1 if the scale is below 1e-19.

    Args:
      qtype: dtype to quantize to, or its name.
      calibration_method: "fixed,max" or "fixed,-max,max".

    Raises:
      ValueError: the calibration is not a constant symmetric range.
    """
    scale = _static_range(calibration_method).maximum / element(jnp.dtype(qtype).name).bound
    return 1.0 if scale < float(jnp.finfo(jnp.float32).tiny) ** 0.5 else scale


def _static_range(method: Any) -> Calibration:
    calibration = parse_calibration(method) if isinstance(method, str) else Calibration()
    if calibration.method != "fixed" or not calibration.is_symmetric:
        raise ValueError(f"calibration {method!r} must be a constant symmetric range: 'fixed,max' or 'fixed,-max,max'")
    return calibration


def manual_quantize(tensor: Array, dtype: Any, calibration_method: str) -> QTensor:
    """Quantize a tensor with one constant scale.

    Args:
      tensor: array of any float dtype.
      dtype: dtype of the qvalue.
      calibration_method: argument of ``get_static_scale``.

    Raises:
      ValueError: the calibration is not a constant symmetric range.
    """
    spec = TensorSpec(jnp.dtype(dtype).name, "per_tensor", _static_range(calibration_method))
    return quantize(tensor, spec, tuple(range(tensor.ndim)))


@dataclasses.dataclass(frozen=True)
class KVQuant:
    """Quantized key/value cache with the interface of MaxText's attention: a cast, and einsums with cached tensors.

    Attributes:
      axis_cfg: "dkv" (each head has a scale) or "heads_and_dkv" (all heads of a position share one scale).
      dtype: dtype of the cached values.
    """

    axis_cfg: str
    dtype: Any

    def quantize(self, kv: Array, axis_names: Sequence[str]) -> tuple[Array, Array]:
        """Quantize keys or values symmetrically by their absmax; a row of zeros stays zero.

        Args:
          kv: keys or values.
          axis_names: MaxText's names of the axes of ``kv``, which include "cache_kv" and "cache_heads".

        Returns:
          The quantized values, and the absmax, which MaxText stores with them.
        """
        shared = {"dkv": ("cache_kv",), "heads_and_dkv": ("cache_heads", "cache_kv")}[self.axis_cfg]
        axes = tuple(list(axis_names).index(name) for name in shared)
        kind = element(jnp.dtype(self.dtype).name)
        absmax = jnp.max(jnp.abs(kv), axis=axes, keepdims=True)
        known = jnp.where(absmax > 0, absmax, 1).astype(jnp.float32)
        return saturating_cast(kv.astype(jnp.float32) / known * kind.bound, kind), absmax

    def einsum_fn_with_rhs_qtensor(self, **modes: Any) -> Any:
        """Return a float einsum whose second operand is a cached tensor with a method ``dequant``."""
        del modes  # options of AQT that select where its kernels dequantize

        def einsum(equation: str, lhs: Array, rhs: Any, **options: Any) -> Array:
            return jnp.einsum(equation, lhs, rhs.dequant() if hasattr(rhs, "dequant") else rhs, **options)

        return einsum

    einsum_fn_with_rhs_qtensor_and_dequant = einsum_fn_with_rhs_qtensor


def configure_kv_quant(config: Any) -> KVQuant | None:
    """Return the quantizer of MaxText's key/value cache, or None without ``quantize_kvcache``.

    For your own model, use ``jaxquant.serving.kv_cache``, which is a complete cache.

    Args:
      config: any value that ``QuantConfig.from_any`` accepts.

    Raises:
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.
    """
    config = QuantConfig.from_any(config)
    if not config.quantize_kvcache:
        return None
    return KVQuant(config.kv_quant_axis, jnp.dtype(KV_ELEMENTS[config.kv_quant_dtype]))
