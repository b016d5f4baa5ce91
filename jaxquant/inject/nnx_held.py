"""Quant state in an NNX model: the modules that hold it, in place of a flax layer's op or beside a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends import native_nnx
from jaxquant.core.recipe import Recipe
from jaxquant.inject.nnx_layers import contraction_axes, op_name, stacked_axes
from jaxquant.state.nnx import QuantState

CONTAINERS = (nnx.List, nnx.Dict)
"""Modules that hold others, and have no methods of an author's."""
PLAIN_OPS = (jax.lax.dot_general, jnp.einsum)
"""What flax's layers compute with unless told otherwise."""


def takes_attributes(module: nnx.Module) -> bool:
    """Whether a module may hold quant state: not what holds modules in a list, nor a Linen module's bridge."""
    return not isinstance(module, (*CONTAINERS, nnx.bridge.ToNNX))


def has_plain_op(module: Any) -> bool:
    """Whether a layer has no op of its own, so that its quant state may stand in the op's place."""
    op = getattr(module, op_name(module))
    return getattr(module, "dot_general_cls", None) is None and (op in (None, *PLAIN_OPS) or isinstance(op, Held))


def _compute(held: Held, *args: Any, **kwargs: Any) -> Any:
    """Compute the op in float; no ``self`` here, by which Qwix finds the layer that calls on Python's stack."""
    if held.operation == "einsum_op":
        kwargs.pop("out_sharding", None)
        return jnp.einsum(*args, **kwargs)
    return jax.lax.dot_general(*args, **kwargs)


class Held(native_nnx.QuantizedOp):
    """Quant state of one contraction, in place of a flax layer's op, which it computes in float.

    Args:
      operation: attribute that it is: "dot_general", "einsum_op" or another name.
      tensors: the state by tensor and field.
    """

    def __init__(self, operation: str, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        self.operation = operation
        self.fields = tuple((name, tuple(values)) for name, values in tensors.items())
        for name, values in tensors.items():
            for field, value in values.items():
                setattr(self, f"{name}_{field}", QuantState(value))

    __call__: Any = _compute


def holders(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the path of every holder in a tree of quant state, with its flat fields."""
    if any(not isinstance(value, Mapping) for value in tree.values()):
        yield "/".join(path), tree
        return
    for name, value in tree.items():
        yield from holders(value, (*path, name))


def make_holder(name: str, values: Mapping[str, Any]) -> Held:
    tensors: dict[str, dict[str, Any]] = {}
    for full, value in values.items():
        tensor = next(each for each in ("input", "kernel", "output_grad", "sparsity") if full.startswith(f"{each}_"))
        tensors.setdefault(tensor, {})[full.removeprefix(f"{tensor}_")] = value
    return Held(name, tensors)


def premade(path: str, module: Any, recipe: Recipe) -> Held:
    """Make the state of a layer that no example ran, from what flax's layer says of itself."""
    stacked = stacked_axes(path, module)
    if isinstance(module, nnx.Einsum):
        made: Any = native_nnx.Einsum(recipe, path, module.kernel, stacked, module.einsum_str)
    else:
        made = native_nnx.DotGeneral(recipe, path, module.kernel, stacked, contraction_axes(module))
    return Held(op_name(module), made.state())
