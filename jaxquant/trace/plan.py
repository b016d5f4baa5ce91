"""Plan: the results of the analysis for each occurrence of a jaxpr, read by the report and the rewriter."""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxquant.core.recipe import Recipe
from jaxquant.ops import block_ragged, block_scaled
from jaxquant.trace.flow import Derived, Leaf, Route, Stack
from jaxquant.trace.jaxprs import scan_counts

CONTRACTIONS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
OPERATIONS = {name: name for name in CONTRACTIONS} | {
    block_scaled.NAME: "dot_general",
    block_ragged.NAME: "ragged_dot_general",
}
"""Each primitive that multiplies -> its kind of contraction."""

_COLLECTIVES = "all_gather all_gather_invariant all_to_all ppermute psum psum_invariant reduce_scatter"
_WRITES = {*OPERATIONS, *_COLLECTIVES.split(), "pallas_call", "scan", "while"}
"""Primitives whose results XLA does not fuse into their readers."""
_KEEPS = ("reshape", "name", "sharding_constraint", "copy_p", "copy")
"""Primitives that do not move a tensor in memory."""
Flags = tuple[bool, ...]

Key = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Key of quant state: paths of the leaves, lengths of the scans, sizes of the weight's batch axes."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SharedActivation:
    """Activation that several contractions of a jaxpr share, so that it is quantized once for all of them.

    Attributes:
      keys: keys of the contractions' state.
      recipe: recipe of all these contractions.
      axes: contraction axes of the tensor.
      implementation: requested implementation of the cast, or None to choose one.
    """

    keys: tuple[Key, ...]
    recipe: Recipe
    axes: tuple[int, ...]
    implementation: str | None


@dataclasses.dataclass(eq=False, slots=True)
class Contraction:
    """Contraction of the function: an equation, in one occurrence of its jaxpr.

    Attributes:
      operation: primitive, one of ``CONTRACTIONS``, or the primitive of a program that is not analyzed.
      scope: enclosing name scopes.
      shapes: shapes of both operands.
      dtype: dtype name of both operands, or "" if they differ.
      side: index of the weight operand, or None if no operand is a weight.
      leaves: leaves that the weight is computed from.
      route: route from the leaves to the weight.
      stack: scans that slice the weight.
      batch: global sizes of the weight's batch axes.
      split: mesh axes that an enclosing shard_map splits each batch axis over; () if no batch axis is split, None if
        that is unknown.
      weight_axes: contraction axes and batch axes of the weight, groups first.
      out_features: number of outputs.
      path: path of the layer.
      names: paths of the leaves.
      reason: reason for which it stays in float, or the rule or default that decided.
      is_float_matmul: False for products of integers and products without a contracted axis, which no rule concerns.
      is_out_of_reach: whether it has a parameter and stays in float under all rules.
      is_unsupported: whether rules apply to it, but the backend does not run its recipe in its operation.
      is_followed: whether another parameter contraction follows it.
      is_normalized: whether its result is an input of a softmax or a log-sum-exp.
      is_ranked: whether its result is ranked by top_k, argmax or sort.
      recipe: recipe that quantizes it, or None for float.
      is_einsum: whether it is part of a ``jnp.einsum``.
      precision: precision that the program requests.
      implementation: requested implementation of its casts and matmuls, or None to choose one.
      activation: identifier of its activation: equal for contractions that read one tensor, or equal casts of one.
      shared_activation: shared activation, or None if no other contraction shares its activation.
      stored: whether its activation, its weight and its output gradient are stored in memory; see ``mark_stored``.
    """

    operation: str
    scope: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    side: int | None = None
    leaves: frozenset[Leaf] = frozenset()
    route: Route | Derived | None = None
    stack: Stack = ()
    batch: tuple[int, ...] = ()
    split: tuple[tuple[str, ...], ...] | None = ()
    weight_axes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    out_features: int = 0
    path: str = ""
    names: tuple[str, ...] = ()
    reason: str = ""
    is_float_matmul: bool = True
    is_out_of_reach: bool = False
    is_unsupported: bool = False
    is_followed: bool = False
    is_normalized: bool = False
    is_ranked: bool = False
    recipe: Recipe | None = None
    is_einsum: bool = False
    precision: Any = None
    implementation: str | None = None
    activation: Hashable = None
    shared_activation: SharedActivation | None = None
    stored: tuple[bool, bool, bool] = (False, False, False)

    @property
    def is_layer(self) -> bool:
        """Whether rules apply to the contraction."""
        return self.side is not None and not self.is_out_of_reach

    @property
    def is_lost(self) -> bool:
        """Whether it is a float matmul with a parameter that no rule can quantize."""
        return self.is_float_matmul and (self.is_out_of_reach or self.is_unsupported)

    @property
    def key(self) -> Key:
        return self.names, tuple(length for _, length in self.stack), self.batch


