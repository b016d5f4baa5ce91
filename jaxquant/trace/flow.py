"""Flow: the facts known of one value of a traced function, and how they combine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxquant.trace.structure import MAP, Step, sources_of

Stack = tuple[tuple[int, int], ...]
"""The scans that a value is sliced by, outermost first: (nesting level, length) of each."""
Mark = Literal["result", "exp", "sum"]
"""How a value depends on a contraction: elementwise on its result, on exponentials of it, on a sum of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the parameters on its way into a contraction.

    Attributes:
      index: which leaf.
      stack: scans that slice it.
      split: its axes that a shard_map around splits over devices.
    """

    index: int
    stack: Stack = ()
    split: tuple[int, ...] = ()


class Split(NamedTuple):
    """One axis of a value that a shard_map splits over devices.

    Attributes:
      start: number of steps that made the value of its leaf.
      axis: of the value.
      names: mesh axes.
      parts: number of devices along them.
    """

    start: int
    axis: int
    names: tuple[str, ...]
    parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """How a value is made of one leaf by steps that only move elements.

    Attributes:
      leaf: which.
      steps: what was done to it, a ``MAP`` for each scan that slices it.
      obstacle: why the leaf cannot be made from what is read at the end, "" where it can.
      splits: what shard_maps around split of it.
    """

    leaf: int
    steps: tuple[Step, ...] = ()
    obstacle: str = ""
    splits: tuple[Split, ...] = ()

    def then(self, *steps: Step) -> Route:
        """Return the route after further steps."""
        return dataclasses.replace(self, steps=(*self.steps, *steps))

    def splits_of(self, axis: int) -> tuple[Split, ...]:
        """Return the splits that lie on an axis of the value at the end, whole or together with other axes."""
        return tuple(each for each in self.splits if each.axis in sources_of(self.steps[each.start :], axis))

    def by_batch(self, batch: Sequence[int], others: Iterable[int]) -> tuple[tuple[Split, ...], ...] | None:
        """Return the splits of each batch axis of the value at the end.

        None where one of them is an axis that lies in several of the value's, or in one beside others.

        Args:
          batch: its batch axes.
          others: its other axes of more than one element.
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
    """A value made of leaves by more than moving elements.

    Attributes:
      leaves: which.
      why: what was done to them.
    """

    leaves: frozenset[int]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What is known of a value.

    Attributes:
      leaves: leaves of the parameters that it is made of, if of these (and constants) alone; None where data is in it.
      is_closure: whether an array that the function closes over is in it.
      after: parameter contractions that it comes from with no other of these between.
      marks: of the contractions that it comes from with no contraction of any kind between, how it depends on them.
      picked: leaves that data was mixed into, or picked from, with the number of their axes that are left; -1 where
        data was added.
      is_product: whether it is made of a product of parameters, such as learned queries times their kernel: no weight.
      route: how it is made of leaves, None where no leaf is in it or a contraction is between.
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
        """Whether it is made of parameters alone, of at least one of them."""
        return bool(self.leaves)

    @property
    def is_data(self) -> bool:
        return self.leaves is None

    def marked(self, mark: Mark) -> frozenset[Any]:
        """Return the contractions on which it depends so."""
        return frozenset(contraction for kind, contraction in self.marks if kind == mark)


CONSTANT = Flow()
DATA = Flow(leaves=None)
SHARDED = "is split by a shard_map"


def join(flows: Iterable[Flow]) -> Flow:
    """Describe a value that is computed from others; data in one of them is data in it."""
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
    """Describe a value that is one of several; its route stays where it is the same in all.

    Args:
      ways: what is known of each.
      what: says where they meet.
    """
    routes, leaves = [each.route for each in ways], set()
    if all(each == routes[0] for each in routes):
        return dataclasses.replace(join(ways), route=routes[0])
    for each in routes:
        leaves |= {each.leaf} if isinstance(each, Route) else each.leaves if each else set()
    return dataclasses.replace(join(ways), route=Derived(frozenset(leaves), what))


