"""Convert an NNX model: a ``ConvertedParam`` takes the place of every kernel of a quantized layer."""

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
      model: float, or quantized by ``quantize_nnx``, whose quant state then counts; it stays as it is.
      config: what is asked.
      example_inputs, example_kwargs: arguments of its ``__call__``.

    Raises:
      ValueError: as ``Face.convert``.
    """
    copy = plain_model(model)
    if config.resolver() is None:
        return copy
    face = Face.of(config, copy)
    kernels, has_state = face.convert(plain_model(model), *example_inputs, **example_kwargs)
    _put_kernels(copy, kernels, has_state)
    return face.adopt(copy)


def _put_kernels(model: nnx.Module, kernels: Mapping[str, QTensor], has_state: bool) -> None:
    """Set converted kernels in the place of parameters, wherever a module has them, and drop quant state."""
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
    """Return a converted model's parameters as nested dicts of arrays and ``QTensor``, as a Linen model has them.

    Other variables that the model keeps, such as ``nnx.BatchStat``, are among them; random states, intermediates and
    quant state are not.

    Args:
      model: from ``jaxquant.convert``.
    """
    leaves: dict[Any, Any] = flatten_dict(_kept(model), keep_empty_nodes=True)
    return unflatten_dict({tuple(map(str, path)): leaf for path, leaf in leaves.items()})


def _kept(model: nnx.Module) -> dict[Any, Any]:
    """Return what ``nnx_params`` and ``update_nnx`` handle."""
    left_out = nnx.Any(nnx.RngState, nnx.Intermediate, QuantState)
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(left_out)))


def update_nnx(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Set the parameters of a converted model, in place, to what ``nnx_params`` or ``jaxquant.serving.load`` gave.

    Args:
      model: converted, perhaps under ``nnx.eval_shape``, without any array. Random states, as of ``nnx.Dropout``, are
        not stored; those without an array begin with seed 0.
      params: nested dicts of arrays and ``QTensor``.

    Raises:
      ValueError: a path that only one of them has, or another shape; nothing is put in.
    """
    given, lacks = leaves_by_path(params, is_tensor), list[str]()

    def take(path: str, own: Any) -> Any:
        if path not in given or is_tensor(own) != is_tensor(given[path]):
            lacks.append(path)
            return None
        made = given.pop(path)
        if tuple(made.shape) != tuple(own.shape):
            raise ValueError(f"parameter {path!r} has shape {tuple(made.shape)}, in the model {tuple(own.shape)}")
        return made.astype(own.dtype) if is_tensor(made) and made.dtype is None else made

    new = map_by_path(take, _kept(model), is_tensor)
    if lacks or given:
        raise ValueError(
            f"the model has {', '.join(sorted(lacks)) or 'nothing'} that the parameters do not, and they have "
            f"{', '.join(sorted(given)) or 'nothing'} that it does not; give what nnx_params gave for this model"
        )
    nnx.update(model, new)
    nnx.update(model, jax.tree.map(_begun, nnx.state(model, nnx.RngState)))


def _begun(x: Any) -> Any:
    """Return a random state as it is, or one of seed 0 for a shape."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(jax.random.key(0), x.shape) if is_key else jnp.zeros(x.shape, x.dtype)
