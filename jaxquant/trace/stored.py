"""stored: which operands of a program's contractions lie in memory, and which XLA computes where they are quantized."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxquant.trace.analysis import scan_counts
from jaxquant.trace.plan import OPERATIONS, Plan

_WRITES = {*OPERATIONS, "pallas_call", "scan", "while", "all_gather", "psum", "reduce_scatter"}
"""Primitives whose results XLA does not fuse into their readers."""
_KEEPS = ("reshape", "name", "sharding_constraint", "copy_p", "copy")
"""Primitives that leave a tensor where it is."""
Flags = tuple[bool, ...]


def mark_stored(plan: Plan) -> None:
    """Set ``stored`` of every chosen contraction: whether its operands and its output gradient lie in memory.

    Arguments of the program do, what loops carry, and results of matmuls, kernels and collectives. An output gradient
    does where the program returns the result, or only another contraction reads it. A jaxpr that is called several
    times has what holds for all calls, so that equal calls stay one function.

    Args:
      plan: of a program, on which was decided.
    """
    known: dict[int, tuple[Flags, Flags]] = {}
    before = None
    while before != known:
        before = dict(known)
        _mark(plan, (True,) * len(plan.jaxpr.invars), (True,) * len(plan.jaxpr.outvars), known)


def _mark(plan: Plan, ins: Flags, outs: Flags, known: dict[int, tuple[Flags, Flags]]) -> None:
    jaxpr = plan.jaxpr
    others = known.get(id(jaxpr), (ins, outs))
    ins, outs = (tuple(map(min, each, other)) for each, other in zip((ins, outs), others, strict=True))
    known[id(jaxpr)] = ins, outs
    stored = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, ins, strict=True))
    uses = collections.Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, Literal))
    uses.update(atom for atom in jaxpr.outvars if not isinstance(atom, Literal))
    gradients = {atom for atom, flag in zip(jaxpr.outvars, outs, strict=True) if flag and not isinstance(atom, Literal)}
    for eqn in reversed(jaxpr.eqns):
        out = eqn.outvars[0] if eqn.outvars else None
        is_kept = eqn.primitive.name in _KEEPS and uses[out] == 1 and out in gradients
        if eqn.primitive.name in OPERATIONS or is_kept:
            gradients.update(atom for atom in eqn.invars[:2] if not isinstance(atom, Literal))
    for index, eqn in enumerate(jaxpr.eqns):
        flags = tuple(not isinstance(atom, Literal) and stored.get(atom, False) for atom in eqn.invars)
        site, out = plan.sites.get(index), eqn.outvars[0] if eqn.outvars else None
        if site is not None and site.recipe is not None and site.side is not None and not site.batch:
            is_alone = site.side == 1 and uses[out] == 1 and out in gradients
            site.stored = flags[1 - site.side], flags[site.side], is_alone
        for each in plan.inner.get(index, ()):
            _mark(each, *_inner_flags(eqn, each, flags), known)
        is_stored = flags[0] if eqn.primitive.name in _KEEPS else eqn.primitive.name in _WRITES
        stored.update(dict.fromkeys(eqn.outvars, is_stored))


def _inner_flags(eqn: Any, plan: Plan, flags: Sequence[bool]) -> tuple[Flags, Flags]:
    """Return which inputs of a program within an equation lie in memory, and which gradients of its results."""
    count, results = len(plan.jaxpr.invars), len(plan.jaxpr.outvars)
    if eqn.primitive.name == "scan":  # slices of what it goes over are taken where they are read
        consts, carries = scan_counts(eqn.params)
        ins = (*flags[:consts], *[True] * carries, *[False] * (count - consts - carries))
        return ins, (True,) * carries + (False,) * (results - carries)
    return tuple(flags) if len(flags) == count else (False,) * count, (False,) * results