def obstruct(flow: Flow, what: str) -> Flow:
    """Note why the leaf cannot be made from a value that is made of it; the first reason but a split stays."""
    route = flow.route
    if not isinstance(route, Route) or route.obstacle not in ("", SHARDED):
        return flow
    return dataclasses.replace(flow, route=dataclasses.replace(route, obstacle=what))


def with_marks(flow: Flow, mark: Mark, contractions: Iterable[Any]) -> Flow:
    """Add marks of one kind to a flow."""
    return dataclasses.replace(flow, marks=flow.marks | {(mark, each) for each in contractions})


def change_leaves(flow: Flow, change: Any) -> Flow:
    """Apply a function to each leaf of a flow that is made of parameters."""
    if not flow.leaves:
        return flow
    return dataclasses.replace(flow, leaves=frozenset(change(leaf) for leaf in flow.leaves))


def enter_scan(flow: Flow, level: int, length: int) -> Flow:
    """Describe one step's slice of what a scan goes over."""

    def enter(leaf: Leaf) -> Leaf:
        split = tuple(axis - 1 for axis in leaf.split)  # −1: the scanned axis itself is split
        return dataclasses.replace(leaf, stack=(*leaf.stack, (level, length)), split=split)

    if isinstance(flow.route, Route):
        flow = dataclasses.replace(flow, route=flow.route.then(MAP))
    return change_leaves(flow, enter)


def leave_scan(flow: Flow, level: int) -> Flow:
    """Describe what a scan at a nesting level made, as seen from outside."""
    return change_leaves(
        flow, lambda leaf: dataclasses.replace(leaf, stack=tuple(each for each in leaf.stack if each[0] < level))
    )


def enter_shards(flow: Flow, spec: Any, sizes: Mapping[str, int]) -> Flow:
    """Describe one device's part of an operand of a shard_map, on a mesh of these sizes."""
    names = [(each,) if isinstance(each, str) else tuple(each or ()) for each in spec]
    counts = ((axis, each, math.prod(sizes[name] for name in each)) for axis, each in enumerate(names))
    cut = [(axis, each, parts) for axis, each, parts in counts if parts > 1]
    flow = obstruct(flow, SHARDED) if cut else flow
    if isinstance(route := flow.route, Route):
        new = (Split(len(route.steps), *each) for each in cut)
        flow = dataclasses.replace(flow, route=dataclasses.replace(route, splits=(*route.splits, *new)))
    axes = {axis for axis, _, _ in cut}
    return change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=tuple(sorted({*leaf.split, *axes}))))


def gathered(flow: Flow, dimension: int, names: tuple[str, ...]) -> Flow:
    """Describe a value whose parts along mesh axes are put together along a dimension, in every device."""
    route = flow.route
    if not isinstance(route, Route):
        return flow
    done = [each for each in route.splits_of(dimension) if each.names == names]
    rest = tuple(each for each in route.splits if each not in done)
    if not done:
        return dataclasses.replace(flow, route=Derived(frozenset({route.leaf}), "all_gather"))
    route = dataclasses.replace(route, splits=rest, obstacle="is gathered in a shard_map")
    flow = dataclasses.replace(flow, route=route)
    return flow if rest else change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=()))


def leave_shards(flow: Flow, outside: Iterable[Flow]) -> Flow:
    """Describe what a shard_map made, as seen from outside: split as its operands were there."""
    outside = list(outside)
    before = {leaf.index: leaf.split for each in outside for leaf in each.leaves or ()}
    splits = {each.route.leaf: each.route.splits for each in outside if isinstance(each.route, Route)}
    flow = obstruct(flow, SHARDED)
    if isinstance(flow.route, Route):
        route = dataclasses.replace(flow.route, splits=splits.get(flow.route.leaf, ()))
        flow = dataclasses.replace(flow, route=route)
    return change_leaves(flow, lambda leaf: dataclasses.replace(leaf, split=before.get(leaf.index, ())))
