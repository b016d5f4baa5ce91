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
from jaxquant.core.paths import at_layer, join_path
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor, stacked_blocks
from jaxquant.inject.converted import LayerKernel, linen_kernels
from jaxquant.inject.faces import quantized_with
from jaxquant.inject.linen import Face, scale_name
from jaxquant.inject.model import choose_recipes
from jaxquant.inject.nnx_converted import convert_nnx
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT

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
        decided = choose_recipes(model_or_variables, config, *example_inputs, **example_kwargs)
        return convert_nnx(model_or_variables, decided, *example_inputs, **example_kwargs)
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
        params = _replaced(params, layer, _convert_whole(layer, variables))
    if config.resolved_backend is not None:
        for path, kernel in other_kernels(model, config, variables, found, *example_inputs, **example_kwargs).items():
            params = _put(params, path, kernel)
    others = {name: value for name, value in variables.items() if name not in ("params", OVERWRITE_WITH_GRADIENT)}
    return {"params": params, **others}


def other_kernels(
    model: nn.Module, config: Any, variables: Tree, found: Mapping[str, LayerKernel], *args: Any, **kwargs: Any
) -> dict[tuple[str, ...], ConvertedKernel]:
    """Convert the quantized parameters of layers that are not flax's own, by the path of the parameter.

    Args:
      model, config, variables, args, kwargs: as for ``find_kernels``.
      found: what that found.
    """
    if not any(value.ndim > 1 for _, value in _leaves(variables["params"])):
        return {}
    known = {(*_names(layer), "kernel") for layer in found.values()}
    kernels = Face(QuantConfig.from_any(config)).convert(model, variables, *args, **kwargs, known=known)
    return {tuple(path.split("/")): kernel for path, kernel in kernels.items()}


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


def find_kernels(
    model: nn.Module, config: Any, variables: Tree, *example_inputs: Any, **example_kwargs: Any
) -> dict[str, LayerKernel]:
    """Find the kernels of a Linen model that a config quantizes, by the path of their layer; see ``convert``.

    Layers that ``nn.vmap`` stacks and that all take one activation are left to ``other_kernels``.

    Args:
      model: the float model.
      config: as for ``maybe_quantize_model``.
      variables: arrays or ``jax.ShapeDtypeStruct``.
      example_inputs, example_kwargs: arguments of its ``__call__``.
    """
    if "params" not in variables:
        raise ValueError(f"variables have no collection 'params', only {sorted(variables)}")
    config = _config(config)
    backend = config.resolved_backend
    if backend is None:
        return {}
    decided = choose_recipes(model, config, *example_inputs, **example_kwargs)
    _refuse_converted(variables["params"])
    layers = linen_kernels(model, backend, decided, variables, *example_inputs, **example_kwargs)
    recipes = decided.recipes
    layers = {
        path: layer
        for path, layer in layers.items()
        if path in recipes and not layer.is_one_matmul(decided.sites.get(path))
    }
    for layer in layers.values():
        _check(layer, variables)
    return layers


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
    kernels = {(*_names(layer), "kernel"): layer for layer in layers.values()}
    for path, leaf in _leaves(shapes["params"]):
        layer = kernels.get(path)  # pyright: ignore[reportArgumentType]
        if layer is None:
            yield path, np.asarray(read(("params", *path), ()))
        else:
            tensor, scale = _convert_slices(layer, read, shapes, leaf.shape)
            yield path, tensor
            if scale is not None:
                yield (*path[:-1], INPUT_SCALE), scale
        if progress is not None:
            progress(join_path(path))


def _convert_slices(
    layer: LayerKernel, read: Read, shapes: Tree, shape: tuple[int, ...]
) -> tuple[QTensor, np.ndarray | None]:
    """Convert a kernel layer by layer into arrays of its whole shape."""
    leaves, whole = _state_leaves(layer, shapes), None
    for index in itertools.product(*(range(shape[axis]) for axis in layer.stacked)):
        at = dict(zip(layer.stacked, index, strict=True))
        place = tuple(at.get(axis, slice(None)) for axis in range(len(shape)))
        kernel = read(("params", *_names(layer), "kernel"), place[: max(at, default=-1) + 1])
        state = {
            tensor: {name: read(leaf.path, index if leaf.is_stacked else ()) for name, leaf in fields.items()}
            for tensor, fields in leaves.items()
        }
        part = jax.tree.map(np.asarray, layer.convert(jnp.asarray(kernel), jax.tree.map(jnp.asarray, state)))
        if not at:
            return part[0], settle_input_scale(layer.path, layer.recipe, part[1])
        if whole is None:
            sizes = {axis: shape[axis] for axis in at}
            whole = jax.tree.map(lambda x, sizes=sizes: np.empty(_stacked_shape(x.shape, sizes), x.dtype), part)
        jax.tree.map(lambda into, one, place=place: into.__setitem__(place, one), whole, part)
    assert whole is not None
    return stacked_blocks(whole[0], layer.stacked), settle_input_scale(layer.path, layer.recipe, whole[1])


