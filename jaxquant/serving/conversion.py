"""convert: the parameters of a trained model become the quantized ones that serve it.

    params, quant_state ──► kernels (where each kernel is, how it is read) ──► QTensor leaves, static input scales
                                     one kernel, or one layer of it, at a time

Each kernel goes through the quantization that the training forward does, so the converted model computes bit for bit
what the trained one computes with the same parameters and quant state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jaxquant.backends._weights import settle_input_scale
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import join_path
from jaxquant.core.qtensor import ConvertedKernel, QTensor, stacked_blocks
from jaxquant.core.trees import map_by_path
from jaxquant.inject import linen_kernels
from jaxquant.inject.faces import quantized_with
from jaxquant.inject.linen import scale_name
from jaxquant.inject.nnx_converted import convert_nnx
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, refuse_trained
from jaxquant.trace.kernels import LayerKernel

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
      example_inputs, example_kwargs: arguments of the model's ``__call__``, arrays or ``jax.ShapeDtypeStruct``. An NNX
        model may go without.
      model: the float Linen model whose variables these are.

    Returns:
      For variables: ``{"params": …}`` in which each quantized layer's ``kernel`` is a ``QTensor``, with an
      ``input_scale`` beside it where the recipe scales activations by a static scale. Collections other than quant
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
    found = find_kernels(model, config, variables, *example_inputs, **example_kwargs)
    params = variables["params"]
    for layer in found.values():
        states = jax.tree.map(lambda leaf: _at(variables, leaf.path), list(layer.states))
        params = _put(params, layer.name, layer.convert_stacked(_at(variables["params"], layer.name), states))
    others = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return {"params": params, **others}


def _put(tree: Tree, path: tuple[str, ...], kernel: ConvertedKernel) -> dict[str, Any]:
    name, *rest = path
    if rest:
        return {**tree, name: _put(tree[name], tuple(rest), kernel)}
    scale = kernel.input_scale
    return {**tree, name: kernel.tensor} | ({} if scale is None else {scale_name(name): scale})


def _config(given: Any) -> QuantConfig:
    config = QuantConfig.from_any(given)
    if config.save_quantized_params_path:
        raise ValueError(
            f"save_quantized_params_path {config.save_quantized_params_path!r} is not written by convert; leave it "
            "empty and write what convert returns with jaxquant.serving.save"
        )
    return config


@dataclasses.dataclass(frozen=True)
class _StateLeaf:
    """Where a piece of quant state lies in the variables, and its shape and dtype."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


def find_kernels(
    model: nn.Module, config: Any, variables: Tree, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Find the kernels of a Linen model that a config quantizes, by the path of their layer; see ``convert``.

    A second kernel of one layer has the path of its parameter.

    Args:
      model: the float model.
      config: as for ``maybe_quantize_model``.
      variables: arrays or ``jax.ShapeDtypeStruct``.
      example_inputs, example_kwargs: arguments of its ``__call__``.
    """
    if "params" not in variables:
        raise ValueError(f"variables have no collection 'params', only {sorted(variables)}")
    config = _config(config)
    if config.resolver() is None:
        return {}
    for path, leaf in _leaves(variables["params"]):
        if isinstance(leaf, QTensor):
            raise ValueError(f"parameter {join_path(path)!r} is converted already ({leaf.qvalue.dtype.name})")
    state = variables.get(OVERWRITE_WITH_GRADIENT, {})
    refuse_trained(state)

    def place(path: str, leaf: Any) -> _StateLeaf:
        return _StateLeaf((OVERWRITE_WITH_GRADIENT, *path.split("/")), tuple(leaf.shape), leaf.dtype)

    placed = {**variables, OVERWRITE_WITH_GRADIENT: map_by_path(place, state)}
    found: dict[str, LayerKernel] = {}
    for path, layer in linen_kernels.find_kernels(model, config, placed, *example_inputs, **example_kwargs).items():
        found[path if layer.path in found else layer.path] = layer
    return found


find_sites = find_kernels  # its name until 0.1


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
    for path, leaf in _leaves(shapes["params"]):
        layer = kernels.get(path)
        if layer is None:
            yield path, np.asarray(read(("params", *path), ()))
        else:
            tensor, scale = _convert_slices(layer, read, leaf.shape)
            yield path, tensor
            if scale is not None:
                yield (*path[:-1], scale_name(path[-1])), scale
        if progress is not None:
            progress(join_path(path))


def _convert_slices(layer: LayerKernel, read: Read, shape: tuple[int, ...]) -> tuple[QTensor, np.ndarray | None]:
    """Convert a kernel layer by layer into arrays of its whole shape."""
    whole = None
    for index in itertools.product(*(range(shape[axis]) for axis in layer.stacked)):
        at = dict(zip(layer.stacked, index, strict=True))
        place = tuple(at.get(axis, slice(None)) for axis in range(len(shape)))
        kernel = read(("params", *layer.name), place[: max(at, default=-1) + 1])
        states = jax.tree.map(lambda leaf, index=index: jnp.asarray(read(leaf.path, index)), list(layer.states))
        part = jax.tree.map(np.asarray, layer.convert(jnp.asarray(kernel), states))
        if not at:
            return part[0], settle_input_scale(layer.path, layer.recipe, part[1], layer.stacked)
        if whole is None:
            sizes = {axis: shape[axis] for axis in at}
            whole = jax.tree.map(lambda x, sizes=sizes: np.empty(_stacked_shape(x.shape, sizes), x.dtype), part)
        jax.tree.map(lambda into, one, place=place: into.__setitem__(place, one), whole, part)
    assert whole is not None
    scale = settle_input_scale(layer.path, layer.recipe, whole[1], layer.stacked)
    return stacked_blocks(whole[0], sorted(layer.stacked)), scale


def _stacked_shape(shape: tuple[int, ...], sizes: Mapping[int, int]) -> tuple[int, ...]:
    full = list(shape)
    for axis, size in sorted(sizes.items()):
        full.insert(axis, size)
    return tuple(full)


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """Return what lies at a path, None where there is nothing."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
