"""Trace of a function: its outputs are the function's results, and the changes that it makes to its arguments.

If a step updates an NNX model in place and returns only the loss, the outputs include the update. Otherwise the update
would be unused, and the program would contain no backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxquant.audit.parameters import input_names
from jaxquant.trace.arguments import array_names, mark_static, restore_static, split_arrays
from jaxquant.trace.paths import Name

_JITTED = type(jax.jit(lambda: None))
_FUNCTION = "model"
"""Argument name of the model, if the function is an NNX model or a method of an NNX model."""


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[Name]]:
    """Trace a function.

    Args:
      fn: function, NNX model, or method of an NNX model; jitted or not.
      args, kwargs: arguments of the function.

    Returns:
      The traced function, which has a ``jaxpr``, and the path of each input.
    """
    while isinstance(fn, functools.partial) and any(map(_has_nodes, (*fn.args, *fn.keywords.values()))):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    given = {str(position): value for position, value in enumerate(args)} | dict(kwargs)
    owner = fn if isinstance(fn, nnx.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nnx.Module):
        name = getattr(fn, "__name__", "__call__") if owner is not fn else "__call__"
        given = {_FUNCTION: owner, **given}
        fn = functools.partial(_call_method, name)
        args = (owner, *args)
    if any(map(_has_nodes, given.values())):
        return _trace_with_nodes(fn, given, len(args))
    jitted: Any = fn if isinstance(fn, _JITTED) else jax.jit(_with_changes(fn))
    traced = jitted.trace(*args, **kwargs)
    return traced, input_names(traced.args_info)


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _has_nodes(tree: Any) -> bool:
    is_node = (nnx.Module, nnx.Optimizer, nnx.Variable)
    return any(isinstance(each, is_node) for each in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, is_node)))


def _with_changes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also returns the final arrays in its arguments."""

    @functools.wraps(fn)
    def whole(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        return out, [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]

    return whole


def _trace_with_nodes(fn: Callable[..., Any], given: Mapping[str, Any], positional: int) -> tuple[Any, list[Name]]:
    """Trace a function whose arguments contain NNX models or optimizers, which the function may change."""
    nodes = {name: value for name, value in given.items() if _has_nodes(value)}
    graph, states = nnx.split(nodes)
    rest = {name: value for name, value in given.items() if name not in nodes}
    plain, structure = split_arrays(mark_static(rest, numbers=False))

    def whole(states: dict[str, Any], plain: list[Any]) -> Any:
        merged = nnx.merge(graph, nnx.State(states))
        values = restore_static(jax.tree.unflatten(structure, plain)) | merged
        ordered = [values[name] for name in given]
        out = fn(*ordered[:positional], **dict(zip(list(given)[positional:], ordered[positional:], strict=True)))
        return out, nnx.split(merged)[1]

    traced = jax.jit(whole).trace({name: states[name] for name in nodes}, plain)
    names, others = input_names(traced.args_info), array_names(structure)
    return traced, [name[1:] if name[0] == "0" else others[int(name[1])] for name in names]
