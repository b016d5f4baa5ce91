"""The public functions on whole models, for Linen and NNX."""

from __future__ import annotations

from typing import Any, TypeVar

import flax.linen as nn
from flax import nnx

from jaxquant.config.quant_config import ConfigLike, QuantConfig, is_program_config, refuse_fields
from jaxquant.config.speeds import warn_if_slow
from jaxquant.core.recipe import Recipe
from jaxquant.inject import linen
from jaxquant.inject import nnx as nnx_face
from jaxquant.inject.faces import require_float
from jaxquant.inject.linen import quantize_linen
from jaxquant.inject.nnx import quantize_nnx
from jaxquant.trace.report import Report

Model = TypeVar("Model", bound=nn.Module | nnx.Module)


def maybe_quantize_model(model: Model, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any) -> Model:
    """Return a model whose linear layers run in the low precision that a config selects.

    A Linen model keeps its ``init`` and ``apply``, an NNX model its methods, and both keep their parameters. A recipe
    with state (delayed scaling, sparsity) adds the collection ``_overwrite_with_gradient`` in Linen and variables of
    type ``jaxquant.state.QuantState`` in NNX; see ``jaxquant.state``.

    MaxText calls ``jaxquant.compat.maxtext.maybe_quantize_model``.

    Args:
      model: Linen or NNX module; it is not changed. A quantized NNX model is an instance of a subclass and shares its
        arrays with the original. With ``quantization: ""`` the model is returned unchanged.
      config: QuantConfig, mapping, config string such as "fp8", path of a YAML file, or object with the fields; see
        ``QuantConfig.from_any``.
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``. With
        them, the rules are checked now, otherwise at the first call. NNX models require them if a recipe keeps state.

    Raises:
      ValueError: a rule matches no layer, or the model has no layer to quantize.
      NotImplementedError: the backend does not support a recipe, or the config has a setting that only serving reads.
      TypeError: the model is not a Flax module, an NNX model lacks the example inputs that it requires, or the config
        is MaxText's.
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.

    Warns:
      UserWarning: the string is known to be slower than bfloat16 on the first device; once for each string.
    """
    if is_program_config(config) and hasattr(config, "micro_batch_size_to_train_on"):
        raise TypeError(
            "jaxquant.maybe_quantize_model does not accept a MaxText config; call "
            "jaxquant.compat.maxtext.maybe_quantize_model(model, config)"
        )
    program, config = config, QuantConfig.from_any(config)
    if not is_program_config(program):
        refuse_fields(config, _NOT_OF_MODELS)
    return quantize_model(model, config, *example_inputs, **example_kwargs)


def quantize_model(model: Model, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Model:
    """Return a quantized model, for a ``QuantConfig``; see ``maybe_quantize_model``."""
    resolver = config.resolver()
    if resolver is None:
        return model
    _require_module("maybe_quantize_model", "jaxquant.quantize", model)
    if not config.checkpoint_is_quantized:
        warn_if_slow(config.quantization, config.resolved_backend)
    if isinstance(model, nnx.Module):
        if config.checkpoint_is_quantized:
            raise ValueError(
                "checkpoint_is_quantized true does not support NNX models; remove checkpoint_is_quantized, convert a "
                "model without arrays and add the saved parameters: "
                "served = nnx.eval_shape(lambda: jaxquant.convert(jaxquant.maybe_quantize_model(make(), config, x), "
                "config, x)); jaxquant.serving.update_nnx(served, jaxquant.serving.load(folder).params)"
            )
        return quantize_nnx(model, config, *example_inputs, **example_kwargs)
    return quantize_linen(model, config, *example_inputs, **example_kwargs)


_NOT_OF_MODELS = {
    "save_quantized_params_path": "has no effect in maybe_quantize_model; remove this field, and save the result of "
    "jaxquant.convert with jaxquant.serving.save",
    "quantize_kvcache": "has no effect in maybe_quantize_model; remove this field, and use a cache of "
    "jaxquant.serving.kv_cache in the attention",
}


def choose_recipes(model: Any, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> dict[str, Recipe]:
    """Return the recipe of every layer that a call quantizes, by path. Only traces.

    Args:
      model: float Linen module that is not bound, or float NNX module.
      config: quantization config.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: a rule matches no layer, or the model has no layer to quantize.
    """
    if config.resolver() is None:
        return {}
    require_float(model)
    face: Any = nnx_face.Face.of(config, model) if isinstance(model, nnx.Module) else linen.Face(config)
    decisions = face.engine.decide(face.trace_example(model, *example_inputs, **example_kwargs).analysis)
    return {path: each.recipe for path, each in decisions.paths.items() if each.recipe is not None}


def describe_layers(model: Any, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any) -> Report:
    """Return a report with a row for every linear layer of a model; layers that stay in float have a reason.

    A layer is a matmul with a parameter, in any module. Rows are in the order of the call.

    Args:
      model: model, before quantization.
      config: any value that ``QuantConfig.from_any`` accepts; "" only lists the layers.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: a rule matches no layer, float blocks are configured for a model without blocks, or a Linen model is
        already quantized.
      TypeError: the model is not a Flax module.
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.
    """
    config = QuantConfig.from_any(config)
    _require_module("describe_layers", "jaxquant.quantize(...).report", model)
    if isinstance(model, nnx.Module):
        return nnx_face.describe(model, config, *example_inputs, **example_kwargs)
    require_float(model)
    face = linen.Face(config)
    return face.engine.layers(face.trace_example(model, *example_inputs, **example_kwargs).analysis)


def _require_module(what: str, of_functions: str, model: Any) -> None:
    """Raise if a model is not a Flax module.

    Args:
      what: name of the public function that requires a module.
      of_functions: name of the function to use for a plain function.
      model: argument to check.

    Raises:
      TypeError: the model is a class or not a Flax module.
    """
    if isinstance(model, (nn.Module, nnx.Module)):
        return
    if isinstance(model, type):
        raise TypeError(f"{what} takes a Flax module, got the class {model.__name__}; pass an instance of the class")
    hint = f"; for a function use {of_functions}" if callable(model) else ""
    raise TypeError(f"{what} takes a Flax module, got {type(model).__name__}{hint}")
