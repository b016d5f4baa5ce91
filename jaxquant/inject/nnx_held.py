"""Quant state in an NNX model: the modules that hold it, in place of a flax layer's op or beside a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.state.nnx import QuantState

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
