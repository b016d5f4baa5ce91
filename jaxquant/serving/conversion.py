"""Conversion of a trained model's float parameters to quantized parameters for serving.

    params, quant_state ──► kernels (position and use of each kernel) ──► QTensor leaves, static input scales
                                     one kernel, or one layer of it, at a time

Each kernel is quantized as in the training forward pass, so the converted model returns the same bits as the trained
model with the same parameters and quant state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict

from jaxquant.config.quant_config import ConfigLike, QuantConfig, refuse_fields
from jaxquant.core.paths import join_path
from jaxquant.core.qtensor import QTensor
from jaxquant.inject import linen
from jaxquant.inject.faces import NNXModel, face_of, sort_arguments
from jaxquant.inject.nnx_converted import convert_nnx
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.kernels import LayerKernel
from jaxquant.trace.paths import replace_leaves

Array = jax.Array
Tree = Mapping[str, Any]
Read = Callable[[tuple[str, ...], tuple[slice | int, ...]], Any]


@overload
def convert(
    model: nn.Module, variables: Tree, config: ConfigLike, /, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, Any]: ...
@overload
def convert(model: NNXModel, config: ConfigLike, /, *example_inputs: Any, **example_kwargs: Any) -> NNXModel: ...
def convert(model: Any, /, *arguments: Any, **example_kwargs: Any) -> Any:
    """Convert a trained model's float kernels to quantized ones.

    ``convert(model, variables, config, *example_inputs)`` converts the variables of a Linen model;
    ``convert(model, config, *example_inputs)`` converts an NNX model. The arguments are not modified.

    ``jax.jit(lambda variables: convert(model, variables, config, *example_inputs))``, or ``nnx.jit`` for an NNX model,
    compiles the conversion to one program with equal bits. A training loop can call it after each step: the arrays stay
    on their devices, and values are not checked for NaN, infinity and static scales without observations.

    Args:
      model: float Linen model whose variables are converted, or NNX model.
      variables: all variables of a trained Linen model: ``{"params": …}`` and, if the recipe has state,
        ``_overwrite_with_gradient``.
      config: config of the training run, or the serving config for post-training quantization; see
        ``maybe_quantize_model``.
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      For Linen: ``{"params": …}`` in which each quantized layer's ``kernel`` is a ``QTensor``, with an ``input_scale``
        if the recipe has a static scale for activations. Collections other than quant state are copied; metadata boxes
        (names of axes) are removed. To run the variables, pass a config with ``checkpoint_is_quantized`` true to
        ``maybe_quantize_model(model, config, …)``. For NNX: a converted model, ready to be called.

    Raises:
      TypeError: the arguments are in the wrong order, or the model is not a Flax module.
      ValueError: a parameter is missing, has another shape, or is already converted; quant state is missing, or has
        no amax for a static scale; ``save_quantized_params_path`` is set, but ``convert`` writes no files.
      TypeError, ValueError, NotImplementedError: the config is invalid, see ``QuantConfig.from_any``.
    """
    variables, config, *example_inputs = sort_arguments("convert", model, arguments, "*inputs", example_kwargs)
    config = _parse_config(config)
    if isinstance(model, nnx.Module):
        return convert_nnx(model, config, *example_inputs, **example_kwargs)
    if face_of(model) is not None:
        raise ValueError(f"{type(model).__name__} is already quantized; pass the float model to convert")
    variables = meta.unbox(dict(variables))
    kernels_by_path = linen.find_kernels(model, variables, config, *example_inputs, **example_kwargs)
    leaves: dict[Any, Any] = flatten_dict(variables["params"])
    kernels = {layer.name: layer.convert_stacked(leaves[layer.name]) for layer in kernels_by_path.values()}
    params = replace_leaves(variables["params"], kernels)
    others = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return {"params": params, **others}


def _parse_config(config_like: Any) -> QuantConfig:
    config = QuantConfig.from_any(config_like)
    reason = "has no effect in convert; remove this field, and save the result with jaxquant.serving.save"
    refuse_fields(config, {"save_quantized_params_path": reason}, ValueError)
    return config


def find_kernels(
    model: nn.Module, variables: Tree, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Return the kernels of a Linen model that a config quantizes, by layer path; see ``convert``.

    If a layer has a second kernel, its key is the path of the parameter.

    Args:
      model: float model.
      variables: parameters, arrays or ``jax.ShapeDtypeStruct``, and the arrays of the quant state.
      config: same as for ``maybe_quantize_model``.
      example_inputs, example_kwargs: arguments of the model's ``__call__``.
    """
    config = _parse_config(config)
    kernels_by_path: dict[str, LayerKernel] = {}
    for path, layer in linen.find_kernels(model, variables, config, *example_inputs, **example_kwargs).items():
        kernels_by_path[path if layer.path in kernels_by_path else layer.path] = layer
    return kernels_by_path


def convert_each(
    layers: Mapping[str, LayerKernel], read: Read, shapes: Tree, progress: Callable[[str], None] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Convert parameters in bounded memory: float kernels are loaded one layer at a time.

    Args:
      layers: result of ``find_kernels``.
      read: function (path in the variables, index of leading axes) -> array of that slice; the index ``()`` selects the
        whole array.
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
    """Convert a stacked kernel one layer at a time, into arrays of the full shape."""
    result = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), layer.made) if layer.stacked else None
    for index in itertools.product(*(range(layer.made.shape[axis]) for axis in layer.stacked)):
        at = dict(zip(layer.stacked, index, strict=True))
        place = tuple(at.get(axis, slice(None)) for axis in range(layer.made.ndim))
        kernel = read(("params", *layer.name), place[: max(at, default=-1) + 1])
        converted = jax.tree.map(np.asarray, layer.convert(jnp.asarray(kernel), index))
        if result is None:
            result = converted
        else:
            for target, new_leaf in zip(jax.tree.leaves(result), jax.tree.leaves(converted), strict=True):
                target[place] = new_leaf
    assert result is not None
    return layer.filled(result)
