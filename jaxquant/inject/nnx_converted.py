"""Conversion of an NNX model: a ``ConvertedParam`` replaces the kernel of each quantized layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import join_path, leaves_by_path, map_by_path
from jaxquant.core.qtensor import QTensor, is_tensor
from jaxquant.inject.nnx import ConvertedParam, Face, plain_model
from jaxquant.state.nnx import QuantState


def convert_nnx(model: nnx.Module, config: QuantConfig, *example_inputs: Any, **example_kwargs: Any) -> nnx.Module:
    """Convert the kernels of a model's quantized layers.

    Args:
      model: float model, or a model quantized by ``quantize_nnx``, whose quant state is then used; it is not changed.
      config: quantization config.
      example_inputs, example_kwargs: arguments of its ``__call__``.

    Raises:
      ValueError: see ``Face.convert``.
    """
    copy = plain_model(model)
    if config.resolver() is None:
        return copy
    face = Face.of(config, copy)
    kernels, has_state = face.convert(plain_model(model), *example_inputs, **example_kwargs)
    _put_kernels(copy, kernels, has_state)
    return face.replace_classes(copy)


def _put_kernels(model: nnx.Module, kernels: Mapping[str, QTensor], has_state: bool) -> None:
    """Replace parameters by converted kernels in every module that holds them, and delete unused quant state."""
    nodes = list(nnx.iter_graph(model))
    paths = {join_path(path): node for path, node in nodes if isinstance(node, nnx.Variable)}
    new = {id(paths[path]): ConvertedParam(kernel) for path, kernel in kernels.items()}
    for _, node in nodes:
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
            if id(value) in new:
                setattr(node, name, new[id(value)])
            elif isinstance(value, QuantState) and not has_state:
                delattr(node, name)


def nnx_params(model: nnx.Module) -> dict[str, Any]:
    """Return a converted model's parameters as nested dicts of arrays and ``QTensor``, like a Linen model's.

    Other variables of the model, such as ``nnx.BatchStat``, are included; RNG state, intermediates and quant state are
    not.

    Args:
      model: model from ``jaxquant.convert``.
    """
    leaves: dict[Any, Any] = flatten_dict(_stored_variables(model), keep_empty_nodes=True)
    return unflatten_dict({tuple(map(str, path)): leaf for path, leaf in leaves.items()})


def _stored_variables(model: nnx.Module) -> dict[Any, Any]:
    """Return the variables that ``nnx_params`` and ``update_nnx`` handle."""
    left_out = nnx.Any(nnx.RngState, nnx.Intermediate, QuantState)
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(left_out)))


def update_nnx(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Set the parameters of a converted model, in place, from ``nnx_params`` or ``jaxquant.serving.load``.

    Args:
      model: converted model; under ``nnx.eval_shape`` it may have no arrays. RNG state, for example of ``nnx.Dropout``,
        is not stored; RNG state without an array starts with seed 0.
      params: nested dicts of arrays and ``QTensor``.

    Raises:
      ValueError: a path is only in the model or only in the parameters, or has another shape. The model is unchanged.
    """
    given, lacks = leaves_by_path(params, is_tensor), list[str]()

    def pick(path: str, own: Any) -> Any:
        if path not in given or is_tensor(own) != is_tensor(given[path]):
            lacks.append(path)
            return None
        made = given.pop(path)
        if tuple(made.shape) != tuple(own.shape):
            raise ValueError(f"parameter {path!r} must have shape {tuple(own.shape)}, got {tuple(made.shape)}")
        return made.astype(own.dtype) if is_tensor(made) and made.dtype is None else made

    new = map_by_path(pick, _stored_variables(model), is_tensor)
    if lacks or given:
        raise ValueError(
            f"parameters missing for the model: {', '.join(sorted(lacks)) or 'none'}; parameters unknown to the "
            f"model: {', '.join(sorted(given)) or 'none'}; pass the result of nnx_params for this model"
        )
    nnx.update(model, new)
    nnx.update(model, jax.tree.map(_initialized, nnx.state(model, nnx.RngState)))


def _initialized(x: Any) -> Any:
    """Return RNG state unchanged, or RNG state with seed 0 for a shape."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(jax.random.key(0), x.shape) if is_key else jnp.zeros(x.shape, x.dtype)
