"""Contents of a program: equations of a traced program, element types of the matmuls of a lowered program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

_DOT = re.compile(r"stablehlo\.dot_general .* : \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>")
_CALL = re.compile(r"(?:func\.call|call) @([\w.]+)\(")
_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.]+)\(")


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of the programs nested in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def dot_operand_types(lowered_text: str) -> list[tuple[str, str, str]]:
    """Return (lhs, rhs, result) element types of every ``dot_general`` in StableHLO text, such as ("i8", "i8", "i32").

    A function that is called n times counts n times; the body of a loop counts once.

    Args:
      lowered_text: result of ``jax.jit(f).lower(...).as_text()``.
    """
    dots: dict[str, list[tuple[str, str, str]]] = {}
    calls: dict[str, Counter[str]] = {}
    current = ""
    for line in lowered_text.splitlines():
        if function := _FUNCTION.search(line):
            current = function[1]
            dots[current], calls[current] = [], Counter()
        elif dot := _DOT.search(line):
            lhs, rhs, result = (text.rsplit("x", 1)[-1] for text in dot.groups())
            dots[current].append((lhs, rhs, result))
        elif call := _CALL.search(line):
            calls[current][call[1]] += 1

    def expand(function: str) -> list[tuple[str, str, str]]:
        inner = (expand(callee) * count for callee, count in calls[function].items())
        return sum(inner, dots[function])

    return expand("main")
