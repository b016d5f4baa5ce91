"""Flax's NNX layers: which a model has, and their ops.

An NNX model carries its layers, so they are found without running it: in lists, inside attention, beneath
``nnx.LoRA``. What nnx.vmap made as one layer with a leading axis has quant state with that axis.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends import load, native_nnx
from jaxquant.core.paths import float_rule, join_path, layer_name
from jaxquant.core.recipe import Recipe
from jaxquant.inject.layers import Layer, einsum_out_features, split_arrays

Linear = nnx.Linear | nnx.LinearGeneral | nnx.Einsum
LINEAR: dict[type[nnx.Module], str] = {nnx.Linear: "dense", nnx.LinearGeneral: "dense_general", nnx.Einsum: "einsum"}
"""NNX's linear layers and the name of each kind."""

_KNOWN_CALLS = (nnx.Linear.__call__, nnx.LoRALinear.__call__, nnx.LinearGeneral.__call__, nnx.Einsum.__call__)


def nnx_layers(model: nnx.Module, *example_inputs: Any, **example_kwargs: Any) -> list[Layer]:
    """List the linear layers of an NNX model, those that a call runs first and in its order.

    Args:
      model: the model.
      example_inputs, example_kwargs: arguments of its ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.
    """
    found = {path: _layer(path, module) for path, module in linear_modules(model)}
    if not (example_inputs or example_kwargs):
        return list(found.values())
    called = _trace_call(model, example_inputs, example_kwargs)
    return [*called.values(), *(layer for path, layer in found.items() if path not in called)]


