"""Parameters: find the inputs of a traced function that are parameters, and analyse the function with them.

``jaxquant.quantize`` receives the parameters as an argument. A training step has parameters among its arguments, next
to optimizer state, quant state and a batch; this module infers the parameters from the operands of contractions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.audit.scales import Origin, find_argument
from jaxquant.state import OVERWRITE_WITH_GRADIENT
from jaxquant.state.table import is_field
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.flow import CONSTANT, DATA, Flow, Leaf
from jaxquant.trace.paths import GENERIC, Name, leaf_names
from jaxquant.trace.plan import Contraction as Site

COLLECTIONS = frozenset({"params", "state", "model"})
"""Names of trees that contain a model's parameters; these names are not part of a path."""
_Operands = Iterable[tuple[Origin, Origin]]
"""Origins of the operands of contractions."""
_QVALUE = "qvalue"
_OF_QTENSOR = frozenset({_QVALUE, "scale", "zero_point"})


class FunctionAnalysis(Analysis):
    """Analysis of a function, such as a training step, whose parameters are inferred.

    Args:
      closed: jaxpr of the function.
      names: paths of the function's inputs.
      forward: origins of the operands of the function's forward contractions.
      known: paths of known layers.
    """

    def __init__(self, closed: Any, names: Sequence[Name], forward: _Operands, known: list[Name]) -> None:
        avals = [var.aval for var in closed.jaxpr.invars]
        self._state = frozenset(i for i, name in enumerate(names) if _is_state(name))
        chosen, prefixes = _choose_parameters(names, avals, self._state, forward, known)

        def flow(index: int) -> Flow:
            if index in chosen:
                return Flow(frozenset({Leaf(index)}))
            return CONSTANT if index in self._state or _is_key(avals[index]) else DATA

        own = [_drop_collections(name, prefixes.get(name[0], 1)) for name in names]
        super().__init__(closed, own, [tuple(aval.shape) for aval in avals], [flow(i) for i in range(len(names))])

    def site(self, context: tuple[int, ...]) -> Site | None:
        """Return the contraction of an equation, or None if the equation multiplies no parameter."""
        site = self.found.get(context)
        return site if site is not None and site.leaves else None

    def layer(self, site: Site | None) -> str:
        """Return the path of a contraction's layer, as in ``jaxquant.quantize``, or ""."""
        if site is None:
            return ""
        leaves = sorted({leaf.index for leaf in site.leaves} - self._state)  # quant state does not identify a layer
        size = -1 if site.side is None else math.prod(site.shapes[site.side])
        return self.weight_path(leaves, size * math.prod(length for _, length in site.stack))


def input_names(args_info: Any) -> list[Name]:
    """Return the path of every input of a traced function: position or name of the argument, then path of the leaf."""
    names = [name[1:] for name in leaf_names(args_info)]  # the first key separates args from kwargs
    whole = {name[:-1] for name in names if name[-1:] == (_QVALUE,)}
    return [name[:-1] if name[:-1] in whole and name[-1] in _OF_QTENSOR else name for name in names]


def _is_state(name: Name) -> bool:
    return OVERWRITE_WITH_GRADIENT in name or is_field(name)


def _is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or (aval.dtype == "uint32" and aval.shape[-1:] == (2,))


def _drop_collections(name: Name, prefix: int) -> Name:
    while prefix < len(name) - 1 and name[prefix] in COLLECTIONS:
        prefix += 1
    return name[prefix:]


def _choose_parameters(
    names: Sequence[Name], avals: Sequence[Any], state: frozenset[int], forward: _Operands, known: list[Name]
) -> tuple[set[int], dict[str, int]]:
    """Separate parameters from data among the inputs, argument by argument.

    An input is a parameter if one operand of a contraction is a multiple of this input and the other operand is
    computed. The other leaves of the parameter's tree are then parameters, too. An input that is multiplied by a
    parameter is data, unless both are in the same tree. If both operands are arguments and nothing else is known, the
    parameter is the operand that is a leaf of a tree or has a name such as "kernel", otherwise the second operand.

    Returns:
      Indices of the parameters, and the number of leading names of each argument that are not part of a path.
    """
    sure, pairs = _pair_inputs(names, forward)
    sure |= {i for i, name in enumerate(names) if any(any(each) and contains(name[1:-1], each) for each in known)}
    if any(len(names[i]) > 1 for i in sure):  # if there is a tree of parameters, a single array is data
        sure = {i for i in sure if len(names[i]) > 1}
    roots, data = {names[i][0] for i in sure}, set[Name]()

    def rank(index: int) -> tuple[bool, ...]:
        name = names[index]
        return index in sure, name[0] in roots, len(name) > 1 and name[-1] in GENERIC, len(name) > 1

    for pair in pairs:
        first, second = pair if rank(pair[0]) > rank(pair[1]) else pair[::-1]
        if names[first][0] not in roots:
            sure.add(first)
            roots.add(names[first][0])
        if second not in sure:
            data.add(names[second][:2])
    data -= {names[i][:2] for i in sure}
    chosen = {i for i, name in enumerate(names) if name[0] in roots and name[:2] not in data and i not in state}
    chosen = {i for i in chosen if not _is_cache(names[i]) and _can_be_parameter(avals[i].dtype, i in sure)}
    return chosen, {root: _count_prefix(root, names, [names[i] for i in sure if names[i][0] == root]) for root in roots}


def _pair_inputs(names: Sequence[Name], forward: _Operands) -> tuple[set[int], list[list[int]]]:
    """Return inputs that multiply a computed value or a leaf of their own tree, and the other pairs of inputs."""
    sure, pairs = set[int](), []
    for each in forward:
        sources = [find_argument(operand.source) for operand in each]
        given = [value.position for value in sources if value is not None and value.operation == "argument"]
        given = [index for index in given if not _is_cache(names[index])]
        if sum(value is not None for value in sources) > len(given):  # one operand is a captured array
            given = [index for index in given if len(names[index]) > 1]
        are_siblings = len({names[index][:-1] for index in given}) == 1 and len(names[given[0]]) > 1
        if len(given) == 2 and not are_siblings:
            pairs.append(given)
        else:
            sure.update(given)
    return sure, pairs


def _can_be_parameter(dtype: Any, is_sure: bool) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jnp.bool_:
        return False
    return is_sure or not jnp.issubdtype(dtype, jnp.integer)


def _count_prefix(root: str, names: Sequence[Name], here: Sequence[Name]) -> int:
    """Return how many leading names of an argument are not part of the parameters' paths, such as a tuple index."""
    prefix = 1
    for lead, *others in zip(*(name[1:-1] for name in here), strict=False):
        beside = {name[prefix] for name in names if name[0] == root and len(name) > prefix}
        is_known = lead in COLLECTIONS or (lead.isdigit() and len(beside) > 1)
        if not is_known or set(others) - {lead}:
            break
        prefix += 1
    return prefix


def _is_cache(name: Name) -> bool:
    return any("cache" in part for part in name)


def contains(whole: Name, part: Name) -> bool:
    """Whether the names of ``part`` occur consecutively in ``whole``."""
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))
