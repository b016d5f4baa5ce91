"""Dataflow analysis of a jaxpr: for each contraction, the parameters that its weight operand is computed from.

The analysis follows values through jit, remat, scan, while, cond, shard_map and the primal functions of custom
derivatives. It repeats the body of a loop until the facts about its carry reach a fixed point.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxquant.core.delayed import OBSERVE
from jaxquant.trace import flow as flows
from jaxquant.trace.flow import CONSTANT, DATA, Flow, Leaf, Route
from jaxquant.trace.jaxprs import JITS, REMATS, called, open_jaxpr, scan_counts
from jaxquant.trace.paths import Name, layer_names, layer_path
from jaxquant.trace.plan import OPERATIONS, Contraction, Plan
from jaxquant.trace.reach import Place, no_float_matmul, out_of_reach, unreachable_product
from jaxquant.trace.readers import Readers
from jaxquant.trace.registry import CUSTOM, function_name, how_to_register, registered_program
from jaxquant.trace.structure import steps_of
from jaxquant.trace.weights import describe_weight

_PICKING = frozenset({"gather", "dynamic_slice"})
_ALIKE = frozenset({"convert_element_type", "sharding_constraint"})
"""Primitives that layers apply to an input before its contraction; with equal params, their results are equal."""
_MIXING = frozenset({"mul", "div", "select_n"})
"""Primitives that turn a matrix into data if another input is data. Not additions, which also add a bias."""
_ADDING = frozenset({"add", "sub", "max", "min", "pow", "dynamic_update_slice"})
"""Additive primitives; the report names a parameter only if it has the shape of the result."""
_MIN_VOCABULARY = 16
"""Minimum number of rows of an embedding table that can belong to a vocabulary."""
_OF_PARAMETERS = "both inputs are computed only from parameters"
_WITH_PRODUCT = "one input is a product of parameters (such as learned queries), and a product is not a weight"


class Analysis:
    """Analysis of a closed jaxpr whose first inputs are the parameter leaves; all other inputs are data.

    Args:
      closed: closed jaxpr.
      names: path of each leaf.
      shapes: shape of each leaf.
      inputs: flow of each input, if the first inputs are not simply the leaves. Used for a whole training step, where
        ``names`` and ``shapes`` describe all inputs; a parameter that a loop carries then stays a parameter, although
        the loop updates it.
      root_is_layer: see ``paths.layer_names``.

    Attributes:
      plan: plan of the outermost jaxpr.
      found: all contractions, keyed by the equation index at each level of nesting.
      looked_up: indices of leaves whose rows are selected by data, such as embedding tables.
      readers: readers of the leaves.
      mixed: indices of leaves that were combined with data before a contraction, such as a kernel normalized by data.
      is_decided: whether every contraction has its recipe.
    """

    def __init__(
        self,
        closed: Any,
        names: Sequence[Name],
        shapes: Sequence[tuple[int, ...]],
        inputs: Sequence[Flow] | None = None,
        *,
        root_is_layer: bool = False,
    ) -> None:
        paths = collections.Counter("/".join(name) for name in names)
        if inputs is None and (twice := next((path for path, count in paths.items() if count > 1), None)) is not None:
            raise ValueError(f"two parameters have the path {twice!r}; rename one of them")
        self._names, self._layers, self._shapes = names, layer_names(names, root_is_layer), shapes
        self._is_step = inputs is not None
        self.found: dict[tuple[int, ...], Contraction] = {}
        self.looked_up: set[int] = set()
        self.mixed: set[int] = set()
        self.is_decided = False
        self.readers = Readers()
        jaxpr = closed.jaxpr
        known = list(inputs or [Flow(frozenset({Leaf(index)}), route=Route(index)) for index in range(len(names))])
        known += [DATA] * (len(jaxpr.invars) - len(known))
        self.plan, outs = self._run(jaxpr, known, Place())
        self.readers.record(outs, "the output of the function")

    def path(self, leaves: Sequence[int]) -> str:
        """Return the layer path of a weight that is computed from these leaves."""
        return layer_path(self._layers[leaf] for leaf in leaves)

    def module_shapes(self, leaf: Leaf) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all leaves in the module of a leaf, by name, without the axes that scans slice."""
        shapes = zip(self._names, self._shapes, strict=True)
        module = self._names[leaf.index][:-1]
        return {name[-1]: shape[len(leaf.stack) :] for name, shape in shapes if name and name[:-1] == module}

    def is_probably_head(self, sites: Sequence[Contraction]) -> bool:
        """Whether a layer is the last layer and has an output for each row of an embedding table.

        A small table, such as a table of token types, does not count, because a classifier can have as many classes. A
        size that is also the width of a table does not count, because most layers of a model have this size.

        Args:
          sites: all contractions of the layer.
        """
        tables = [self._shapes[index] for index in self.looked_up if len(self._shapes[index]) == 2]
        sizes = {rows for rows, _ in tables if rows >= _MIN_VOCABULARY} - {width for _, width in tables}
        return all(site.out_features in sizes and not site.is_followed for site in sites)

    def weight_path(self, leaves: Sequence[int], size: int) -> str:
        """Return the layer path of a weight, where ``size`` includes the lengths of its scans.

        If exactly one of the leaves has this size, only that leaf determines the path.
        """
        fits = [index for index in leaves if math.prod(self._shapes[index]) == size]
        return self.path(fits if len(fits) == 1 else leaves)

    def is_part(self, site: Contraction) -> bool:
        """Whether a weight is smaller than the largest leaf that it is computed from."""
        assert site.side is not None
        size = math.prod(site.shapes[site.side]) * math.prod(length for _, length in site.stack)
        return any(size < math.prod(self._shapes[leaf.index]) for leaf in site.leaves)

    def _run(self, jaxpr: Any, given: Sequence[Flow], place: Place) -> tuple[Plan, list[Flow]]:
        jaxpr = open_jaxpr(jaxpr)
        plan, known, same = Plan(jaxpr, place.level, place.opened), {}, {}
        known.update((var, self._closure(var.aval)) for var in jaxpr.constvars)
        known.update(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Flow:
            return CONSTANT if isinstance(atom, Literal) else known[atom]

        def tensor(atom: Any) -> Hashable:
            return (id(plan), id(atom)) if isinstance(atom, Literal) else same.get(atom, (id(plan), atom))

        for index, eqn in enumerate(jaxpr.eqns):
            outs = self._equation(plan, index, eqn, [read(atom) for atom in eqn.invars], place.at(index, eqn))
            known.update(zip(eqn.outvars, outs, strict=True))
            site = plan.sites.get(index)
            if eqn.primitive.name in _ALIKE:
                same[eqn.outvars[0]] = eqn.primitive.name, repr(sorted(eqn.params.items())), tensor(eqn.invars[0])
            elif site is not None and site.side is not None:
                numbers = eqn.params["dimension_numbers"] if site.operation == "dot_general" else (((), ()),)
                site.activation = tensor(eqn.invars[1 - site.side]), tuple(numbers[0][1 - site.side])
        return plan, [read(atom) for atom in jaxpr.outvars]

    def _equation(self, plan: Plan, index: int, eqn: Any, ins: list[Flow], place: Place) -> list[Flow]:
        name = eqn.primitive.name
        if (operation := OPERATIONS.get(name)) is not None:
            site = self.found.setdefault(place.context, Contraction(operation, "/".join(place.scopes)))
            site.is_einsum, site.precision = place.is_einsum, eqn.params.get("precision")
            plan.sites[index] = site
            return [self._contraction(site, eqn, ins, place)]
        if name in JITS or name in REMATS:
            is_einsum = place.is_einsum or eqn.params.get("name") == "_einsum"
            body, outs = self._run(called(eqn), ins, dataclasses.replace(place, is_einsum=is_einsum))
            plan.inner[index] = [body]
            # The tables hold observations of all layers. An operand does not depend on a weight because its history
            # does.
            return [CONSTANT] * len(outs) if self._is_step and eqn.params.get("name") == OBSERVE else outs
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shards}.get(name)
        if special is not None:
            plan.inner[index], outs = special(eqn, ins, place)
            return outs
        if name == "optimization_barrier":
            lost = self.readers.record(ins, name) if len(ins) > 1 else None
            return ins if lost is None else [dataclasses.replace(each, route=lost) for each in ins]
        program, lost = registered_program(eqn), None
        if program is not None:
            plan.programs[index] = program
            place = dataclasses.replace(place, opened=function_name(eqn))
        elif name in CUSTOM:
            why = f"inside {name} of {function_name(eqn)!r}, which has a custom derivative; {how_to_register()}"
            program, place = called(eqn), dataclasses.replace(place, closed=place.closed or why, opened="")
            if any(each.route is None for each in ins):
                lost = self.readers.record(ins, f"{name} with a custom derivative")
                ins = [dataclasses.replace(each, route=None) for each in ins]
        if program is not None:
            body, outs = self._run(program, ins, place)
            plan.inner[index] = [body]
            return [flows.through_integers(dataclasses.replace(each, route=lost or each.route)) for each in outs]
        self._record_closed(plan, index, eqn, ins, place)
        whole = ins[0].route if ins else None
        is_whole = name == "all_gather" and eqn.params["tiled"] and eqn.params["axis_index_groups"] is None
        if is_whole and isinstance(whole, Route):
            return [flows.gathered(ins[0], whole, eqn.params)]
        if isinstance(whole, Route) and (steps := steps_of(eqn)) is not None:
            route = whole.then(*steps)
        else:
            site = plan.sites.get(index)
            route = self.readers.record(ins, name if site is None else f"{name} in float ({site.reason})")
        out = dataclasses.replace(self._plain(eqn, ins), route=route)
        # A mutable reference can be written later by other code, so its contents count as data.
        return [dataclasses.replace(out, leaves=None) if hasattr(v.aval, "inner_aval") else out for v in eqn.outvars]

    # -- nested jaxprs -----------------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        consts, carries = scan_counts(eqn.params)
        level = place.level + 1
        within = dataclasses.replace(place, level=level)
        slices = [flows.enter_scan(each, level, eqn.params["length"]) for each in ins[consts + carries :]]
        body, outs = self._loop(eqn.params["jaxpr"], ins[:consts], ins[consts : consts + carries], slices, within)
        made = [flows.obstruct(each, "is stacked by a scan") for each in outs[carries:]]
        return [body], [flows.leave_scan(each, level) for each in (*outs[:carries], *made)]

    def _while(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, outs = self._loop(
            eqn.params["body_jaxpr"], ins[first : first + second], ins[first + second :], [], place.branch(1)
        )
        test, _ = self._run(eqn.params["cond_jaxpr"], [*ins[:first], *outs], place.branch(0))
        return [test, body], outs

    def _loop(
        self, jaxpr: Any, consts: list[Flow], carry: list[Flow], slices: list[Flow], place: Place
    ) -> tuple[Plan, list[Flow]]:
        """Analyze a loop body until its carry reaches a fixed point. Returns the flows of the carry and the outputs."""
        noted, first = (len(self.readers.records), set(self.looked_up), set(self.mixed)), carry
        while True:
            # Discard the records of the previous iteration, which knew less about the carry (it may start as zeros).
            del self.readers.records[noted[0] :]
            self.looked_up, self.mixed = set(noted[1]), set(noted[2])
            body, outs = self._run(jaxpr, [*consts, *carry, *slices], place)
            new = [
                each if self._is_trained(each, var.aval) else flows.either((each, out), "a loop")
                for each, out, var in zip(carry, outs, open_jaxpr(jaxpr).invars[len(consts) :], strict=False)
            ]
            if new == carry:
                for ways in zip(first, outs, carry, strict=False):
                    self.readers.record_unlike(ways, "a loop that changes the weight")
                return body, [*carry, *outs[len(carry) :]]
            carry = new

    def _closure(self, aval: Any) -> Flow:
        """Return the flow of an array that the function closes over; integers and scalars count as constants."""
        if math.prod(getattr(aval, "shape", ())) <= 1 or not jnp.issubdtype(aval.dtype, jnp.floating):
            return CONSTANT
        return DATA if self._is_step else Flow(is_closure=True)

    def _is_trained(self, flow: Flow, aval: Any) -> bool:
        """Whether a carry of a loop over training steps is a whole parameter."""
        indices = {leaf.index for leaf in flow.leaves or ()}
        return self._is_step and len(indices) == 1 and tuple(aval.shape) == tuple(self._shapes[min(indices)])

    def _cond(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        runs = [self._run(branch, ins[1:], place.branch(n)) for n, branch in enumerate(eqn.params["branches"])]
        outs = []
        for ways in zip(*(outs for _, outs in runs), strict=True):
            outs.append(flows.either(ways, "a cond"))
            self.readers.record_unlike([*ways, outs[-1]], "a cond that selects the weight")
        if ins[0].is_data:
            outs = [self._data_flow(each, [each]) for each in outs]
        return [plan for plan, _ in runs], outs

    def _shards(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        sizes = eqn.params["mesh"].shape
        parts = [flows.enter_shards(each, spec, sizes) for each, spec in zip(ins, eqn.params["in_specs"], strict=True)]
        body, outs = self._run(eqn.params["jaxpr"], parts, place)
        return [body], [flows.leave_shards(each, ins) for each in outs]

    def _record_closed(self, plan: Plan, index: int, eqn: Any, ins: list[Flow], place: Place) -> None:
        """Record a nested program that cannot be analyzed if it receives a parameter that it may multiply."""
        leaves = flows.join(each for each in ins if each.is_weight).leaves
        is_matrix = any(each.is_weight and atom.aval.ndim > 1 for each, atom in zip(ins, eqn.invars, strict=True))
        if not leaves or not (reason := unreachable_product(eqn, is_matrix)):
            return
        site = self.found.setdefault(place.context, Contraction(eqn.primitive.name, "/".join(place.scopes)))
        self._name(site, leaves)
        site.is_out_of_reach, site.reason = True, reason
        plan.sites[index] = site

    # -- equations ---------------------------------------------------------------------------------------------------

    def _plain(self, eqn: Any, ins: list[Flow]) -> Flow:
        name, out = eqn.primitive.name, flows.join(ins)
        if out.is_product and out.leaves:
            out = self._product_flow(out, eqn.outvars[0].aval)
        out = flows.mark_uses(name, ins, out)
        if out.is_data and name in _MIXING:
            return self._data_flow(out, ins)
        if out.is_data and (name in _ADDING or name.startswith("scatter")) and not self._is_step:
            leaves = {leaf for each in ins for leaf in each.leaves or ()}
            shape = tuple(eqn.outvars[0].aval.shape)
            added = {(leaf.index, -1) for leaf in leaves if self._shapes[leaf.index][len(leaf.stack) :] == shape}
            return dataclasses.replace(out, picked=out.picked | added) if len(shape) > 1 else out
        if out.is_data and name in _PICKING and ins[0].leaves:
            rank = sum(size > 1 for size in eqn.params["slice_sizes"])
            if rank <= 1:
                self.looked_up |= {leaf.index for leaf in ins[0].leaves}
            return dataclasses.replace(out, picked=out.picked | {(leaf.index, rank) for leaf in ins[0].leaves})
        return out

    def _product_flow(self, out: Flow, aval: Any) -> Flow:
        """Return the flow of a value computed from parameters and a product of parameters.

        The value is a weight if one of its leaves has at least its size and rank: a kernel plus its update is one. A
        product with a bias or a scale applied is not, because these leaves are smaller.
        """
        size, rank = math.prod(getattr(aval, "shape", ())), len(getattr(aval, "shape", ()))
        shapes = {leaf: self._shapes[leaf.index][len(leaf.stack) :] for leaf in out.leaves or ()}
        kept = frozenset(leaf for leaf, own in shapes.items() if math.prod(own) >= size and len(own) >= rank)
        return dataclasses.replace(out, leaves=kept, is_product=not kept)

    def _data_flow(self, out: Flow, ins: Sequence[Flow]) -> Flow:
        """Return the flow of a value in which parameters were combined with data, or selected by it."""
        met = {(leaf.index, self._rank(leaf)) for each in ins for leaf in each.leaves or ()}
        return dataclasses.replace(out, leaves=None, picked=out.picked | met)

    def _rank(self, leaf: Leaf) -> int:
        return sum(size > 1 for size in self._shapes[leaf.index][len(leaf.stack) :])

    def _name(self, site: Contraction, leaves: frozenset[Leaf], size: int = -1) -> None:
        """Set the leaves, names, scan stack and layer path of a contraction; see ``weight_path`` for ``size``."""
        site.leaves = leaves
        indices = sorted({leaf.index for leaf in leaves})
        site.names = tuple("/".join(self._names[index]) for index in indices)
        site.stack = tuple(sorted({each for leaf in leaves for each in leaf.stack}))
        site.path = self.weight_path(indices, size * math.prod(length for _, length in site.stack))

    def _contraction(self, site: Contraction, eqn: Any, ins: list[Flow], place: Place) -> Flow:
        operands, out = ins[:2], flows.join(ins)
        site.shapes = tuple(tuple(atom.aval.shape) for atom in eqn.invars[:2])
        first, second = (atom.aval.dtype for atom in eqn.invars[:2])
        site.dtype = first.name if first == second else ""
        site.is_float_matmul = not no_float_matmul(eqn)
        site.side, site.route, site.is_out_of_reach, site.reason = None, None, False, ""
        site.names, site.leaves, site.stack = (), frozenset(), ()
        result = Flow(out.leaves, out.is_closure, out.after, is_product=out.is_product)
        if not any(each.is_weight for each in operands):
            self._explain_no_weight(site, operands, place)
            return self._float_result(site, ins, result)
        if all(each.is_weight for each in operands):
            self._name(site, out.leaves or frozenset())
            site.reason = _OF_PARAMETERS
            # The product is not a weight: learned queries times keys are attention scores, and kernel + a · b belongs
            # to the kernel's layer.
            return self._float_result(site, ins, dataclasses.replace(result, leaves=frozenset(), is_product=True))
        side = 0 if operands[0].is_weight else 1
        weight, other = operands[side], operands[1 - side]
        assert weight.leaves is not None
        self._name(site, weight.leaves, math.prod(site.shapes[side]))
        if not other.is_data:
            if other.is_product:
                site.reason = _OF_PARAMETERS
                return self._float_result(site, ins, dataclasses.replace(result, leaves=frozenset()))
            site.reason = "the other input of the matmul is a constant"
            if other.is_closure:
                site.is_out_of_reach = True
                site.reason = "the other input is an array that the function closes over; pass the array as an argument"
            return self._float_result(site, ins, result)
        site.side, site.route = side, weight.route
        if isinstance(weight.route, Route):
            self.readers.records.append((weight.route.leaf, site))
        describe_weight(site, eqn)
        site.reason = out_of_reach(site, eqn, place)
        site.is_out_of_reach = bool(site.reason)
        if place.is_backward:
            return Flow(None, out.is_closure)
        for before in other.after:
            before.is_followed = True
        return Flow(None, out.is_closure, frozenset({site}), frozenset({("result", site)}))

    def _float_result(self, site: Contraction, ins: Sequence[Flow], result: Flow) -> Flow:
        """Return the flow of the result of a contraction that stays in float under all rules."""
        lost = self.readers.record(ins, f"{site.operation} in float ({site.reason})")
        return dataclasses.replace(result, route=lost if all(each.route for each in ins) else None)

    def _explain_no_weight(self, site: Contraction, operands: Sequence[Flow], place: Place) -> None:
        met = [index for each in operands for index, rank in each.picked if rank > 1]
        if met:
            self.mixed.update(() if place.closed or place.is_backward else met)
            site.names = tuple(sorted({"/".join(self._names[index]) for index in met}))
            site.path = self.path(sorted(set(met)))
            site.is_out_of_reach = True
            site.reason = "the parameter is combined with data, or selected by data, before the contraction"
        else:
            site.path = site.scope
            is_product = any(each.is_product for each in operands)
            site.reason = _WITH_PRODUCT if is_product else "neither input is computed only from parameters"
            if any(each.is_closure and not each.is_data for each in operands):
                site.reason = "one input is an array that the function closes over; pass the array as a parameter"
            if added := {"/".join(self._names[index]) for each in operands for index, rank in each.picked if rank < 0}:
                site.reason += f" (one input is computed from {', '.join(map(repr, sorted(added)))} and data)"