def linear_modules(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    """Yield each linear layer with its path as users write it in rules; a shared layer once, by its first path."""
    for path, node in nnx.iter_graph(model):
        if kind_of(node) is not None:
            yield join_path(path), node


def copy_model(model: nnx.Module) -> Any:
    """Copy a model; variables are new objects around the same arrays."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, state, copy=True)


def _shape(module: Linear) -> tuple[int, ...]:
    """Return the kernel's shape for one layer, whatever nnx.vmap stacks."""
    if isinstance(module, nnx.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nnx.LinearGeneral):
        return *module.batch_axis.values(), *module.in_features, *module.out_features
    return tuple(module.kernel_shape)


def stacked_axes(path: str, module: Linear) -> int:
    """Count the leading axes that nnx.vmap put before the kernel's own.

    Raises:
      NotImplementedError: other axes than leading ones.
    """
    kernel, shape = module.kernel.shape, _shape(module)
    extra = len(kernel) - len(shape)
    if extra < 0 or kernel[extra:] != shape:
        raise NotImplementedError(
            f"{layer_name(path)} has a kernel of shape {kernel} where {type(module).__name__} makes {shape}; only "
            "leading axes may be added, as by nnx.vmap with out_axes 0"
        )
    return extra


def _layer(path: str, module: Linear, is_called: bool = False) -> Layer:
    stacked = 0 if is_called else stacked_axes(path, module)  # a call sees one layer at a time
    named = {"kernel": module.kernel, "bias": module.bias}
    shapes = {name: tuple(value.shape)[stacked:] for name, value in named.items() if value is not None}
    return Layer(
        path,
        kind_of(module) or "",
        shapes["kernel"],
        out_features(module),
        tuple(shapes.items()),
        precision=module.precision,
        preferred_element_type=module.preferred_element_type,
    )


def out_features(module: Linear) -> int:
    """Count the outputs of a linear layer."""
    if isinstance(module, nnx.Einsum):
        equation = module.einsum_str
        return einsum_out_features(equation, native_nnx.lhs_labels(equation), module.kernel_shape)
    features = module.out_features
    return math.prod(features) if isinstance(features, tuple) else features


def op_name(module: Linear) -> str:
    return "einsum_op" if isinstance(module, nnx.Einsum) else "dot_general"


def quantized_op(
    backend: str, path: str, module: Linear, recipe: Recipe, implementation: str | None = None
) -> nnx.Module:
    """Make the quantized op of a layer; see ``Backend.nnx_op``."""
    form: dict[str, Any] = (
        {"equation": module.einsum_str} if isinstance(module, nnx.Einsum) else {"axes": contraction_axes(module)}
    )
    stacked = stacked_axes(path, module)
    return load(backend).nnx_op(recipe, path, module.kernel, stacked, implementation=implementation, **form)


def contraction_axes(module: nnx.Linear | nnx.LinearGeneral) -> tuple[int, ...]:
    """Return the contraction axes of a layer's kernel, whatever nnx.vmap stacks."""
    if isinstance(module, nnx.Linear):
        return (0,)
    batch = len(module.batch_axis)
    return tuple(range(batch, batch + len(module.in_features)))


def check_op(path: str, module: Linear, layer: Layer, recipe: Recipe) -> None:
    """Refuse a layer that would lose its own op, or would not use the one that it gets."""
    own = getattr(module, "dot_general_cls", None) or getattr(module, op_name(module))
    if own not in (None, jax.lax.dot_general, jnp.einsum):
        raise ValueError(
            f"{layer_name(path)} has a {op_name(module)} of its own ({own}) and config asks for {recipe.name!r} there; "
            f"drop one, or {float_rule(path)}"
        )
    if type(module).__call__ not in _KNOWN_CALLS and not layer.input_shapes:
        raise ValueError(
            f"{layer_name(path)} ({type(module).__name__}) has a __call__ of its own and was not seen to use its "
            f"{op_name(module)}; pass maybe_quantize_model example inputs whose call runs it, or {float_rule(path)}"
        )
    if layer.uses_op is False:
        raise NotImplementedError(
            f"{layer_name(path)} ({type(module).__name__}) does not use its {op_name(module)}, so {recipe.name!r} "
            f"cannot reach it; {float_rule(path)}"
        )


def kind_of(module: Any) -> str | None:
    """Return the kind of a linear layer, None for anything else."""
    return next((kind for base, kind in LINEAR.items() if isinstance(module, base)), None)


def _trace_call(model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Layer]:
    """Trace a call of a copy of the model whose layers note their calls."""
    seen: dict[str, Layer] = {}
    copy = copy_model(model)
    for path, module in list(linear_modules(copy)):
        object.__setattr__(module, "__class__", _noting(type(module), path, seen))
    graph, state = nnx.split(copy)
    arrays, rebuild = split_arrays((args, kwargs))

    def call(state: Any, arrays: list[Any]) -> None:
        args, kwargs = rebuild(arrays)
        nnx.merge(graph, state)(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    jax.eval_shape(call, state, arrays)
    return seen


def _noting(kind: type, path: str, seen: dict[str, Layer]) -> type:
    """Subclass a layer's class so that a call notes its input and whether it used its op."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = op_name(self)
        op, used = getattr(self, name), []

        def noting_op(*args: Any, **kwargs: Any) -> Any:
            used.append(args[2 if name == "einsum_op" else 1].dtype.name)
            default = jnp.einsum if name == "einsum_op" else jax.lax.dot_general
            return (op or default)(*args, **kwargs)

        out = _with_attribute(self, name, noting_op, lambda: kind.__call__(self, *args, **kwargs))
        before = seen[path].input_shapes if path in seen else ()
        inputs = args[0] if args else kwargs["x" if isinstance(self, nnx.LoRALinear) else "inputs"]
        layer = _layer(path, self, is_called=True)
        seen[path] = dataclasses.replace(layer, input_shapes=(*before, tuple(inputs.shape)), uses_op=bool(used))
        if used:
            seen[path] = dataclasses.replace(seen[path], kernel_dtype=used[0])
        return out

    call.__name__ = "__call__"
    return types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(__call__=call))


def _with_attribute(module: Any, name: str, value: Any, call: Callable[[], Any]) -> Any:
    before = getattr(module, name)
    object.__setattr__(module, name, value)
    try:
        return call()
    finally:
        object.__setattr__(module, name, before)
