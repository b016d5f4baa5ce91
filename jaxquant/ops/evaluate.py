"""Evaluate a jaxpr with some equations replaced: the contraction of an einsum or of a transposed convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any], compute: Callable[[JaxprEqn, list[Any]], Any]) -> Any:
    """Run a program whose equations have one result each, and return its one result.

    Args:
      jaxpr: program without constants.
      operands: values of its arguments, of any type that ``compute`` accepts.
      compute: function of (equation, values of its inputs) that returns the equation's result.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        values = [atom.val if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        known[eqn.outvars[0]] = compute(eqn, values)
    return known[jaxpr.outvars[0]]
