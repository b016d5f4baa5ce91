"""Readings: which contractions read one tensor as their activation (query, key, value), so that it is quantized once.

Layers that share a tensor keep state of their own, and each observes it. Their states are equal as long as all of them
observe the same tensors, so only layers that read the same ones everywhere share any. What differs in recipe, by a rule
or an implementation, stays apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxquant.core.recipe import Recipe
from jaxquant.trace.plan import Contraction, Key, Plan, Reading

_STEPS = frozenset({"convert_element_type", "sharding_constraint"})
"""What each layer does to a tensor before it contracts it; with equal parameters it makes equal tensors of one."""


class _Read(NamedTuple):
    """A chosen contraction, which tensor its activation is, and the contraction axes of that."""

    site: Contraction
    tensor: Hashable
    axes: tuple[int, ...]


def mark_readings(plan: Plan, can_share: Callable[[Recipe], bool]) -> None:
    """Set the reading of every chosen contraction that shares its activation with others of its jaxpr.

    Args:
      plan: of the program, on which was decided.
      can_share: whether the backend quantizes activations by themselves in a recipe.
    """
    found = list(_reads(plan))
    tensors: dict[Key, set[Hashable]] = {}
    for site, tensor, _ in found:
        tensors.setdefault(site.key, set()).add(tensor)
    groups: dict[Any, list[Contraction]] = {}
    for site, tensor, axes in found:
        assert site.recipe is not None
        if site.operation == "dot_general" and not site.batch and can_share(site.recipe):
            alike = site.recipe, axes, site.implementation, tensor, frozenset(tensors[site.key])
            groups.setdefault(alike, []).append(site)
    for (recipe, axes, implementation, _, _), sites in groups.items():
        keys = tuple(dict.fromkeys(site.key for site in sites))
        reading = Reading(keys, recipe, axes, implementation) if len(sites) > 1 else None
        for site in sites:
            site.reading = reading


def _reads(plan: Plan) -> Iterator[_Read]:
    same: dict[Any, Hashable] = {}

    def tensor_of(atom: Any) -> Hashable:
        return (id(plan), id(atom)) if isinstance(atom, Literal) else same.get(atom, (id(plan), atom))

    for index, eqn in enumerate(plan.jaxpr.eqns):
        site = plan.sites.get(index)
        if eqn.primitive.name in _STEPS:
            same[eqn.outvars[0]] = eqn.primitive.name, repr(sorted(eqn.params.items())), tensor_of(eqn.invars[0])
        elif site is not None and site.recipe is not None and site.side is not None:
            numbers = eqn.params.get("dimension_numbers") if site.operation == "dot_general" else None
            axes = numbers[0][1 - site.side] if numbers else ()
            yield _Read(site, tensor_of(eqn.invars[1 - site.side]), tuple(axes))
        for inner in plan.inner.get(index, ()):
            yield from _reads(inner)
