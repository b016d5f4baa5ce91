"""Flow: the facts about one value of a traced function, and the rules that combine them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxquant.trace.structure import MAP, Step, sources_of

Stack = tuple[tuple[int, int], ...]
"""Scans that slice a value, outermost first: (nesting level, length) of each."""
Mark = Literal["result", "exp", "sum"]
"""Dependence of a value on a contraction: elementwise on its result, on exponentials of it, or on a sum of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """Parameter leaf that a value is computed from.

    Attributes:
      index: index of the leaf.
      stack: scans that slice the leaf.
      split: axes that an enclosing shard_map splits over devices.
    """

    index: int
    stack: Stack = ()
    split: tuple[int, ...] = ()


class Split(NamedTuple):
    """Axis of a value that a shard_map splits over devices.

    Attributes:
      start: number of steps between the leaf and the value.
      axis: axis of the value.
      names: mesh axes.
      parts: number of devices along them.
    """

    start: int
    axis: int
    names: tuple[str, ...]
    parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Route from one leaf to a value, by steps that only move elements.

    Attributes:
      leaf: index of the leaf.
      steps: steps from the leaf to the value, with a ``MAP`` for each scan that slices it.
      obstacle: reason for which the leaf cannot be recovered from the value, or "".
      splits: splits by enclosing shard_maps.
    """

    leaf: int
    steps: tuple[Step, ...] = ()
    obstacle: str = ""
    splits: tuple[Split, ...] = ()

    def then(self, *steps: Step) -> Route:
        """Return the route extended by further steps."""
        return dataclasses.replace(self, steps=(*self.steps, *steps))

    def splits_of(self, axis: int) -> tuple[Split, ...]:
        """Return the splits on an axis of the final value, including axes that were merged with others."""
        return tuple(each for each in self.splits if each.axis in sources_of(self.steps[each.start :], axis))

    def by_batch(self, batch: Sequence[int], others: Iterable[int]) -> tuple[tuple[Split, ...], ...] | None:
        """Return the splits of each batch axis of the final value.

        The result is None if a split axis lies in several axes of the value, or in an axis that contains other axes.

        Args:
          batch: batch axes of the value.
          others: other axes of the value with more than one element.
        """
        found = [self.splits_of(axis) for axis in batch]
        whole = all(
            sources_of(self.steps[each.start :], axis) == {each.axis}
            for axis, own in zip(batch, found, strict=True)
            for each in own
        )
        whole = whole and not set().union(*found) & {each for axis in others for each in self.splits_of(axis)}
        return tuple(found) if whole and len(set().union(*found)) == sum(map(len, found)) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Derived:
    """Value computed from leaves by more than moving elements.

    Attributes:
      leaves: indices of the leaves.
      why: operation that changed them.
    """

    leaves: frozenset[int]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """Facts about a value.

    Attributes:
      leaves: parameter leaves, if the value is computed only from leaves and constants; None if it depends on data.
      is_closure: whether it depends on an array that the function closes over.
      after: parameter contractions that it depends on without another parameter contraction in between.
      marks: contractions that it depends on without any contraction in between, and the kind of dependence.
      picked: leaves that were combined with data or indexed by data, with the number of their remaining axes; -1 if
        data was added.
      is_product: whether it is a product of parameters, such as learned queries times their kernel, which is not a
        weight.
      route: route from the leaves, or None if it depends on no leaf or on a contraction.
    """

    leaves: frozenset[Leaf] | None = frozenset()
    is_closure: bool = False
    after: frozenset[Any] = frozenset()
    marks: frozenset[tuple[Mark, Any]] = frozenset()
    picked: frozenset[tuple[int, int]] = frozenset()
    is_product: bool = False
    route: Route | Derived | None = None

    @property
    def is_weight(self) -> bool:
        """Whether the value is computed only from parameters, and from at least one parameter."""
        return bool(self.leaves)

    @property
    def is_data(self) -> bool:
        return self.leaves is None

    def marked(self, mark: Mark) -> frozenset[Any]:
        """Return the contractions that the value depends on in the given way."""
        return frozenset(contraction for kind, contraction in self.marks if kind == mark)


CONSTANT = Flow()
DATA = Flow(leaves=None)
_RANKING = frozenset({"top_k", "argmax", "sort", "approx_top_k"})
SHARDED = "is split by a shard_map"


def join(flows: Iterable[Flow]) -> Flow:
    """Return the flow of a value computed from others. The result is data if one of them is data."""
    flows = list(flows)
    leaves: frozenset[Leaf] | None = frozenset()
    for flow in flows:
        leaves = None if leaves is None or flow.leaves is None else leaves | flow.leaves
    empty: frozenset[Any] = frozenset()
    return Flow(
        leaves,
        any(flow.is_closure for flow in flows),
        empty.union(*(flow.after for flow in flows)),
        empty.union(*(flow.marks for flow in flows)),
        empty.union(*(flow.picked for flow in flows)),
        leaves is not None and any(flow.is_product for flow in flows),
    )


def either(ways: Sequence[Flow], what: str) -> Flow:
    """Return the flow of a value that is one of several. It keeps the route if all have the same.

    Args:
      ways: flow of each.
      what: reason that the result records if the routes differ.
    """
    routes, leaves = [each.route for each in ways], set()
    if all(each == routes[0] for each in routes):
        return dataclasses.replace(join(ways), route=routes[0])
    for each in routes:
        leaves |= {each.leaf} if isinstance(each, Route) else each.leaves if each else set()
    return dataclasses.replace(join(ways), route=Derived(frozenset(leaves), what))


def obstruct(flow: Flow, what: str) -> Flow:
    """Record why the leaf cannot be recovered from a value. The first reason stays, except for a split."""
    route = flow.route
    if not isinstance(route, Route) or route.obstacle not in ("", SHARDED):
        return flow
    return dataclasses.replace(flow, route=dataclasses.replace(route, obstacle=what))


def mark_uses(name: str, ins: Sequence[Flow], out: Flow) -> Flow:
    """Record on contractions that their result is ranked or normalized. Returns the flow of the output with its marks.

    Args:
      name: primitive of the equation.
      ins: flows of its operands.
      out: flow of its output, with the marks of all operands.
    """
    if name in _RANKING:
        for site in out.marked("result"):
            site.is_ranked = True
    elif name == "exp":
        return dataclasses.replace(out, marks=out.marks | {("exp", site) for site in out.marked("result")})
    elif name in ("reduce_sum", "psum"):
        return dataclasses.replace(out, marks=out.marks | {("sum", site) for site in out.marked("exp")})
    elif name == "log":
        for site in out.marked("sum"):
            site.is_normalized = True
    elif name == "div":
        for site in ins[0].marked("exp") & ins[1].marked("sum"):
            site.is_normalized = True
    return out


def through_integers(flow: Flow) -> Flow:
    """Return the flow of a custom function's result; integer products in the function hide the products before it.

    The scales of an integer product may be computed from the results of other products, but are not these results.
    """
    sites = frozenset(site for site in flow.marked("result") if site.dtype.startswith(("int", "uint")))
    return dataclasses.replace(flow, after=sites, marks=frozenset({("result", s) for s in sites})) if sites else flow


def change_leaves(flow: Flow, change: Any) -> Flow:
    """Apply a function to each leaf of a flow that is computed from parameters."""
    if not flow.leaves:
        return flow
    return dataclasses.replace(flow, leaves=frozenset(change(leaf) for leaf in flow.leaves))


def enter_scan(flow: Flow, level: int, length: int) -> Flow:
    """Return the flow of one step's slice of a scanned input."""

    def enter(leaf: Leaf) -> Leaf:
        split = tuple(axis - 1 for axis in leaf.split)  # -1 if the scanned axis itself is split
        return dataclasses.replace(leaf, stack=(*leaf.stack, (level, length)), split=split)

    if isinstance(flow.route, Route):
        flow = dataclasses.replace(flow, route=flow.route.then(MAP))
    return change_leaves(flow, enter)


