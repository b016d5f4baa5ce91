"""convert: the parameters of a trained model become the quantized ones that serve it.

    params, quant_state ──► kernels (where each kernel is, how it is read) ──► QTensor leaves, static input scales
                                     one kernel, or one layer of it, at a time

Each kernel goes through the quantization that the training forward does, so the converted model computes bit for bit
what the trained one computes with the same parameters and quant state.
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
from jaxquant.inject.faces import NNXModel, quantized_with, sort_arguments
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

    ``convert(model, variables, config, *example_inputs)`` converts the variables of a Linen model,
    ``convert(model, config, *example_inputs)`` an NNX model. The arguments stay as they are.

    Args:
      model: float Linen model whose variables are converted, or NNX model.
      variables: of a Linen model, all that training has: ``{"params": …}`` and, if the recipe has state,
        ``_overwrite_with_gradient``.
      config: config of the training run, or for post-training quantization the config to serve with; as for
        ``maybe_quantize_model``.
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      For Linen: ``{"params": …}`` in which each quantized layer's ``kernel`` is a ``QTensor``, with an
      ``input_scale`` if the recipe scales activations by a static scale. Collections other than quant
      state are kept; boxes with names of axes are removed. The variables run in the model that
      ``maybe_quantize_model(model, config, …)`` makes of a config with ``checkpoint_is_quantized`` true. For NNX:
      a converted model, ready to be called.

    Raises:
      TypeError: arguments in another order, or a model that is not a Flax module.
      ValueError: a kernel that is missing, of another shape, or converted already; quant state that is missing, or has
        not observed what a static scale needs; ``save_quantized_params_path``, which ``convert`` does not write.
      TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.
    """
    variables, config, *example_inputs = sort_arguments("convert", model, arguments, "*inputs", example_kwargs)
    config = _config(config)
    if isinstance(model, nnx.Module):
        return convert_nnx(model, config, *example_inputs, **example_kwargs)
    if quantized_with(model) is not None:
        raise ValueError(f"{type(model).__name__} is quantized; give convert the float model")
    variables = meta.unbox(dict(variables))
    found = linen.find_kernels(model, variables, config, *example_inputs, **example_kwargs)
    leaves: dict[Any, Any] = flatten_dict(variables["params"])
    kernels = {layer.name: layer.convert_stacked(leaves[layer.name]) for layer in found.values()}
    params = replace_leaves(variables["params"], kernels)
    others = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return {"params": params, **others}


def _config(given: Any) -> QuantConfig:
    config = QuantConfig.from_any(given)
    why = "is not written by convert; leave it empty and write what convert returns with jaxquant.serving.save"
    refuse_fields(config, {"save_quantized_params_path": why}, ValueError)
    return config


def find_kernels(
    model: nn.Module, variables: Tree, config: ConfigLike, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Find the kernels of a Linen model that a config quantizes, by the path of their layer; see ``convert``.

    A second kernel of one layer has the path of its parameter.

    Args:
      model: the float model.
      variables: parameters, arrays or ``jax.ShapeDtypeStruct``, and the arrays of the quant state.
      config: as for ``maybe_quantize_model``.
      example_inputs, example_kwargs: arguments of its ``__call__``.
    """
    config = _config(config)
    found: dict[str, LayerKernel] = {}
    for path, layer in linen.find_kernels(model, variables, config, *example_inputs, **example_kwargs).items():
        found[path if layer.path in found else layer.path] = layer
    return found


def convert_each(
    layers: Mapping[str, LayerKernel], read: Read, shapes: Tree, progress: Callable[[str], None] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Convert parameters that lie elsewhere, in bounded memory: one layer of one kernel is float at a time.

    Args:
      layers: from ``find_kernels``.
      read: (path in the variables, index of leading axes) -> array of that slice; ``()`` is all of it.
      shapes: the variables, arrays or ``jax.ShapeDtypeStruct``.
      progress: called with each path that is done.

    Yields:
      The path in "params" of each new leaf, and the leaf in host memory: QTensors of numpy arrays where the kernel was
      converted, numpy arrays of all that stays as it is.
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
    """Convert a kernel layer by layer into arrays of its whole shape."""
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
