"""Parameters: which inputs of a traced function are parameters, and what ``trace.analysis`` makes of it then.

``jaxquant.quantize`` is told what the parameters are. A training step has them among its arguments, beside optimizer
state, quant state and a batch; which they are follows from what is multiplied with what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.audit.dataflow import Contraction
from jaxquant.audit.scales import argument, origin
from jaxquant.core.quant_state import NAMES
from jaxquant.state import OVERWRITE_WITH_GRADIENT
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.flow import CONSTANT, DATA, Flow, Leaf
from jaxquant.trace.paths import GENERIC, Name, leaf_names
from jaxquant.trace.plan import Contraction as Site

COLLECTIONS = frozenset({"params", "state", "model"})
"""Names of trees that hold a model's parameters; none of them is a part of a path."""
_QVALUE = "qvalue"
_OF_QTENSOR = frozenset({_QVALUE, "scale", "zero_point"})


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the analysis of a whole function found.

    Attributes:
      analysis: of the function.
      is_state: inputs that are quant state, which say nothing of a layer.
    """

    analysis: Analysis
    is_state: frozenset[int]

    def site(self, context: tuple[int, ...]) -> Site | None:
        """Return the contraction of an equation, None for one that multiplies no parameter."""
        site = self.analysis.found.get(context)
        return site if site is not None and site.leaves else None

    def path(self, site: Site | None) -> str:
        """Return the path of a contraction's layer, as ``jaxquant.quantize`` spells it; "" for none."""
        if site is None:
            return ""
        leaves = sorted({leaf.index for leaf in site.leaves} - self.is_state)
        size = -1 if site.side is None else math.prod(site.shapes[site.side])
        return self.analysis.weight_path(leaves, size * math.prod(length for _, length in site.stack))


def input_names(args_info: Any) -> list[Name]:
    """Return the path of every input of a traced function: the argument's position or name, then the leaf's."""
    names = [name[1:] for name in leaf_names(args_info)]  # the first key tells args from kwargs
    whole = {name[:-1] for name in names if name[-1:] == (_QVALUE,)}
    return [name[:-1] if name[:-1] in whole and name[-1] in _OF_QTENSOR else name for name in names]


def read(closed: Any, names: Sequence[Name], forward: Iterable[Contraction], known: Iterable[Name]) -> Reading:
    """Analyze a whole function.

    Args:
      closed: its jaxpr.
      names: of its inputs.
      forward: its forward contractions.
      known: paths of layers that are known.
    """
    avals = [var.aval for var in closed.jaxpr.invars]
    state = frozenset(i for i, name in enumerate(names) if _is_state(name))
    chosen, prefixes = _Inputs(names, avals, state, list(forward), list(known)).choose()

    def flow(index: int) -> Flow:
        if index in chosen:
            return Flow(frozenset({Leaf(index)}))
        return CONSTANT if index in state or _is_key(avals[index]) else DATA

    own = [_without(name, prefixes.get(name[0], 1)) for name in names]
    analysis = Analysis(closed, own, [tuple(aval.shape) for aval in avals], [flow(i) for i in range(len(names))])
    return Reading(analysis, state)


def _is_state(name: Name) -> bool:
    return OVERWRITE_WITH_GRADIENT in name or name[-1] in NAMES


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or (aval.dtype == "uint32" and aval.shape[-1:] == (2,))


def _without(name: Name, prefix: int) -> Name:
    while prefix < len(name) - 1 and name[prefix] in COLLECTIONS:
        prefix += 1
    return name[prefix:]


class _Inputs:
    """Separate parameters from data among the inputs, argument by argument.

    An argument that an operand is a multiple of, where the other operand is computed, is a parameter, and so are the
    other leaves of its tree. What is multiplied with a parameter is data, unless it stands beside it. Where both
    operands are arguments of which nothing else is known, the parameter is the one in a tree, or with a name such as
    "kernel"; else the second one.
    """

    def __init__(
        self,
        names: Sequence[Name],
        avals: Sequence[Any],
        state: frozenset[int],
        forward: Sequence[Contraction],
        known: Sequence[Name],
    ) -> None:
        self._names, self._avals, self._state = names, avals, state
        self._sure: set[int] = {i for i, name in enumerate(names) if any(_contains(name[1:-1], each) for each in known)}
        self._pairs: list[tuple[int, int]] = []
        for each in forward:
            sources = [argument(origin(operand).source) for operand in (each.lhs, each.rhs)]
            given = [value.position for value in sources if value is not None and value.operation == "argument"]
            given = [index for index in given if not _is_cache(names[index])]
            if sum(value is not None for value in sources) > len(given):  # beside an array of the function's own
                given = [index for index in given if len(names[index]) > 1]
            if len(given) == 2 and self._are_siblings(*given):
                self._sure.update(given)
            elif len(given) == 2:
                self._pairs.append((given[0], given[1]))
            elif given:
                self._sure.add(given[0])

    def _are_siblings(self, first: int, second: int) -> bool:
        """Whether two inputs stand beside one another in a tree: the factors of a low-rank update."""
        one, other = self._names[first], self._names[second]
        return len(one) > 1 and len(other) > 1 and one[:-1] == other[:-1]

    def choose(self) -> tuple[set[int], dict[str, int]]:
        """Return the indices of the parameters, and how many leading names of each argument are no part of a path."""
        if any(len(self._names[i]) > 1 for i in self._sure):  # an array by itself is a batch, beside a tree
            self._sure = {i for i in self._sure if len(self._names[i]) > 1}
        roots = {self._names[i][0] for i in self._sure}
        data: set[Name] = set()
        for pair in self._pairs:
            first, second = pair if self._rank(pair[0], roots) > self._rank(pair[1], roots) else pair[::-1]
            if self._names[first][0] not in roots:
                self._sure.add(first)
                roots.add(self._names[first][0])
            if second not in self._sure:
                data.add(self._names[second][:2])
        kept = {name for name in data if not any(self._names[i][:2] == name for i in self._sure)}
        chosen = {
            i
            for i, name in enumerate(self._names)
            if name[0] in roots and name[:2] not in kept and i not in self._state and self._can_be(i)
        }
        return chosen, {root: self._prefix(root) for root in roots}

    def _rank(self, index: int, roots: set[str]) -> tuple[bool, ...]:
        name = self._names[index]
        return (index in self._sure, name[0] in roots, len(name) > 1 and name[-1] in GENERIC, len(name) > 1)

    def _can_be(self, index: int) -> bool:
        dtype = self._avals[index].dtype
        if _is_cache(self._names[index]) or jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jnp.bool_:
            return False
        return index in self._sure or not jnp.issubdtype(dtype, jnp.integer)

    def _prefix(self, root: str) -> int:
        """Count the leading names of an argument that say where in it the parameters stand, as in a tuple."""
        prefix = 1
        while True:
            here = [self._names[i] for i in self._sure if self._names[i][0] == root]
            leads = {name[prefix] for name in here if len(name) > prefix + 1}
            beside = {name[prefix] for name in self._names if name[0] == root and len(name) > prefix}
            lead = next(iter(leads), "")
            if len(leads) != 1 or len(here) != sum(len(name) > prefix + 1 for name in here):
                return prefix
            if lead not in COLLECTIONS and not (lead.isdigit() and len(beside) > 1):
                return prefix
            prefix += 1


def _is_cache(name: Name) -> bool:
    return any("cache" in part for part in name)


def _contains(whole: Name, part: Name) -> bool:
    return any(part) and any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))
