"""Memory cost of a function: the bytes that it saves for the backward pass."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax

from jaxquant.audit.dataflow import Graph, Value
from jaxquant.state import frozen


def saved_for_backward(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Return the number of bytes that the forward pass saves for the backward pass, by dtype name.

    Arguments that are saved unchanged (parameters, inputs, quant state) are not counted, because they stay alive
    anyway. Constants, such as quant state that the function closes over, are not counted either.

    Args:
      function: function that is differentiated with respect to all its arguments.
      args: trees of arrays or ``jax.ShapeDtypeStruct``.
    """

    def residuals(*args: Any) -> list[Any]:
        _, backward = jax.vjp(function, *args)
        return jax.tree.leaves(backward)

    with frozen():
        closed = jax.make_jaxpr(residuals)(*args)
    program = Graph(closed, [()] * len(closed.jaxpr.invars))
    found: collections.Counter[str] = collections.Counter()
    avals: Any = closed.out_avals
    for value, aval in dict(zip(map(_without_names, program.outputs), avals, strict=True)).items():
        if value.operation not in ("argument", "constant"):
            found[str(aval.dtype)] += aval.size * aval.dtype.itemsize
    return dict(found)


def _without_names(value: Value) -> Value:
    while value.operation == "name":
        [value] = value.inputs
    return value
