"""Flax's NNX layers: which a model has, their ops, and the modules that hold quant state in place of these.

An NNX model carries its layers, so they are found without running it: in lists, inside attention, beneath
``nnx.LoRA``. What nnx.vmap made as one layer with a leading axis has quant state with that axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends import Backend
from jaxquant.config.rules import Decision
from jaxquant.core.paths import float_rule, join_path, layer_name
from jaxquant.inject.faces import einsum_out_features
from jaxquant.state.nnx import QuantState
from jaxquant.trace.paths import get, put
from jaxquant.trace.report import Row, decision_fields

Linear = nnx.Linear | nnx.LinearGeneral | nnx.Einsum
"""NNX's linear layers."""

PLAIN_OPS = (jax.lax.dot_general, jnp.einsum)
"""What flax's layers compute with unless told otherwise."""
_KNOWN_CALLS = (nnx.Linear.__call__, nnx.LoRALinear.__call__, nnx.LinearGeneral.__call__, nnx.Einsum.__call__)


CONTAINERS = (nnx.List, nnx.Dict)
"""Modules that hold others, and have no methods of an author's."""


def takes_attributes(module: nnx.Module) -> bool:
    """Whether a module may hold quant state: not what holds modules in a list, nor a Linen module's bridge."""
    return not isinstance(module, (*CONTAINERS, nnx.bridge.ToNNX))


def _compute(held: StateHolder, *args: Any, **kwargs: Any) -> Any:
    """Compute the op in float; no ``self`` here, by which Qwix finds the layer that calls on Python's stack."""
    if held.operation == "einsum_op":
        kwargs.pop("out_sharding", None)
        return jnp.einsum(*args, **kwargs)
    return jax.lax.dot_general(*args, **kwargs)


class StateHolder(nnx.Module):
    """Quant state of one contraction, in place of a flax layer's op, which it computes in float.

    Args:
      operation: attribute that it is: "dot_general", "einsum_op" or another name.
      variables: the state under its flat names.
    """

    def __init__(self, operation: str, variables: Mapping[str, Any]) -> None:
        self.operation = operation
        for name, value in variables.items():
            setattr(self, name, QuantState(value))

    __call__: Any = _compute


