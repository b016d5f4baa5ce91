"""Calibration: static scales for a float model, from the amaxes of its activations on real inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta

from jaxquant.backends import RANDOM_STREAM
from jaxquant.config.quant_config import ConfigLike, QuantConfig
from jaxquant.core.paths import at_layer
from jaxquant.inject.faces import NNXModel, sort_arguments
from jaxquant.inject.model import choose_recipes, maybe_quantize_model
from jaxquant.state import nnx as nnx_state
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, update


@overload
def calibrate(
    model: nn.Module, variables: Mapping[str, Any], config: ConfigLike, batches: Iterable[Any], /
) -> dict[str, Any]: ...
@overload
def calibrate(model: NNXModel, config: ConfigLike, batches: Iterable[Any], /) -> NNXModel: ...
def calibrate(model: Any, /, *arguments: Any, **unknown: Any) -> Any:
    """Create the quant state that a recipe with delayed scaling needs, for a float model that was trained without it.

    The amax histories record the largest magnitude of every quantized layer's input and kernel over the batches.
    ``convert`` derives the static scales from these histories, as delayed scaling does. During calibration, layers run
    quantized, each with scales from the batches so far. Recipes without quant state need no calibration: for these
    recipes, the model or variables are returned unchanged.

    ``calibrate(model, variables, config, batches)`` calibrates a Linen model;
    ``calibrate(model, config, batches)`` calibrates an NNX model.

    Args:
      model: float Linen or NNX model.
      variables: variables of a Linen model; existing quant state is dropped.
      config: same as for ``maybe_quantize_model``.
      batches: real inputs of the model's ``__call__``, each a tuple of arguments or one array. At least one, and at
        most as many as the recipe's amax history has entries.

    Returns:
      Variables with quant state, or a quantized NNX model with quant state, for ``convert``.

    Raises:
      TypeError: the arguments are in the wrong order, or ``batches`` is a single array or not iterable.
      ValueError: the variables have no "params", there are no batches, or there are more batches than history entries.
      NotImplementedError: a recipe has weight sparsity, whose mask is computed in training.
      TypeError, ValueError, NotImplementedError: the config is invalid, see ``QuantConfig.from_any``.
    """
    variables, config, batches = sort_arguments("calibrate", model, arguments, "batches", unknown)
    config = QuantConfig.from_any(config)
    if hasattr(batches, "shape") or isinstance(batches, str | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list or generator of inputs, got {type(batches).__name__}; pass [x] for one input x"
        )
    each = (batch if isinstance(batch, tuple) else (batch,) for batch in batches)
    first = next(iter(each), None)
    if first is None:
        raise ValueError("calibrate got no batches; pass at least one batch of real inputs")
    recipes = choose_recipes(model, config, *first)
    for path, recipe in recipes.items():
        if recipe.sparsity is not None:
            raise NotImplementedError(
                f"calibrate does not support the weight sparsity of recipe {recipe.name!r} at {at_layer(path)}; set "
                "weight_sparsity_n and weight_sparsity_m to null, or train the model"
            )
    if not any(recipe.is_stateful for recipe in recipes.values()):
        return model if variables is None else variables
    limit = min(recipe.delayed.amax_history_length for recipe in recipes.values() if recipe.delayed is not None)
    quantized = maybe_quantize_model(model, config, *first)
    if isinstance(quantized, nnx.Module):
        return _observe_nnx(quantized, _limit_batches(limit, first, each))
    if "params" not in variables:
        raise ValueError("the variables to calibrate have no collection 'params'; pass all variables of model.init")
    return _observe_linen(quantized, variables, _limit_batches(limit, first, each))


def _limit_batches(limit: int, first: Any, rest: Iterable[Any]) -> Iterable[Any]:
    yield first
    for count, batch in enumerate(rest, start=2):
        if count > limit:
            raise ValueError(f"more than {limit} batches for amax_history_length {limit}; pass fewer, larger batches")
        yield batch


def _observe_linen(model: nn.Module, variables: Mapping[str, Any], batches: Iterable[Any]) -> dict[str, Any]:
    plain = {name: meta.unbox(value) for name, value in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    others = sorted(set(plain) - {"params"})

    @jax.jit
    def observe(plain: Any, quant_state: Any, batch: Any, key: jax.Array) -> Any:
        def zero_loss(quant_state: Any) -> jax.Array:
            all_variables = plain | {OVERWRITE_WITH_GRADIENT: quant_state}
            out = model.apply(all_variables, *batch, rngs={RANDOM_STREAM: key, "dropout": key}, mutable=others or False)
            return _zero_of(out)

        return update(quant_state, jax.grad(zero_loss)(quant_state))

    @jax.jit
    def start(batch: Any, key: jax.Array) -> Any:
        return model.init({"params": key, RANDOM_STREAM: key, "dropout": key}, *batch)[OVERWRITE_WITH_GRADIENT]

    key, quant_state = jax.random.key(0), None
    for batch in batches:
        quant_state = start(batch, key) if quant_state is None else quant_state
        quant_state = observe(plain, quant_state, batch, key)
    return plain | {OVERWRITE_WITH_GRADIENT: quant_state}


def _zero_of(out: Any) -> jax.Array:
    """Return a zero that depends on every float output; its gradient holds the observed amaxes."""
    floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((0 * jnp.sum(x.astype(jnp.float32)) for x in floats), jnp.zeros(()))


def _observe_nnx(model: nnx.Module, batches: Iterable[Any]) -> nnx.Module:
    @nnx.jit
    def observe(model: nnx.Module, batch: Any) -> None:
        def zero_loss(model: Any) -> jax.Array:
            return _zero_of(model(*batch))

        nnx_state.advance(model, nnx_state.grad(zero_loss)(model))

    for batch in batches:
        observe(model, batch)
    return model
