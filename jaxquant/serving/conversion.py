"""Conversion of a trained model's float parameters to quantized parameters for serving.

    params, quant_state ──► kernels (position and use of each kernel) ──► QTensor leaves, static input scales
                                     one kernel, or one layer of it, at a time

Each kernel is quantized as in the training forward pass, so the converted model returns the same bits as the trained
model with the same parameters and quant state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict

from jaxquant.config.quant_config import QuantConfig, refuse_fields
from jaxquant.core.paths import join_path
from jaxquant.core.qtensor import QTensor
from jaxquant.inject import linen
from jaxquant.inject.faces import quantized_with
from jaxquant.inject.nnx_converted import convert_nnx
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.kernels import LayerKernel
from jaxquant.trace.paths import replace_leaves

Array = jax.Array
Tree = Mapping[str, Any]
Read = Callable[[tuple[str, ...], tuple[slice | int, ...]], Any]


def convert(
    model_or_variables: Any, config: Any, *example_inputs: Any, model: nn.Module | None = None, **example_kwargs: Any
) -> Any:
    """Convert a trained model's float kernels to quantized ones.

    Args:
      model_or_variables: an NNX model; or the variables of a Linen one, all that training has: ``{"params": …}`` and,
        where the recipe has state, ``_overwrite_with_gradient``.
      config: as for ``maybe_quantize_model``: what the model was trained with, or for post-training quantization what
        it is to be served with.
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``.
      model: the float Linen model whose variables these are.

    Returns:
      For variables: ``{"params": …}`` in which each quantized layer's ``kernel`` is a ``QTensor``, with an
      ``input_scale`` where the recipe scales activations by a static scale. Collections other than quant
      state stay; boxes with names of axes do not. They run in the model that
      ``maybe_quantize_model(model, config, …)`` makes of a config with ``checkpoint_is_quantized`` true. For an NNX
      model: a converted model, ready to be called. What is given stays as it is.

    Raises:
      TypeError: variables without their model, or something that is neither.
      ValueError: a kernel that is missing, of another shape, or converted already; quant state that is missing, or has
        not seen what a static scale must know; ``save_quantized_params_path``, which this does not write.
      TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.
    """
    config = _config(config)
    if isinstance(model_or_variables, nnx.Module):
        return convert_nnx(model_or_variables, config, *example_inputs, **example_kwargs)
    if not isinstance(model_or_variables, Mapping):
        raise TypeError(
            f"convert takes an NNX model or the variables of a Linen one, got {type(model_or_variables).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            "convert of a Linen model's variables needs the float model too: "
            "jaxquant.convert(variables, config, *example_inputs, model=model)"
        )
    if quantized_with(model) is not None:
        raise ValueError(f"{type(model).__name__} is quantized; give convert the float model")
    variables = meta.unbox(dict(model_or_variables))
    found = linen.find_kernels(model, config, variables, *example_inputs, **example_kwargs)
    leaves: dict[Any, Any] = flatten_dict(variables["params"])
    kernels = {layer.name: layer.convert_stacked(leaves[layer.name]) for layer in found.values()}
    params = replace_leaves(variables["params"], kernels)
    others = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return {"params": params, **others}


def _config(given: Any) -> QuantConfig:
    config = QuantConfig.from_any(given)
    why = "is not written by convert; leave it empty and save the result of convert with jaxquant.serving.save"
    refuse_fields(config, {"save_quantized_params_path": why}, ValueError)
    return config


def find_kernels(
    model: nn.Module, config: Any, variables: Tree, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Return the kernels of a Linen model that a config quantizes, by layer path; see ``convert``.

    The key of a second kernel of the same layer is the path of its parameter.

    Args:
      model: float model.
      config: same as for ``maybe_quantize_model``.
      variables: parameters, arrays or ``jax.ShapeDtypeStruct``, and the arrays of the quant state.
      example_inputs, example_kwargs: arguments of the model's ``__call__``.
    """
    config = _config(config)
    found: dict[str, LayerKernel] = {}
    for path, layer in linen.find_kernels(model, config, variables, *example_inputs, **example_kwargs).items():
        found[path if layer.path in found else layer.path] = layer
    return found


def convert_each(
    layers: Mapping[str, LayerKernel], read: Read, shapes: Tree, progress: Callable[[str], None] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Convert parameters that ``read`` loads, in bounded memory: one layer of one kernel is float at a time.

    Args:
      layers: result of ``find_kernels``.
      read: function (path in the variables, index of leading axes) -> array of that slice; ``()`` is the whole array.
      shapes: variables, as arrays or ``jax.ShapeDtypeStruct``.
      progress: function that is called with each finished path.

    Yields:
      The path of each new leaf in "params", and the leaf in host memory: a QTensor of numpy arrays for a converted
      kernel, otherwise a numpy array.
    """
    kernels = {layer.name: layer for layer in layers.values()}
    paths: Iterable[tuple[str, ...]] = flatten_dict(shapes["params"])
    for path in paths:
        layer = kernels.get(path)
        if layer is None:
            yield path, np.asarray(read(("params", *path), ()))
        else:
            yield path, _convert_slices(layer, read)
        if progress is not None:
            progress(join_path(path))


def _convert_slices(layer: LayerKernel, read: Read) -> QTensor:
    """Convert a kernel layer by layer into arrays of the full shape."""
    whole = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), layer.made) if layer.stacked else None
    for index in itertools.product(*(range(layer.made.shape[axis]) for axis in layer.stacked)):
        at = dict(zip(layer.stacked, index, strict=True))
        place = tuple(at.get(axis, slice(None)) for axis in range(layer.made.ndim))
        kernel = read(("params", *layer.name), place[: max(at, default=-1) + 1])
        part = jax.tree.map(np.asarray, layer.convert(jnp.asarray(kernel), index))
        if whole is None:
            whole = part
        else:
            for into, one in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
                into[place] = one
    assert whole is not None
    return layer.filled(whole)
