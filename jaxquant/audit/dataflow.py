"""Graph of the values of a traced function, including the values in nested functions, loops and branches.

An operand of a matmul may come from values (a parameter, a division by a scale, a reduction) outside its jitted
function, scan or rematerialized block. In the graph, each variable of each jaxpr becomes a ``Value`` that refers to the
values it was computed from, and each contraction becomes a ``Contraction`` that records its location in the program.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxquant.core.delayed import OBSERVE
from jaxquant.kernels import CALLS, KERNEL_PREFIX
from jaxquant.ops.gradients import REVERSE_ONLY
from jaxquant.trace.jaxprs import JITS, REMATS, open_jaxpr, programs, scan_counts
from jaxquant.trace.plan import OPERATIONS
from jaxquant.trace.registry import CUSTOM
from jaxquant.trace.report import Decided

_CALLS = JITS | REMATS | CUSTOM | {"composite"}
"""Primitives with one inner program that has the operands and results of the primitive, in the same order."""

_HIDDEN = tuple(os.path.dirname(folder) + os.sep for folder in (jax.__file__, os.path.dirname(__file__)))
"""Folders whose frames are skipped in tracebacks."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """Array of the program.

    Attributes:
      operation: name of the primitive that computed the value, or "argument" or "constant". Loops add "scan_slice" (one
        step's part of an input), "scan_carry" (computed from the initial value and the last step's value),
        "scan_stack" (one step's results, stacked) and "scan_result" (the last step's carry). ``shard_map`` adds "shard"
        and "unshard", ``cond`` adds "branch", and the inputs of a kernel are "unknown".
      inputs: values from which this value was computed.
      shape: shape of the array.
      dtype: name of the dtype.
      position: index of the value in the results of the primitive, or in the arguments.
      name: for an argument, its path in the tree of arguments; otherwise ().
      params: params of the primitive.
      conditions: values that select this value (branch index, loop test), and contractions inside its primitive if the
        dependence on them is unknown. Conditions are not ``inputs``, because no operand is computed from them.
    """

    operation: str
    inputs: tuple[Value, ...]
    shape: tuple[int, ...]
    dtype: str
    position: int = 0
    name: tuple[str, ...] = ()
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conditions: tuple[Value, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Location of an equation in a program.

    Attributes:
      scopes: parts of the name scopes, outermost first.
      is_backward: whether the equation is part of a backward pass.
      times: number of executions in one call of the function, over all shards of a ``shard_map`` and over the grid of a
        kernel. The body of a ``while`` and each branch of a ``cond`` count as one execution.
      context: index of the equation on each level of nesting, as in ``trace.analysis``.
      kernel: primitive of the enclosing kernel, or "".
      decided: decisions for the layers of the enclosing quantized model, or None.
    """

    scopes: tuple[str, ...] = ()
    is_backward: bool = False
    times: int = 1
    context: tuple[int, ...] = ()
    kernel: str = ""
    decided: Decided | None = None

    def of_equation(self, index: int, eqn: Any) -> Location:
        scopes, is_backward, decided = list(self.scopes), self.is_backward, self.decided
        for each in eqn.source_info.name_stack.stack:
            if type(each).__name__ == "Scope":
                scopes += each.name.split("/")
            is_backward |= type(each).__name__ == "Transform" and each.name == "transpose"
            decided = each if isinstance(each, Decided) else decided
        context = (*self.context, index)
        return dataclasses.replace(
            self, scopes=tuple(scopes), is_backward=is_backward, context=context, decided=decided
        )

    def repeated(self, times: int, kernel: str = "") -> Location:
        return dataclasses.replace(self, times=self.times * times, kernel=kernel or self.kernel)

    def branch(self, number: int) -> Location:
        return dataclasses.replace(self, context=(*self.context, number))


@dataclasses.dataclass(eq=False, slots=True)
class Contraction:
    """Matmul or convolution of the program.

    Attributes:
      operation: primitive, one of ``CONTRACTIONS``, or "pallas_call" inside a kernel.
      lhs, rhs, out: operands and result; inside a kernel, blocks of the operands and of the result.
      location: location of the equation in the program.
      flops: multiplications and additions of one execution.
      is_outer: whether the contraction is an outer product, without a contracted axis.
      source: file, line and function of the caller.
      is_read: whether an output or a side effect needs the result. A function that returns only gradients may not need
        the result of a forward matmul.
    """

    operation: str
    lhs: Value
    rhs: Value
    out: Value
    location: Location
    flops: int
    is_outer: bool
    source: str
    is_read: bool = True