def _stacked_shape(shape: tuple[int, ...], sizes: Mapping[int, int]) -> tuple[int, ...]:
    full = list(shape)
    for axis, size in sorted(sizes.items()):
        full.insert(axis, size)
    return tuple(full)


def _convert_whole(layer: LayerKernel, variables: Tree) -> tuple[QTensor, Array | None]:
    kernel = _at(variables["params"], _names(layer))["kernel"]
    lead = tuple(kernel.shape[axis] for axis in layer.stacked)

    def load(leaf: _StateLeaf) -> Array:
        value = _at(variables, leaf.path)
        return value if leaf.is_stacked else jnp.broadcast_to(value, (*lead, *value.shape))

    state = jax.tree.map(load, _state_leaves(layer, variables), is_leaf=lambda x: isinstance(x, _StateLeaf))
    tensor, scale = layer.convert_stacked(kernel, state)
    return tensor, settle_input_scale(layer.path, layer.recipe, scale)


@dataclasses.dataclass(frozen=True)
class _StateLeaf:
    """Where a piece of quant state lies, and whether each stacked layer has its own."""

    path: tuple[str, ...]
    is_stacked: bool


def _state_leaves(layer: LayerKernel, variables: Tree) -> dict[str, dict[str, _StateLeaf]]:
    """Find the quant state that the conversion of a layer reads, by tensor and field.

    Raises:
      ValueError: it is missing, or stacked otherwise than the kernel.
    """
    wanted = {}
    if layer.recipe.delayed is not None:
        wanted = {tensor: {"scale": 1, "amax_history": 1} for tensor in ("input", "kernel")}
    if layer.recipe.sparsity is not None:
        wanted["sparsity"] = {"mask": len(layer.shape)}
    if not wanted:
        return {}
    state = _at(variables.get(OVERWRITE_WITH_GRADIENT, {}), _names(layer)) or {}
    ops = [name for name, value in state.items() if isinstance(value, Mapping)]
    if len(ops) != 1:
        raise ValueError(
            f"recipe {layer.recipe.name!r} at {at_layer(layer.path)} keeps quant state in '{OVERWRITE_WITH_GRADIENT}', "
            f"and the variables have {'none' if not ops else ' and '.join(ops)} there; pass all that training keeps, "
            "or make it with jaxquant.calibrate"
        )
    kernel = _at(variables["params"], _names(layer))["kernel"].shape
    lead, elements = tuple(kernel[axis] for axis in layer.stacked), tuple(layer.shape[axis] for axis in layer.elements)
    found: dict[str, dict[str, _StateLeaf]] = {}
    for tensor, fields in wanted.items():
        for field, rank in fields.items():
            path = (OVERWRITE_WITH_GRADIENT, *_names(layer), ops[0], f"{tensor}_{field}")
            leaf = _at(variables, path)
            shape = None if leaf is None else tuple(leaf.shape)
            if shape is None or shape[: len(shape) - rank] not in (elements, (*lead, *elements)):
                each = f", each with that of batch elements {elements}" if elements else ""
                raise ValueError(
                    f"quant state {join_path(path)!r} must be one for each of the layers {lead} or one for all{each}, "
                    f"got {'none' if shape is None else f'shape {shape}'}"
                )
            found.setdefault(tensor, {})[field] = _StateLeaf(path, len(shape) > rank + len(elements))
    return found


def _check(layer: LayerKernel, variables: Tree) -> None:
    """Refuse a kernel that does not have the shape of its layer."""
    kernel = _at(variables["params"], (*_names(layer), "kernel"))
    if kernel is None:
        raise ValueError(
            f"the variables have no parameter {join_path((*_names(layer), 'kernel'))!r}, the kernel that "
            f"{layer.recipe.name!r} converts; pass all parameters of the model"
        )
    seen = tuple(size for axis, size in enumerate(kernel.shape) if axis not in layer.stacked)
    if seen != layer.shape:
        raise ValueError(
            f"kernel of {at_layer(layer.path)} has shape {tuple(kernel.shape)}, its layer reads {layer.shape}"
        )
    _state_leaves(layer, variables)


def _refuse_converted(params: Tree) -> None:
    for path, leaf in _leaves(params):
        if isinstance(leaf, QTensor):
            raise ValueError(f"parameter {join_path(path)!r} is converted already ({leaf.qvalue.dtype.name})")


def _names(layer: LayerKernel) -> tuple[str, ...]:
    return tuple(layer.path.split("/")) if layer.path else ()


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


def _replaced(params: Tree, layer: LayerKernel, converted: tuple[QTensor, Any]) -> dict[str, Any]:
    """Return a tree with the converted kernel in its place."""
    tensor, scale = converted
    new: dict[str, Any] = {"kernel": tensor} | ({} if scale is None else {INPUT_SCALE: scale})

    def replace(tree: Tree, path: tuple[str, ...]) -> dict[str, Any]:
        if not path:
            return {**tree, **new}
        return {**tree, path[0]: replace(tree[path[0]], path[1:])}

    return replace(params, _names(layer))
