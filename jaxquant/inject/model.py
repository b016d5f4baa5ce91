"""The public functions on whole models, for Linen and NNX alike."""

from __future__ import annotations

from typing import Any, TypeVar

import flax.linen as nn
from flax import nnx

from jaxquant.config.quant_config import ConfigLike, QuantConfig, is_program_config, refuse_fields
from jaxquant.config.speeds import warn_if_slow
from jaxquant.core.recipe import Recipe
from jaxquant.inject import linen
from jaxquant.inject import nnx as nnx_face
from jaxquant.inject.faces import refuse_twice
from jaxquant.inject.linen import quantize_linen
from jaxquant.inject.nnx import quantize_nnx
from jaxquant.trace.report import Row

Model = TypeVar("Model", bound=nn.Module | nnx.Module)


def maybe_quantize_model(model: Model, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any) -> Model:
    """Return a model whose linear layers run in the low precision that a config asks for.

    A Linen model keeps its ``init`` and ``apply``, an NNX model its methods, and both keep their parameters. A recipe
    with state (delayed scaling, sparsity) adds the collection ``_overwrite_with_gradient`` in Linen and variables of
    type ``jaxquant.state.QuantState`` in NNX; see ``jaxquant.state``.

    MaxText calls ``jaxquant.compat.maxtext.maybe_quantize_model``.

    Args:
      model: a Linen or NNX module. It stays as it is; an NNX model shares its arrays with the one that comes back,
        which is of a subclass of its class. With ``quantization: ""`` the model itself comes back.
      config: a QuantConfig, a mapping, a config string such as "fp8", the path of a YAML file, or an object with the
        fields; see ``QuantConfig.from_any``.
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``. With
        them the rules are checked now, without them at the first call. A recipe that keeps state requires them for an
        NNX model.

    Raises:
      ValueError: a rule that matches no layer, or a model without a layer to quantize.
      NotImplementedError: a recipe that the backend does not honour, or a setting of serving.
      TypeError: something that is no model, an NNX model without the example inputs that it requires, or MaxText's
        config.
      TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.

    Warns:
      UserWarning: the string is known to be slower than bfloat16 on the first device; once for each string.
    """
    if is_program_config(config) and hasattr(config, "micro_batch_size_to_train_on"):
        raise TypeError(
            "config is MaxText's, which also decides about its handle, batch and accumulation; call "
            "jaxquant.compat.maxtext.maybe_quantize_model(model, config)"
        )
    program, config = config, QuantConfig.from_any(config)
    if not is_program_config(program):
        refuse_fields(config, _NOT_OF_MODELS)
    return quantize_model(model, config, *example_inputs, **example_kwargs)


def quantize_model(model: Model, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> Model:
    """Return a quantized model, for a config that is read; see ``maybe_quantize_model``."""
    resolver = config.resolver()
    if resolver is None:
        return model
    _require_module("maybe_quantize_model", "jaxquant.quantize", model)
    if not config.checkpoint_is_quantized:
        warn_if_slow(config.quantization, config.resolved_backend)
    if isinstance(model, nnx.Module):
        if config.checkpoint_is_quantized:
            raise ValueError(
                "checkpoint_is_quantized true asks for a Linen model that runs on converted parameters, and this is an "
                "NNX model; without that field, convert one without arrays and put the saved parameters in: "
                "served = nnx.eval_shape(lambda: jaxquant.convert(jaxquant.maybe_quantize_model(make(), config, x), "
                "config, x)); jaxquant.serving.update_nnx(served, jaxquant.serving.load(folder).params)"
            )
        return quantize_nnx(model, config, *example_inputs, **example_kwargs)
    return quantize_linen(model, config, *example_inputs, **example_kwargs)


_NOT_OF_MODELS = {
    "save_quantized_params_path": "is not written while a model is quantized; convert its parameters with "
    "jaxquant.convert and write them with jaxquant.serving.save",
    "quantize_kvcache": "is not a property of linear layers; give the model's attention a cache of "
    "jaxquant.serving.kv_cache",
}


def choose_recipes(model: Any, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> dict[str, Recipe]:
    """Return the recipe of every layer that a call quantizes, by path, without computing anything.

    Args:
      model: a float Linen module that is not bound, or a float NNX module.
      config: what is asked.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: a rule that matches no layer, or a model without a layer to quantize.
    """
    if config.resolver() is None:
        return {}
    refuse_twice(model)
    face: Any = nnx_face.Face.of(config, model) if isinstance(model, nnx.Module) else linen.Face(config)
    decisions = face.engine.decide(face.trace_example(model, *example_inputs, **example_kwargs).analysis)
    return {path: each.recipe for path, each in decisions.paths.items() if each.recipe is not None}


def describe_layers(model: Any, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any) -> list[Row]:
    """Report what a config makes of every linear layer of a model, float ones with the reason.

    A layer is a matmul with a parameter, whoever wrote it, in the order of the call.

    Args:
      model: the model, before quantization.
      config: anything that ``QuantConfig.from_any`` takes; "" lists the layers only.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: a rule that matches no layer, float blocks of a model that has none, or a Linen model that is already
        quantized.
      TypeError: something that is no model.
      TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.
    """
    config = QuantConfig.from_any(config)
    _require_module("describe_layers", "jaxquant.quantize(...).report", model)
    if isinstance(model, nnx.Module):
        return nnx_face.describe(model, config, *example_inputs, **example_kwargs)
    refuse_twice(model)
    face = linen.Face(config)
    return face.engine.layers(face.trace_example(model, *example_inputs, **example_kwargs).analysis)


def _require_module(what: str, of_functions: str, model: Any) -> None:
    """Refuse what is no Flax module.

    Args:
      what: takes it.
      of_functions: what takes a function.
      model: given.

    Raises:
      TypeError: names it.
    """
    if isinstance(model, (nn.Module, nnx.Module)):
        return
    if isinstance(model, type):
        raise TypeError(f"{what} takes a Flax module, got the class {model.__name__}; make an instance of it")
    hint = f"; for a function there is {of_functions}" if callable(model) else ""
    raise TypeError(f"{what} takes a Flax module, got {type(model).__name__}{hint}")