def ancestors(
    values: Iterable[Value], stop: Callable[[Value], bool] = lambda _: False, *, with_conditions: bool = False
) -> dict[Value, None]:
    """Return values and all values that they were computed from.

    Args:
      values: start of the search.
      stop: predicate; the search stops at values for which it is true.
      with_conditions: whether to follow ``conditions`` in addition to ``inputs``.

    Returns:
      All values that were reached, including the start, in the order of the search.
    """
    visited: dict[Value, None] = {}
    queue = list(values)
    while queue:
        value = queue.pop()
        if value in visited:
            continue
        visited[value] = None
        if not stop(value):
            queue += (*value.inputs, *value.conditions) if with_conditions else value.inputs
    return visited


def _value(operation: str, inputs: tuple[Value, ...], aval: Any, position: int = 0, params: Any = None) -> Value:
    # Tokens and references have no shape or dtype.
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", "")
    return Value(operation, inputs, tuple(shape), str(dtype), position, params=params or {})


def _map_each(operation: str, values: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    """Return the results of an operation that has one result for each value."""
    return [_value(operation, (value,), var.aval) for value, var in zip(values, variables, strict=True)]


class Graph:
    """Program as a graph of ``Value`` objects.

    Args:
      closed: ``ClosedJaxpr`` of the program.
      names: path of each input.

    Attributes:
      contractions: contractions in the order of the program.
      inputs: arguments of the program.
      outputs: results of the program.
      observed: new observations of quant state, the results of ``core.delayed.observe``.
    """

    def __init__(self, closed: Any, names: Sequence[tuple[str, ...]]) -> None:
        self.contractions: list[Contraction] = []
        self.observed: set[Value] = set()
        self._read_by_effects: list[Value] = []  # inputs and outputs of equations with side effects
        self.inputs = [_value("argument", (), var.aval, i) for i, var in enumerate(closed.jaxpr.invars)]
        for value, name in zip(self.inputs, names, strict=True):
            value.name = name
        self.outputs = self._run(closed, self.inputs, Location())
        needed = ancestors([*self.outputs, *self._read_by_effects], with_conditions=True)
        for each in self.contractions:
            each.is_read = each.out in needed

    def _run(self, jaxpr: Any, inputs: Sequence[Value], location: Location) -> list[Value]:
        jaxpr = open_jaxpr(jaxpr)
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update({var: _value("constant", (), var.aval) for var in jaxpr.constvars})

        def read(atom: Any) -> Value:
            return _value("constant", (), atom.aval) if isinstance(atom, Literal) else known[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            outs = self._apply(eqn, [read(atom) for atom in eqn.invars], location.of_equation(index, eqn))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, inputs: list[Value], location: Location) -> list[Value]:
        name, inner = eqn.primitive.name, list(programs(eqn.params))
        if name == REVERSE_ONLY:
            return list(inputs)
        if name == "optimization_barrier":
            return _map_each(name, inputs, eqn.outvars)
        if special := {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name):
            return special(eqn, inputs, location)
        if name == "shard_map":
            parts = _map_each("shard", inputs, inner[0].invars)
            return _map_each("unshard", self._run(inner[0], parts, location.repeated(_shard_count(eqn))), eqn.outvars)
        if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(inputs):
            outs = self._run(inner[0], inputs, location)
            if eqn.params.get("name") == OBSERVE:
                self.observed.update(set(outs) - set(inputs))
            return outs
        outs = [_value(name, tuple(inputs), var.aval, i, params=eqn.params) for i, var in enumerate(eqn.outvars)]
        if name in OPERATIONS:
            self._record_contraction(eqn, inputs, outs[0], location)
        elif inner:
            self._record_nested(eqn, inner, outs, location)
        if eqn.effects:
            self._read_by_effects += [*inputs, *outs]
        return outs

    def _record_nested(self, eqn: Any, inner: list[Any], outs: list[Value], location: Location) -> None:
        """Record the contractions of nested programs whose operands have unknown origins, such as kernels.

        These contractions are needed if the results of the equation are needed. In a kernel, each contraction
        multiplies blocks, once for each program of the grid.
        """
        if eqn.primitive.name == "pallas_call":
            location = location.repeated(_grid_size(eqn), "pallas_call")
        count, effects = len(self.contractions), len(self._read_by_effects)
        for program in inner:
            avals = (getattr(var.aval, "inner_aval", var.aval) for var in program.invars)
            self._run(program, [_value("unknown", (), aval) for aval in avals], location)
        del self._read_by_effects[effects:]  # only side effects of the outer equation count
        for out in outs:
            out.conditions = tuple(each.out for each in self.contractions[count:])

    def _record_contraction(self, eqn: Any, inputs: list[Value], out: Value, location: Location) -> None:
        (lhs, rhs), operation = inputs[:2], OPERATIONS[eqn.primitive.name]
        if operation == "conv_general_dilated":
            depth, is_outer = rhs.size // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]], False
        else:
            ragged = eqn.params.get("ragged_dot_dimension_numbers")
            (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
            depth, is_outer = math.prod(lhs.shape[axis] for axis in contracted), not contracted
        flops, source, kind = 2 * out.size * depth, caller_of(eqn), location.kernel or operation
        self.contractions.append(Contraction(kind, lhs, rhs, out, location, flops, is_outer, source))

    def _scan(self, eqn: Any, inputs: list[Value], location: Location) -> list[Value]:
        body = open_jaxpr(eqn.params["jaxpr"])
        consts, carries = scan_counts(eqn.params)
        carried = [_value("scan_carry", (value,), value) for value in inputs[consts : consts + carries]]
        slices = _map_each("scan_slice", inputs[consts + carries :], body.invars[consts + carries :])
        results = self._run(body, [*inputs[:consts], *carried, *slices], location.repeated(eqn.params["length"]))
        return self._close_loop(carried, results, eqn.outvars)

    def _close_loop(self, carried: list[Value], results: list[Value], outvars: Sequence[Any]) -> list[Value]:
        """Connect a loop's carry with the results of its last step, and return the loop's results."""
        for value, result in zip(carried, results, strict=False):
            value.inputs = (*value.inputs, result)
        count = len(carried)
        finals = _map_each("scan_result", results[:count], outvars[:count])
        return [*finals, *_map_each("scan_stack", results[count:], outvars[count:])]

    def _while(self, eqn: Any, inputs: list[Value], location: Location) -> list[Value]:
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = inputs[first : first + second]
        carried = [_value("scan_carry", (value,), value) for value in inputs[first + second :]]
        decided = self._run(eqn.params["cond_jaxpr"], [*inputs[:first], *carried], location.branch(0))
        results = self._run(eqn.params["body_jaxpr"], [*consts, *carried], location.branch(1))
        outs = self._close_loop(carried, results, eqn.outvars)
        for out in outs:
            out.conditions = tuple(decided)
        return outs

    def _cond(self, eqn: Any, inputs: list[Value], location: Location) -> list[Value]:
        results = [self._run(branch, inputs[1:], location.branch(number)) for number, branch in _branches(eqn.params)]
        if len(results) == 1:
            return results[0]
        outs = zip(zip(*results, strict=True), eqn.outvars, strict=True)
        merged = [_value("branch", values, var.aval) for values, var in outs]
        for each in merged:
            each.conditions = tuple(inputs[:1])
        return merged


def _branches(params: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return the branches of a cond that may run, each with its number.

    If the branches depend on the platform, only the branch for this process's platform is returned. If this branch
    contains a kernel of jaxquant, the branch for other platforms is returned: the same matmul of complete operands.
    """
    platforms = params.get("branches_platforms")
    if platforms is None:
        return list(enumerate(params["branches"]))
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    otherwise = platforms.index(None) if None in platforms else 0
    found = next((i for i, names in enumerate(platforms) if names is not None and here in names), otherwise)
    if _has_own_kernel(open_jaxpr(params["branches"][found])):
        found = otherwise
    return [(found, params["branches"][found])]


def _has_own_kernel(jaxpr: Any) -> bool:
    return any(
        (eqn.primitive.name in CALLS and str(eqn.params.get("name")).startswith(KERNEL_PREFIX))
        or any(map(_has_own_kernel, programs(eqn.params)))
        for eqn in jaxpr.eqns
    )


def caller_of(eqn: Any) -> str:
    """Return the file, line and function of the innermost caller outside of jax and of this package."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not frame.file_name.startswith(_HIDDEN):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({frame.function_name})"
    return ""


def _shard_count(eqn: Any) -> int:
    sizes = dict(eqn.params["mesh"].shape)
    return math.prod(sizes[axis] for axis in eqn.params.get("newly_manual_axes", sizes))


def _grid_size(eqn: Any) -> int:
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(size for size in grid if isinstance(size, int))
