"""Analysis: one reading of a jaxpr that says, for each contraction, which parameters one of its operands is made of.

Values are followed through jit, remat, scan, while, cond, shard_map and the primal functions of custom derivatives. A
loop's body is read until what is known of its carry no longer changes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxquant.core.delayed import OBSERVE
from jaxquant.kernels import CALLS
from jaxquant.kernels.platforms import UNLESS_SHARDED
from jaxquant.trace import flow as flows
from jaxquant.trace.flow import CONSTANT, DATA, Derived, Flow, Leaf, Route
from jaxquant.trace.paths import Name, layer_names, layer_path
from jaxquant.trace.plan import CONTRACTIONS, OPERATIONS, Contraction, Plan, scan_counts
from jaxquant.trace.reach import Place, out_of_reach
from jaxquant.trace.registry import CUSTOM, function_name, how_to_register, own_program, registered_program
from jaxquant.trace.structure import steps_of

JITS = frozenset({"jit", "pjit", "closed_call", "core_call", UNLESS_SHARDED})
REMATS = frozenset({"checkpoint", "remat", "remat2"})
_RANKING = frozenset({"top_k", "argmax", "sort", "approx_top_k"})
_PICKING = frozenset({"gather", "dynamic_slice"})
_ALIKE = frozenset({"convert_element_type", "sharding_constraint"})
"""What each layer does to a tensor before it contracts it; with equal parameters it makes equal tensors of one."""
_MIXING = frozenset({"mul", "div", "select_n"})
"""Operations after which a matrix that met data is no weight any more, in a way worth a word; a bias is added."""
_ADDING = frozenset({"add", "sub", "max", "min", "pow", "dynamic_update_slice"})
"""Others, of which the reason of a contraction tells where the matrix is as large as what was made of it."""
_OF_PARAMETERS = "both operands are made of parameters alone"
_WITH_PRODUCT = "one operand is a product of parameters (as learned queries are), which is no weight"


class OtherUse(NamedTuple):
    """An operation that reads a leaf and neither moves its elements nor is its quantized contraction.

    Attributes:
      leaf: which.
      operation: primitive, or what else reads it.
      site: the contraction of the leaf that it is, if any: in float, or one that would read the converted kernel well,
        but the kernel cannot be made of what it reads.
    """

    leaf: int
    operation: str
    site: Contraction | None = None


class Analysis:
    """Read a closed jaxpr whose first inputs are the leaves of the parameters, and whose others are data.

    Args:
      closed: the jaxpr.
      names: path of every leaf.
      shapes: shape of every leaf.
      root_is_layer: as in ``paths.layer_names``.
      inputs: what is known of every input, where that is another: of a whole training step, names and shapes being
        those of all its inputs. Parameters that a loop carries are its parameters then, though it trains them.

    Attributes:
      plan: what was found.
      found: every contraction by the index of its equation at each level of nesting.
      looked_up: indices of leaves from which data picks rows: tables of embeddings.
      mixed: indices of leaves that were contracted after data was mixed into them: under a norm that data estimates.
      is_decided: whether the recipe of every contraction is set.
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
        self._readers: list[tuple[int, str | Contraction]] = []
        jaxpr = closed.jaxpr
        known = list(inputs or [Flow(frozenset({Leaf(index)}), route=Route(index)) for index in range(len(names))])
        known += [DATA] * (len(jaxpr.invars) - len(known))
        self.plan, outs = self._run(jaxpr, known, Place())
        self._lose(outs, "the function returns it")

    def stops(self) -> Iterator[OtherUse]:
        """Return every reader of a leaf that cannot read a converted kernel in its place, after decisions."""
        for leaf, reader in self._readers:
            if isinstance(reader, str):
                yield OtherUse(leaf, reader)
            elif reader.recipe is None:
                yield OtherUse(leaf, reader.operation, reader)
            elif isinstance(reader.route, Route) and reader.route.obstacle:
                yield OtherUse(leaf, f"{reader.operation} after it {reader.route.obstacle}", reader)

    def path(self, leaves: Sequence[int]) -> str:
        """Return the layer's path of a weight made of these leaves."""
        return layer_path(self._layers[leaf] for leaf in leaves)

    def shapes_beside(self, leaf: Leaf) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a leaf and of those beside it by name, in one step of the scans that slice it."""
        shapes = zip(self._names, self._shapes, strict=True)
        module = self._names[leaf.index][:-1]
        return {name[-1]: shape[len(leaf.stack) :] for name, shape in shapes if name and name[:-1] == module}

    def weight_path(self, leaves: Sequence[int], size: int) -> str:
        """Return the path of a weight of a size, stacks of it included: that of the one leaf of its size, or of all."""
        fits = [index for index in leaves if math.prod(self._shapes[index]) == size]
        return self.path(fits if len(fits) == 1 else leaves)

    def is_part(self, site: Contraction) -> bool:
        """Whether a weight is smaller than the largest leaf that it is made of."""
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
            # Tables hold what was observed of all layers: no operand is made of a weight because its history is.
            return [CONSTANT] * len(outs) if self._is_step and eqn.params.get("name") == OBSERVE else outs
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shards}.get(name)
        if special is not None:
            plan.inner[index], outs = special(eqn, ins, place)
            return outs
        if name == "optimization_barrier":
            lost = self._lose(ins, name) if len(ins) > 1 else None
            return ins if lost is None else [dataclasses.replace(each, route=lost) for each in ins]
        program = registered_program(eqn)
        if program is not None:
            plan.programs[index] = program
            place = dataclasses.replace(place, opened=function_name(eqn))
        elif name in CUSTOM:
            what = f"inside {name} of {function_name(eqn)!r}"
            why = f"{what}, whose derivative is the function's own; {how_to_register()}"
            program, place = own_program(eqn), dataclasses.replace(place, closed=place.closed or why, opened="")
            if program is not None and any(each.route is None for each in ins):
                lost = self._lose(ins, f"{name}, whose derivative is the function's own")
                body, outs = self._run(program, [dataclasses.replace(each, route=None) for each in ins], place)
                plan.inner[index] = [body]
                return [dataclasses.replace(each, route=lost) for each in outs]
        if program is not None:
            body, outs = self._run(program, ins, place)
            plan.inner[index] = [body]
            return outs
        self._note_closed(plan, index, eqn, ins, place)
        whole = ins[0].route if ins else None
        is_whole = name == "all_gather" and eqn.params["tiled"] and eqn.params["axis_index_groups"] is None
        if is_whole and isinstance(whole, Route):
            names = eqn.params["axis_name"]
            return [
                flows.gathered(
                    ins[0], eqn.params["all_gather_dimension"], (names,) if isinstance(names, str) else tuple(names)
                )
            ]
        if isinstance(whole, Route) and (steps := steps_of(eqn)) is not None:
            route = whole.then(*steps)
        else:
            site = plan.sites.get(index)
            route = self._lose(ins, name if site is None else f"{name} in float ({site.reason})")
        out = dataclasses.replace(self._plain(eqn, ins), route=route)
        # What a mutable reference holds is written later, by anybody: data.
        return [dataclasses.replace(out, leaves=None) if hasattr(v.aval, "inner_aval") else out for v in eqn.outvars]

    # -- programs in programs ----------------------------------------------------------------------------------------

    def _scan(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        consts, carries = scan_counts(eqn.params)
        level = place.level + 1
        within = dataclasses.replace(place, level=level)
        slices = [flows.enter_scan(each, level, eqn.params["length"]) for each in ins[consts + carries :]]
        body, outs = self._loop(eqn.params["jaxpr"], ins[:consts], ins[consts : consts + carries], slices, within)
        made = [flows.obstruct(each, "was stacked by a scan") for each in outs[carries:]]
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
        """Read a loop's body until what is known of its carry stays. Returns the carry and what it stacks."""
        noted, first = (len(self._readers), set(self.looked_up), set(self.mixed)), carry
        while True:
            # What was noted with less known of the carry, as zeros that it begins with, is taken back.
            del self._readers[noted[0] :]
            self.looked_up, self.mixed = set(noted[1]), set(noted[2])
            body, outs = self._run(jaxpr, [*consts, *carry, *slices], place)
            new = [
                each if self._is_trained(each, var.aval) else flows.either((each, out), "is carried by a loop")
                for each, out, var in zip(carry, outs, open_jaxpr(jaxpr).invars[len(consts) :], strict=False)
            ]
            if new == carry:
                for ways in zip(first, outs, carry, strict=False):
                    self._lose_unlike(ways, "a loop that changes it")
                return body, [*carry, *outs[len(carry) :]]
            carry = new

    def _lose_unlike(self, ways: Sequence[Flow], why: str) -> None:
        """Note that leaves are read whose routes part: the last of ``ways`` is what is known of all others together."""
        if any(each.route != ways[-1].route for each in ways):
            self._lose(ways, why)

    def _closure(self, aval: Any) -> Flow:
        """Describe an array that the function closes over; integers and scalars are constants like others."""
        if math.prod(getattr(aval, "shape", ())) <= 1 or not jnp.issubdtype(aval.dtype, jnp.floating):
            return CONSTANT
        return DATA if self._is_step else Flow(is_closure=True)

    def _is_trained(self, flow: Flow, aval: Any) -> bool:
        """Whether a loop of training steps carries a parameter: a leaf, whole."""
        indices = {leaf.index for leaf in flow.leaves or ()}
        return self._is_step and len(indices) == 1 and tuple(aval.shape) == tuple(self._shapes[min(indices)])

    def _cond(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        runs = [self._run(branch, ins[1:], place.branch(n)) for n, branch in enumerate(eqn.params["branches"])]
        outs = []
        for ways in zip(*(outs for _, outs in runs), strict=True):
            outs.append(flows.either(ways, "is chosen by a cond"))
            self._lose_unlike([*ways, outs[-1]], "a cond that chooses it")
        if ins[0].is_data:
            outs = [self._met_data(each, [each]) for each in outs]
        return [plan for plan, _ in runs], outs

    def _shards(self, eqn: Any, ins: list[Flow], place: Place) -> tuple[list[Plan], list[Flow]]:
        sizes = eqn.params["mesh"].shape
        parts = [flows.enter_shards(each, spec, sizes) for each, spec in zip(ins, eqn.params["in_specs"], strict=True)]
        body, outs = self._run(eqn.params["jaxpr"], parts, place)
        return [body], [flows.leave_shards(each, ins) for each in outs]

    def _lose(self, ins: Sequence[Flow], why: str) -> Derived | None:
        """Note that an operation reads leaves that come to it whole; returns the route of what it makes."""
        leaves, routes = set[int](), [each.route for each in ins]
        for each in routes:
            if isinstance(each, Route):
                self._readers.append((each.leaf, why))
                leaves.add(each.leaf)
            elif each is not None:
                leaves |= each.leaves
                why = why if any(isinstance(other, Route) for other in routes) else each.why
        return Derived(frozenset(leaves), why) if leaves else None

    def _note_closed(self, plan: Plan, index: int, eqn: Any, ins: list[Flow], place: Place) -> None:
        """Note a program that cannot be opened, where a parameter goes into it and may be multiplied there."""
        weights = [each for each in ins if each.is_weight]
        name = eqn.primitive.name
        is_matrix = any(each.is_weight and atom.aval.ndim > 1 for each, atom in zip(ins, eqn.invars, strict=True))
        is_foreign = ("callback" in name and name != "debug_callback") or (name == "ffi_call" and is_matrix)
        is_product = "dot_general" in name or any(map(_multiplies, programs(eqn.params)))  # also of sparse matrices
        if not weights or not (is_foreign or is_product):
            return
        site = self.found.setdefault(place.context, Contraction(name, "/".join(place.scopes)))
        self._name(site, flows.join(weights).leaves or frozenset())
        site.is_out_of_reach = True
        site.reason = f"handed to {name}, which computes outside of jax" if is_foreign else f"inside {name}"
        if name == "pallas_call":
            site.reason += f" of {function_name(eqn)!r}; {how_to_register()}"
        elif kernel := _kernel_name(eqn):
            site.reason = f"inside the kernel {kernel!r} of Mosaic GPU"
        plan.sites[index] = site

    # -- equations ---------------------------------------------------------------------------------------------------

    def _plain(self, eqn: Any, ins: list[Flow]) -> Flow:
        name, out = eqn.primitive.name, flows.join(ins)
        if out.is_product and out.leaves:
            out = self._met_product(out, eqn.outvars[0].aval)
        if name in _RANKING:
            for site in out.marked("result"):
                site.is_ranked = True
        elif name == "exp":
            return flows.with_marks(out, "exp", out.marked("result"))
        elif name in ("reduce_sum", "psum"):
            return flows.with_marks(out, "sum", out.marked("exp"))
        elif name == "log":
            for site in out.marked("sum"):
                site.is_normalized = True
        elif name == "div":
            for site in ins[0].marked("exp") & ins[1].marked("sum"):
                site.is_normalized = True
        if out.is_data and name in _MIXING:
            return self._met_data(out, ins)
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

    def _met_product(self, out: Flow, aval: Any) -> Flow:
        """Describe a value that is made of parameters and a product of others: a weight where it is a leaf, changed.

        The update of a kernel is as large as that is. A bias or a scale is smaller than the product that it is put on.
        """
        size, rank = math.prod(getattr(aval, "shape", ())), len(getattr(aval, "shape", ()))
        shapes = {leaf: self._shapes[leaf.index][len(leaf.stack) :] for leaf in out.leaves or ()}
        kept = frozenset(leaf for leaf, own in shapes.items() if math.prod(own) >= size and len(own) >= rank)
        return dataclasses.replace(out, leaves=kept, is_product=not kept)

    def _met_data(self, out: Flow, ins: Sequence[Flow]) -> Flow:
        """Describe a value in which data was mixed into parameters, or chose between them."""
        met = {(leaf.index, self._rank(leaf)) for each in ins for leaf in each.leaves or ()}
        return dataclasses.replace(out, leaves=None, picked=out.picked | met)

    def _rank(self, leaf: Leaf) -> int:
        return sum(size > 1 for size in self._shapes[leaf.index][len(leaf.stack) :])

    def _name(self, site: Contraction, leaves: frozenset[Leaf], size: int = -1) -> None:
        """Set the leaves of a weight and the path of its layer: that of the one leaf of its size, or of them all."""
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
        site.side, site.route, site.is_out_of_reach, site.reason = None, None, False, ""
        site.names, site.leaves, site.stack = (), frozenset(), ()
        result = Flow(out.leaves, out.is_closure, out.after, is_product=out.is_product)
        if not any(each.is_weight for each in operands):
            self._explain_no_weight(site, operands, place)
            return self._lost_in(site, ins, result)
        if all(each.is_weight for each in operands):
            self._name(site, out.leaves or frozenset())
            site.reason = _OF_PARAMETERS
            # No weight any more: learned queries times keys are attention scores, kernel + a · b is the kernel's layer.
            return self._lost_in(site, ins, dataclasses.replace(result, leaves=frozenset(), is_product=True))
        side = 0 if operands[0].is_weight else 1
        weight, other = operands[side], operands[1 - side]
        assert weight.leaves is not None
        self._name(site, weight.leaves, math.prod(site.shapes[side]))
        if not other.is_data:
            if other.is_product:
                site.reason = _OF_PARAMETERS
                return self._lost_in(site, ins, dataclasses.replace(result, leaves=frozenset()))
            site.reason = "its other operand is constant"
            if other.is_closure:
                site.is_out_of_reach = True
                site.reason = "its other operand is an array that the function closes over; make that an argument"
            return self._lost_in(site, ins, result)
        site.side, site.route = side, weight.route
        if isinstance(weight.route, Route):
            self._readers.append((weight.route.leaf, site))
        self._describe_weight(site, eqn, side)
        site.reason = out_of_reach(site, eqn, place)
        site.is_out_of_reach = bool(site.reason)
        if place.is_backward:
            return Flow(None, out.is_closure)
        for before in other.after:
            before.is_followed = True
        return Flow(None, out.is_closure, frozenset({site}), frozenset({("result", site)}))

    def _lost_in(self, site: Contraction, ins: Sequence[Flow], result: Flow) -> Flow:
        """Describe the result of a contraction that stays in float, whatever rules say."""
        lost = self._lose(ins, f"{site.operation} in float ({site.reason})")
        return dataclasses.replace(result, route=lost if all(each.route for each in ins) else None)

    def _explain_no_weight(self, site: Contraction, operands: Sequence[Flow], place: Place) -> None:
        met = [index for each in operands for index, rank in each.picked if rank > 1]
        if met:
            self.mixed.update(() if place.closed or place.is_backward else met)
            site.names = tuple(sorted({"/".join(self._names[index]) for index in met}))
            site.path = self.path(sorted(set(met)))
            site.is_out_of_reach = True
            site.reason = "its parameter was mixed with data, or picked by it, before the contraction"
        else:
            site.path = site.scope
            is_product = any(each.is_product for each in operands)
            site.reason = _WITH_PRODUCT if is_product else "no operand is made of parameters alone"
            if any(each.is_closure and not each.is_data for each in operands):
                site.reason = "an operand is an array that the function closes over; make that a parameter"
            if added := {"/".join(self._names[index]) for each in operands for index, rank in each.picked if rank < 0}:
                site.reason += f" (made of {', '.join(map(repr, sorted(added)))} and data)"

    def _describe_weight(self, site: Contraction, eqn: Any, side: int) -> None:
        """Set the batch axes and the number of outputs."""
        shape = site.shapes[side]
        if site.operation == "conv_general_dilated":
            feature = eqn.params["dimension_numbers"].rhs_spec[0]
            site.batch, site.out_features = (), shape[feature]
            site.weight_axes = tuple(axis for axis in range(len(shape)) if axis != feature), ()
            return
        if site.operation == "dot_general":
            groups, numbers = (), eqn.params["dimension_numbers"]
        else:
            ragged = eqn.params["ragged_dot_dimension_numbers"]
            groups, numbers = tuple(ragged.rhs_group_dimensions), ragged.dot_dimension_numbers
        contract, batch = (tuple(axes[side]) for axes in numbers)
        site.weight_axes = contract, (*groups, *batch)
        site.batch = tuple(shape[axis] for axis in (*groups, *batch))
        self._split_batch(site, shape)
        site.out_features = math.prod(n for axis, n in enumerate(shape) if axis not in (*groups, *contract, *batch))

    def _split_batch(self, site: Contraction, shape: Sequence[int]) -> None:
        """Set which mesh axes split each batch axis of a weight, None where that is not known, and the whole sizes."""
        route, batch = site.route, site.weight_axes[1]
        if not isinstance(route, Route):
            site.split = None if batch and any(leaf.split for leaf in site.leaves) else ()
            return
        found = route.by_batch(batch, (axis for axis, n in enumerate(shape) if n > 1 and axis not in batch))
        if not found or not any(found):
            site.split = None if found is None else ()
            return
        site.split = tuple(tuple(name for each in own for name in each.names) for own in found)
        site.batch = tuple(n * math.prod(each.parts for each in own) for n, own in zip(site.batch, found, strict=True))
        if route.obstacle == flows.SHARDED and sum(map(len, found)) == len(route.splits):
            site.route = dataclasses.replace(route, obstacle="")  # a whole leaf is converted expert by expert, too


def _multiplies(jaxpr: Any) -> bool:
    known = (*CONTRACTIONS, "wgmma", "wgmma_ref", "mma", "tcgen05_mma")  # those of Mosaic GPU's kernels
    return any(eqn.primitive.name in known or any(map(_multiplies, programs(eqn.params))) for eqn in jaxpr.eqns)


def _kernel_name(eqn: Any) -> str:
    """Return the name of the kernel that an equation calls, as Mosaic GPU does in a ``custom_vmap``; "" for none."""
    if eqn.primitive.name in CALLS:
        return str(eqn.params["name"])
    inner = open_jaxpr(eqn.params["call"]).eqns if eqn.primitive.name == "custom_vmap_call" else ()
    return next(filter(None, map(_kernel_name, inner)), "")


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the open jaxpr of one that may be closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def called(eqn: Any) -> Any:
    """Return the program of a jit or a remat."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def programs(params: dict[str, Any]) -> Iterator[Any]:
    """Return the open jaxprs among a primitive's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(open_jaxpr(item), "eqns"):
                yield open_jaxpr(item)