@dataclasses.dataclass(eq=False)
class Plan:
    """Occurrence of a jaxpr.

    Attributes:
      jaxpr: open jaxpr.
      sites: contractions by the index of their equation.
      inner: occurrences of the jaxprs of an equation, by its index.
      programs: program that replaces a registered function's own program, by the index of its equation.
      level: number of enclosing scans.
      opened: name of the enclosing registered function whose program is analyzed instead, or "".
    """

    jaxpr: Any
    level: int
    opened: str = ""
    sites: dict[int, Contraction] = dataclasses.field(default_factory=dict)
    inner: dict[int, list[Plan]] = dataclasses.field(default_factory=dict)
    programs: dict[int, Any] = dataclasses.field(default_factory=dict)

    def contractions(self) -> Iterator[Contraction]:
        """Yield all contractions in the order of the program."""
        for index in sorted({*self.sites, *self.inner}):
            if index in self.sites:
                yield self.sites[index]
            for plan in self.inner.get(index, ()):
                yield from plan.contractions()

    @functools.cached_property
    def chosen(self) -> list[Contraction]:
        """Contractions to quantize; read this only after recipes are chosen."""
        return [each for each in self.contractions() if each.recipe is not None]

    @functools.cached_property
    def has_loop(self) -> bool:
        """Whether the plan contains a while loop of a function whose custom derivative is bypassed."""
        own = bool(self.opened) and any(eqn.primitive.name == "while" for eqn in self.jaxpr.eqns)
        inner = (plan for index, plans in self.inner.items() if index not in self.programs for plan in plans)
        return own or any(plan.has_loop for plan in inner)

    @functools.cached_property
    def seeds(self) -> np.ndarray:
        """Noise seed of every chosen contraction, from the leaves of its weight and its index among their uses.

        The surrounding program (jit, remat, other layers) does not change it. Read it from the plan of a whole
        function.
        """
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        seeds = []
        for each in self.chosen:
            counts[each.names] += 1
            seeds.append(zlib.crc32(repr((each.names, counts[each.names])).encode()))
        return np.array(seeds, np.uint32)

    @functools.cached_property
    def stacks(self) -> dict[Key, Stack]:
        """Scans of every state that the plan needs, in the order of the program."""
        return {each.key: each.stack for each in self.chosen}

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Value that is equal for two occurrences of a jaxpr that become one program, given their states in order."""
        order = {key: position for position, key in enumerate(self.stacks)}

        def own(each: Contraction) -> tuple[Any, ...]:
            shared = () if each.shared_activation is None else tuple(order[key] for key in each.shared_activation.keys)
            return (
                each.recipe,
                each.implementation,
                each.stored,
                each.side,
                order[each.key],
                each.stack,
                each.batch,
                each.split,
                shared,
            )

        return tuple(None if each.recipe is None else own(each) for each in self.contractions())


def mark_shared_activations(plan: Plan, can_share: Callable[[Recipe], bool]) -> None:
    """Set the shared activation of every chosen contraction that shares its activation with others of its jaxpr.

    Layers that share a tensor (query, key, value) keep separate states, and each observes the tensor. Their states are
    equal as long as all of them observe the same tensors, so layers share only if they read the same tensors
    everywhere. Layers with different recipes or implementations do not share.

    Args:
      plan: plan of the program, with recipes.
      can_share: whether the backend quantizes activations separately under a recipe.
    """
    tensors: dict[Key, set[Hashable]] = {}
    for site in plan.chosen:
        tensors.setdefault(site.key, set()).add(site.activation)
    groups: dict[Any, list[Contraction]] = {}
    for site in plan.chosen:
        assert site.recipe is not None
        if site.operation == "dot_general" and not site.batch and can_share(site.recipe):
            alike = site.recipe, site.implementation, site.activation, frozenset(tensors[site.key])
            groups.setdefault(alike, []).append(site)
    for (recipe, implementation, (_, axes), _), sites in groups.items():
        keys = tuple(dict.fromkeys(site.key for site in sites))
        shared_activation = SharedActivation(keys, recipe, axes, implementation) if len(sites) > 1 else None
        for site in sites:
            site.shared_activation = shared_activation


def readers_of(plan: Plan, arguments: Sequence[Any]) -> Iterator[tuple[Contraction, Any]]:
    """Yield each contraction that reads an argument directly or after a cast, reshape or transpose, and the argument.

    Args:
      plan: plan of a function.
      arguments: last arguments of the function.
    """
    known = dict(zip(map(id, reversed(plan.jaxpr.invars)), reversed(arguments), strict=False))
    for index, eqn in enumerate(plan.jaxpr.eqns):
        site = plan.sites.get(index)
        if eqn.primitive.name in ("convert_element_type", "reshape", "transpose"):
            known[id(eqn.outvars[0])] = known.get(id(eqn.invars[0]))
        elif site is not None and site.side is not None:
            yield site, known.get(id(eqn.invars[1 - site.side]))


def mark_stored(plan: Plan) -> None:
    """Set ``stored`` of every chosen contraction: whether its operands and its output gradient are stored in memory.

    Arguments of the program, values that a scan carries, and results of matmuls, kernels and collectives are stored. An
    output gradient is stored if the program returns the result, or if only another contraction reads it. A jaxpr that
    is called several times gets the flags that hold for all calls, so that equal calls stay one function.

    Args:
      plan: plan of a program, with recipes.
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
    """Return which inputs of a nested program are stored in memory, and which gradients of its results."""
    count, results = len(plan.jaxpr.invars), len(plan.jaxpr.outvars)
    if eqn.primitive.name == "scan":  # slices of the scanned inputs are taken where they are read
        consts, carries = scan_counts(eqn.params)
        ins = (*flags[:consts], *[True] * carries, *[False] * (count - consts - carries))
        return ins, (True,) * carries + (False,) * (results - carries)
    return tuple(flags) if len(flags) == count else (False,) * count, (False,) * results
