"""Routes: how each leaf of the parameters gets to the contractions that read it, as steps that only move elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxquant.trace import flow as flows
from jaxquant.trace.analysis import JITS, REMATS, scan_counts
from jaxquant.trace.plan import Contraction, Key, Plan
from jaxquant.trace.registry import CUSTOM
from jaxquant.trace.structure import Step, steps_of

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """How a value is made of one leaf.

    Attributes:
      leaf: which.
      steps: what was done to the whole leaf; the axes of scans that slice it come first, outermost first.
      scans: lengths of these.
      obstacle: why the leaf cannot be made from what is read at the end, "" where it can.
    """

    leaf: int
    steps: tuple[Step, ...] = ()
    scans: tuple[int, ...] = ()
    obstacle: str = ""

    def then(self, steps: Sequence[Step]) -> Route:
        """Return the route after steps on one scan's slice."""
        lifted = list(steps)
        for length in reversed(self.scans):
            lifted = [step.lifted(length) for step in lifted]
        return dataclasses.replace(self, steps=(*self.steps, *lifted))

    def on_array(self, leaf: Array) -> Array:
        """Make the value of all scans' slices."""
        for step in self.steps:
            leaf = step.on_array(leaf)
        return leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A value made of leaves by more than structure.

    Attributes:
      leaves: which.
      why: what was done to them.
    """

    leaves: frozenset[int]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """An operation that reads a leaf and is neither structure nor its quantized contraction.

    Attributes:
      leaf: which.
      operation: primitive, or what else reads it.
      path: of the layer, where the operation is a contraction.
      is_obstructed: whether it would read the converted kernel well, but the kernel cannot be made of what it reads.
      float_reason: why the layer is in float, where the operation is its contraction.
    """

    leaf: int
    operation: str
    path: str = ""
    is_obstructed: bool = False
    float_reason: str = ""


Known = Route | Lost | None
"""None: data, or a constant."""


class Routes:
    """Follow the leaves through a plan on which was decided.

    Attributes:
      weights: of each quantized contraction, how its weight is made.
      stops: every other reader of a leaf.
    """

    def __init__(self, plan: Plan, leaves: int) -> None:
        self.weights: dict[Contraction, Route | Lost] = {}
        self.stops: dict[Stop, None] = {}
        data = len(plan.jaxpr.invars) - leaves
        outs = self._run(plan, [*map(Route, range(leaves)), *[None] * data])
        for out in outs:
            if isinstance(out, Route):
                self._stop(out, "the function returns it")

    def _run(self, plan: Plan, given: Sequence[Known]) -> list[Known]:
        known: dict[Any, Known] = dict(zip(plan.jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Known:
            return None if isinstance(atom, Literal) else known.get(atom)

        for index, eqn in enumerate(plan.jaxpr.eqns):
            ins = [read(atom) for atom in eqn.invars]
            if any(each is not None for each in ins):
                inner, is_read = plan.inner.get(index, []), index in plan.programs
                outs = self._equation(eqn, plan.sites.get(index), inner, ins, is_read)
                known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in plan.jaxpr.outvars]

    def _stop(self, route: Route, operation: str, path: str = "", is_obstructed: bool = False) -> None:
        self.stops[Stop(route.leaf, operation, path, is_obstructed)] = None

    def _equation(
        self, eqn: Any, site: Contraction | None, inner: list[Plan], ins: list[Known], is_read: bool
    ) -> list[Known]:
        name = eqn.primitive.name
        if site is not None:
            return self._contraction(site, eqn, ins)
        if is_read:
            return self._run(inner[0], ins)
        if name in CUSTOM and any(each is None for each in ins):
            return self._lose(eqn, ins, f"{name}, whose derivative is the function's own")
        if name in JITS or name in REMATS or name in CUSTOM:
            return self._run(inner[0], ins)
        if name == "scan":
            return self._scan(eqn, inner[0], ins)
        if name == "while":
            first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            outs = self._loop(inner[1], ins[first : first + second], ins[first + second :], [])
            self._run(inner[0], [*ins[:first], *outs])
            return outs
        if name == "cond":
            runs = [self._run(plan, ins[1:]) for plan in inner]
            return [_same(each, "is chosen by a cond") for each in zip(*runs, strict=True)]
        if name == "shard_map":
            why, sizes = "is split by a shard_map", eqn.params["mesh"].shape
            parts = [
                _obstructed(each, why) if flows.split_axes(spec, sizes) else each
                for each, spec in zip(ins, eqn.params["in_specs"], strict=True)
            ]
            return [_obstructed(out, why) for out in self._run(inner[0], parts)]
        steps = steps_of(eqn)
        if steps is not None and isinstance(ins[0], Route):
            return [ins[0].then(steps)]
        return self._lose(eqn, ins, name)

    def _lose(self, eqn: Any, ins: Sequence[Known], why: str) -> list[Known]:
        leaves: set[int] = set()
        for each in ins:
            if isinstance(each, Route):
                self._stop(each, why)
                leaves.add(each.leaf)
            elif isinstance(each, Lost):
                leaves |= each.leaves
                why = each.why if not any(isinstance(other, Route) for other in ins) else why
        return [Lost(frozenset(leaves), why)] * len(eqn.outvars)

    def _contraction(self, site: Contraction, eqn: Any, ins: list[Known]) -> list[Known]:
        weight = None if site.side is None else ins[site.side]
        if site.recipe is None or weight is None:
            if isinstance(weight, Route):
                self.stops[Stop(weight.leaf, site.operation, site.path, float_reason=site.reason)] = None
            lost = self._lose(eqn, ins, f"{site.operation} in float ({site.reason})")
            return lost if all(each is not None for each in ins) else [None] * len(eqn.outvars)
        self.weights[site] = weight
        if isinstance(weight, Route) and weight.obstacle:
            self._stop(weight, f"{site.operation} after it {weight.obstacle}", site.path, is_obstructed=True)
        return [None] * len(eqn.outvars)

    def _scan(self, eqn: Any, plan: Plan, ins: list[Known]) -> list[Known]:
        consts, carries = scan_counts(eqn.params)
        length = eqn.params["length"]

        def enter(each: Known) -> Known:
            return dataclasses.replace(each, scans=(*each.scans, length)) if isinstance(each, Route) else each

        slices = [enter(each) for each in ins[consts + carries :]]
        outs = self._loop(plan, ins[:consts], ins[consts : consts + carries], slices)
        return [*outs[:carries], *(_obstructed(each, "was stacked by a scan") for each in outs[carries:])]

    def _loop(self, plan: Plan, consts: list[Known], carry: list[Known], slices: list[Known]) -> list[Known]:
        while True:
            outs = self._run(plan, [*consts, *carry, *slices])
            new = [_same(pair, "is carried by a loop") for pair in zip(carry, outs, strict=False)]
            if new == carry:
                return [*carry, *outs[len(carry) :]]
            carry = new


def _same(ways: Sequence[Known], what: str) -> Known:
    """Join what is known of one value: a route where all ways are the same one."""
    if all(each == ways[0] for each in ways):
        return ways[0]
    leaves: set[int] = set()
    for each in ways:
        leaves |= {each.leaf} if isinstance(each, Route) else each.leaves if isinstance(each, Lost) else set()
    return Lost(frozenset(leaves), what) if leaves else None


def _obstructed(known: Known, what: str) -> Known:
    return dataclasses.replace(known, obstacle=known.obstacle or what) if isinstance(known, Route) else known


def weights_of(plan: Plan, leaves: Sequence[Any]) -> Callable[[Contraction], Array]:
    """Return a function that makes a contraction's weight as its op reads it, the axes of its scans in front.

    Raises (the function):
      NotImplementedError: the weight is more than moved elements of one leaf.
      TypeError: the leaf is a shape alone.
    """
    routes: list[Routes] = []

    def weight(site: Contraction) -> Array:
        routes[:] = routes or [Routes(plan, len(leaves))]
        route, what = routes[0].weights[site], f"weight_sparsity_start_step 0 at {site.path!r}"
        if isinstance(route, Lost) or route.obstacle:
            why = route.why if isinstance(route, Lost) else route.obstacle
            raise NotImplementedError(
                f"{what}, whose first mask is made of a weight that is not one parameter ({why}); begin at step 1"
            )
        leaf = leaves[route.leaf]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"{what} makes its first mask of the weight, and init got a shape; give it the parameters")
        return route.on_array(leaf)

    return weight


def check_sparsity(plan: Plan, leaves: int) -> None:
    """Refuse N:M sparsity of a weight that is read in two layouts: it has one mask.

    Raises:
      NotImplementedError: names the layer.
    """
    if not any(site.recipe is not None and site.recipe.sparsity is not None for site in plan.chosen):
        return
    layouts: dict[Key, Any] = {}
    for site, weight in Routes(plan, leaves).weights.items():
        layout = weight, site.weight_axes
        assert site.recipe is not None
        if site.recipe.sparsity is not None and layouts.setdefault(site.key, layout) != layout:
            raise NotImplementedError(
                f"weight_sparsity at {site.path!r}, whose weight is read in two layouts and has one mask; leave it "
                "dense by a rule"
            )