def holders(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the path of every holder in a tree of quant state, with its flat fields."""
    if any(not isinstance(value, Mapping) for value in tree.values()):
        yield "/".join(path), tree
        return
    for name, value in tree.items():
        yield from holders(value, (*path, name))


def linear_modules(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    """Yield each linear layer with its path as users write it in rules; a shared layer once, by its first path."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear):
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


def row_alone(path: str, module: Linear, decision: Decision, backend: Backend) -> Row:
    """Describe a layer that no call has shown."""
    stacked, shape = stacked_axes(path, module), _shape(module)
    named = {"kernel": module.kernel, "bias": module.bias}
    beside = tuple((name, tuple(value.shape)[stacked:]) for name, value in named.items() if value is not None)
    dtype = "" if module.dtype is None else jnp.dtype(module.dtype).name
    return Row(
        path=path,
        operation="dot_general",
        lhs=(),
        rhs=shape,
        weight="rhs",
        stack=(),
        batch=tuple(module.kernel.shape)[:stacked],
        kernel_shape=shape,
        out_features=out_features(module),
        precision=module.precision,
        is_out_of_reach=False,
        parameter_shapes=beside,
        **decision_fields(decision.recipe, decision.reason, backend, "dot_general", dtype),
    )


def out_features(module: Linear) -> int:
    """Count the outputs of a linear layer."""
    if isinstance(module, nnx.Einsum):
        return einsum_out_features(module.einsum_str, module.kernel_shape)
    features = module.out_features
    return math.prod(features) if isinstance(features, tuple) else features


def has_plain_op(module: Any) -> bool:
    """Whether a layer has no op of its own, so that its quant state may stand in the op's place."""
    op = getattr(module, op_name(module))
    return getattr(module, "dot_general_cls", None) is None and (
        op in (None, *PLAIN_OPS) or isinstance(op, StateHolder)
    )


def op_name(module: Linear) -> str:
    return "einsum_op" if isinstance(module, nnx.Einsum) else "dot_general"


def contraction_axes(module: nnx.Linear | nnx.LinearGeneral) -> tuple[int, ...]:
    """Return the contraction axes of a layer's kernel, whatever nnx.vmap stacks."""
    if isinstance(module, nnx.Linear):
        return (0,)
    batch = len(module.batch_axis)
    return tuple(range(batch, batch + len(module.in_features)))


def call_layers(model: nnx.Module, paths: Collection[str]) -> tuple[Callable[..., Any], Any, tuple[Any]]:
    """Return a call of layers by themselves, which shows a trace how each contracts its kernel in its own dtype.

    Args:
      model: the model.
      paths: of its linear layers.

    Returns:
      A function of (kernels, inputs), and both.
    """
    modules = {path: module for path, module in linear_modules(model) if path in paths}
    kernels: dict[str, Any] = {}
    for path, module in modules.items():
        put(kernels, path, {"kernel": module.kernel[...]})

    def call(kernels: Any, inputs: Mapping[str, jax.Array]) -> list[jax.Array]:
        return [_call(path, module, get(kernels, path)["kernel"], inputs[path]) for path, module in modules.items()]

    inputs = {path: jax.ShapeDtypeStruct(_input(module), module.kernel.dtype) for path, module in modules.items()}
    return call, kernels, (inputs,)


def _input(module: Linear) -> tuple[int, ...]:
    """Return the least shape of a layer's input."""
    shape = _shape(module)
    if not isinstance(module, nnx.Einsum):
        axes = contraction_axes(module)
        return tuple(shape[axis] for axis in (*range(axes[0]), *axes))
    left, right = module.einsum_str.replace(" ", "").replace("...", "").partition("->")[0].split(",")
    sizes = dict(zip(right, shape, strict=True))
    return tuple(sizes.get(label, 1) for label in left)


def _call(path: str, module: Linear, kernel: jax.Array, inputs: jax.Array) -> jax.Array:
    def one(kernel: jax.Array) -> jax.Array:
        lhs, rhs, *_ = module.promote_dtype((inputs, kernel, None), dtype=module.dtype)
        if isinstance(module, nnx.Einsum):
            return jnp.einsum(module.einsum_str, lhs, rhs)
        axes = contraction_axes(module)
        batch = tuple(range(axes[0]))
        contracted = tuple(range(axes[0], lhs.ndim))
        return jax.lax.dot_general(lhs, rhs, ((contracted, axes), (batch, batch)))

    def over(run: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return lambda kernels: jax.lax.scan(lambda _, kernel: (None, run(kernel)), None, kernels)[1]

    run = one
    for _ in range(stacked_axes(path, module)):
        run = over(run)
    return run(kernel)


def check_alone(model: nnx.Module, paths: Collection[str]) -> None:
    """Refuse layers that may read their kernel otherwise than their class does, where no call shows how.

    Raises:
      ValueError: names the layer.
    """
    norms = (path for path, node in nnx.iter_graph(model) if isinstance(node, nnx.WeightNorm))
    inside = tuple("".join(f"{name}/" for name in path) for path in norms)
    for path, module in linear_modules(model):
        kind, what = type(module), ""
        if path.startswith(inside):
            what = "is under nnx.WeightNorm"
        elif kind.__call__ not in _KNOWN_CALLS:
            what = "has a __call__ of its own"
        elif not has_plain_op(module):
            what = f"has a {op_name(module)} of its own"
        if what and path in paths:
            raise ValueError(
                f"{layer_name(path)} ({kind.__name__}) {what}, and nothing shows how it reads its kernel; give convert "
                f"example inputs whose call runs it, or {float_rule(path)}"
            )
