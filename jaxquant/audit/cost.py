"""Costs of a function other than time: the size of its program and the bytes that it saves for the backward pass."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import jax

from jaxquant.audit.dataflow import Value, graph
from jaxquant.state import frozen

_FUNCTION = re.compile(r"""\s*func\.func (?:public |private )?@("[^"]+"|[\w.$-]+)\(""")
_CALL = re.compile(r"""\b(?:func\.)?call @("[^"]+"|[\w.$-]+)\(""")


def program_lines(text: str) -> int:
    """Count the lines of a StableHLO module, each helper function once, as it is stored and compiled."""
    return sum(1 for line in text.splitlines() if line.strip())


def inlined_lines(text: str) -> int:
    """Count the operations' lines of a StableHLO module as if every call were replaced by the body of its function.

    Args:
      text: of the module, as ``lowered.as_text()`` returns it.

    Raises:
      ValueError: there is no function ``main``.
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            name = found[1]
            bodies[name] = []
        elif name and line.strip() not in ("", "}") and not line.strip().startswith("return "):
            bodies[name].append(line)
    if "main" not in bodies:
        raise ValueError(f"StableHLO module has no function @main, only {sorted(bodies)}")
    counts: dict[str, int] = {}

    def count(function: str) -> int:
        if function not in counts:
            calls = [_CALL.search(line) for line in bodies[function]]
            counts[function] = sum(count(call[1]) if call else 1 for call in calls)
        return counts[function]

    return count("main")


def saved_for_backward(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Count the bytes that a function's forward pass keeps for its backward pass, by dtype name.

    Arguments that are kept as they are (parameters, inputs, quant state) are not counted: they are alive anyway. Nor
    are constants, such as quant state that the function closes over.

    Args:
      function: differentiable in all its arguments; gradients are taken with respect to every one.
      args: trees of arrays or ``jax.ShapeDtypeStruct``.
    """

    def residuals(*args: Any) -> list[Any]:
        _, backward = jax.vjp(function, *args)
        return jax.tree.leaves(backward)

    with frozen():
        closed = jax.make_jaxpr(residuals)(*args)
    program = graph(closed, [()] * len(closed.jaxpr.invars))
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