def leave_scan(flow: Flow, level: int) -> Flow:
    """Return the flow of an output of a scan at a nesting level, as seen outside the scan."""
    return change_leaves(
        flow, lambda leaf: dataclasses.replace(leaf, stack=tuple(each for each in leaf.stack if each[0] < level))
    )


def enter_shards(flow: Flow, spec: Any, sizes: Mapping[str, int]) -> Flow:
    """Return the flow of one device's part of a shard_map operand, on a mesh of these sizes."""
    names = [(each,) if isinstance(each, str) else tuple(each or ()) for each in spec]
    counts = ((axis, each, math.prod(sizes[name] for name in each)) for axis, each in enumerate(names))
    cut = [(axis, each, parts) for axis, each, parts in counts if parts > 1]
    flow = obstruct(flow, SHARDED) if cut else flow
    if isinstance(route := flow.route, Route):
        new = (Split(len(route.steps), *each) for each in cut)
        flow = dataclasses.replace(flow, route=dataclasses.replace(route, splits=(*route.splits, *new)))
    axes = {axis for axis, _, _ in cut}
    return change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=tuple(sorted({*leaf.split, *axes}))))


def gathered(flow: Flow, route: Route, params: Mapping[str, Any]) -> Flow:
    """Return the flow of a value with this route after an all-gather with these params."""
    names = params["axis_name"]
    names = (names,) if isinstance(names, str) else tuple(names)
    done = [each for each in route.splits_of(params["all_gather_dimension"]) if each.names == names]
    rest = tuple(each for each in route.splits if each not in done)
    if not done:
        return dataclasses.replace(flow, route=Derived(frozenset({route.leaf}), "all_gather"))
    route = dataclasses.replace(route, splits=rest, obstacle="is gathered in a shard_map")
    flow = dataclasses.replace(flow, route=route)
    return flow if rest else change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=()))


def leave_shards(flow: Flow, outside: Iterable[Flow]) -> Flow:
    """Return the flow of an output of a shard_map, as seen outside: split like its operands."""
    outside = list(outside)
    before = {leaf.index: leaf.split for each in outside for leaf in each.leaves or ()}
    splits = {each.route.leaf: each.route.splits for each in outside if isinstance(each.route, Route)}
    flow = obstruct(flow, SHARDED)
    if isinstance(flow.route, Route):
        route = dataclasses.replace(flow.route, splits=splits.get(flow.route.leaf, ()))
        flow = dataclasses.replace(flow, route=route)
    return change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=before.get(leaf.index, ())))
