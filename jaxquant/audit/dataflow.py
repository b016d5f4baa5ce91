"""A traced function as one graph of values, with every function, loop and branch in it opened.

Where an operand of a matmul comes from (a parameter, a division by a scale, a reduction) crosses the borders of jitted
functions, scans and rematerialized blocks. Here each variable of each of them becomes a ``Value`` that knows the values
that it was computed from, and each contraction becomes a ``Contraction`` that knows its place.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jaxquant.core.delayed import OBSERVE
from jaxquant.kernels import KERNEL_PREFIX
from jaxquant.ops.gradients import REVERSE_ONLY
from jaxquant.trace.analysis import open_jaxpr, programs, scan_counts
from jaxquant.trace.plan import OPERATIONS

_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
"""Primitives whose one inner program takes their operands and gives their results, in order."""

_HIDDEN = tuple(os.path.dirname(folder) + os.sep for folder in (jax.__file__, os.path.dirname(__file__)))
"""Folders whose code asks for nothing on its own."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program.

    Attributes:
      operation: name of the primitive that made it; "argument" and "constant" have none, and a loop adds its own:
        "scan_slice" (one step's part of an input), "scan_carry" (made from the first value and the last step's),
        "scan_stack" (one step's results, stacked); ``shard_map`` adds "shard" and "unshard".
      inputs: what it was computed from.
      shape, dtype: dtype by name.
      position: which of the primitive's results it is, or which argument.
      name: of an argument, its path in the arguments' tree.
      params: of the primitive.
    """

    operation: str
    inputs: tuple[Value, ...]
    shape: tuple[int, ...]
    dtype: str
    position: int = 0
    name: tuple[str, ...] = ()
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(eq=False, slots=True)
class Contraction:
    """One matmul or convolution of the program.

    Attributes:
      operation: primitive, one of ``CONTRACTIONS``, or "pallas_call" for one inside a kernel.
      lhs, rhs, out: operands and result; inside a kernel these are of one block.
      dimension_numbers: as ``lax.dot_general`` takes them, None for a convolution or a kernel.
      stack: name scopes from the outside in, as jax spells them.
      times: how often one call of the function runs it, over all shards of a ``shard_map`` and programs of a kernel;
        the body of a ``while`` counts once and so does every branch of a ``cond``.
      flops: multiplications and additions of one time.
      context: index of the equation at each level of nesting, as ``trace.analysis`` counts.
      source: file, line and function that asked for it.
    """

    operation: str
    lhs: Value
    rhs: Value
    out: Value
    dimension_numbers: Any
    stack: tuple[str, ...]
    times: int
    flops: int
    context: tuple[int, ...] = ()
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a program occurs: name scopes, how often it runs, indices of the equations around it."""

    stack: tuple[str, ...] = ()
    times: int = 1
    context: tuple[int, ...] = ()

    def at(self, index: int, scope: str) -> _Place:
        return _Place((*self.stack, scope) if scope else self.stack, self.times, (*self.context, index))

    def repeated(self, times: int) -> _Place:
        return dataclasses.replace(self, times=self.times * times)

    def branch(self, number: int) -> _Place:
        return dataclasses.replace(self, context=(*self.context, number))


class Graph(NamedTuple):
    """A program as values.

    Attributes:
      contractions: those that its outputs or side effects need, in the order of the program.
      unread: those that they do not need: a forward matmul, say, of which a function that returns gradients alone
        wants no result.
      inputs, outputs: its arguments and results.
      observed: what uses of quant state observed, the results of ``core.delayed.observe``.
    """

    contractions: list[Contraction]
    unread: list[Contraction]
    inputs: list[Value]
    outputs: list[Value]
    observed: frozenset[Value]


def graph(jaxpr: Any, names: Sequence[tuple[str, ...]]) -> Graph:
    """Read a closed jaxpr.

    Args:
      jaxpr: a ``ClosedJaxpr``.
      names: a path for every input of it.
    """
    walk = _Walk()
    inputs = [_value("argument", (), var.aval, position) for position, var in enumerate(jaxpr.jaxpr.invars)]
    for value, name in zip(inputs, names, strict=True):
        value.name = name
    outputs = walk.run(jaxpr.jaxpr, inputs, _Place())
    needed = ancestors([*outputs, *walk.read_by_effects], walk.conditions)
    read, unread = ([each for each in walk.found if (each.out in needed) == is_read] for is_read in (True, False))
    return Graph(read, unread, inputs, outputs, frozenset(walk.observed))


def ancestors(
    values: Iterable[Value],
    conditions: Mapping[Value, Sequence[Value]] | None = None,
    stop: Callable[[Value], bool] | None = None,
) -> set[Value]:
    """Collect values and all that they were computed from.

    Args:
      values: where to start.
      conditions: values that one depends on beside its inputs.
      stop: whether to look no further than a value.

    Returns:
      The values that were reached, those given included.
    """
    visited: set[Value] = set()
    queue = list(values)
    while queue:
        value = queue.pop()
        if value in visited:
            continue
        visited.add(value)
        if stop is not None and stop(value):
            continue
        if value.operation == "optimization_barrier":
            queue.append(value.inputs[value.position])
        else:
            queue += value.inputs
        queue += (conditions or {}).get(value, ())
    return visited


def _value(operation: str, inputs: tuple[Value, ...], aval: Any, position: int = 0, params: Any = None) -> Value:
    # Tokens and references have no shape or dtype of their own.
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", "")
    return Value(operation, inputs, tuple(shape), str(dtype), position, params=params or {})


def _moved(operation: str, values: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    """Make of each value what an operation makes of it alone."""
    return [_value(operation, (value,), var.aval) for value, var in zip(values, variables, strict=True)]


class _Walk:
    """Run a program on ``Value`` in place of arrays, and note its contractions.

    Attributes:
      found: contractions.
      conditions: what decides over a value, a branch's index or a loop's test, and the contractions inside of what made
        it where how they do is not known. No operand comes from these, so they are no ``inputs``.
      read_by_effects: what equations with side effects read and make.
      observed: see ``Graph``.
    """

    def __init__(self) -> None:
        self.found: list[Contraction] = []
        self.conditions: dict[Value, list[Value]] = {}
        self.read_by_effects: list[Value] = []
        self.observed: set[Value] = set()

    def run(self, jaxpr: Any, inputs: Sequence[Value], place: _Place) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update({var: _value("constant", (), var.aval) for var in jaxpr.constvars})

        def read(atom: Any) -> Value:
            return _value("constant", (), atom.aval) if isinstance(atom, Literal) else known[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            within = place.at(index, str(eqn.source_info.name_stack))
            outs = self._apply(eqn, [read(atom) for atom in eqn.invars], within)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        name = eqn.primitive.name
        if name == REVERSE_ONLY:
            return list(inputs)
        special: Callable[..., list[Value]] | None = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "pallas_call": self._kernel,
        }.get(name)
        if special is not None:
            return special(eqn, inputs, place)
        inner = list(programs(eqn.params))
        if name == "shard_map":
            parts = _moved("shard", inputs, inner[0].invars)
            return _moved("unshard", self.run(inner[0], parts, place.repeated(_shards(eqn))), eqn.outvars)
        if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(inputs):
            outs = self.run(inner[0], inputs, place)
            if eqn.params.get("name") == OBSERVE:
                self.observed.update(set(outs) - set(inputs))
            return outs
        before = len(self.found)
        for program in inner:  # of an unknown primitive: its contractions are found, their operands' origin is not
            self.run(program, [_value("unknown", (), var.aval) for var in program.invars], place)
        outs = [_value(name, tuple(inputs), var.aval, i, params=eqn.params) for i, var in enumerate(eqn.outvars)]
        if (operation := OPERATIONS.get(name)) is not None:
            self._note(eqn, operation, inputs, outs[0], place)
        elif inner:
            self._condition(outs, [each.out for each in self.found[before:]])
        self._keep(eqn, inputs, outs)
        return outs

    def _condition(self, values: Sequence[Value], others: Sequence[Value]) -> None:
        for value in values:
            self.conditions.setdefault(value, []).extend(others)

    def _keep(self, eqn: Any, inputs: Sequence[Value], outs: Sequence[Value]) -> None:
        if eqn.effects:
            self.read_by_effects += [*inputs, *outs]

    def _note(self, eqn: Any, name: str, inputs: list[Value], out: Value, place: _Place) -> None:
        lhs, rhs = inputs[:2]
        numbers = eqn.params.get("dimension_numbers") if name == "dot_general" else None
        if name == "conv_general_dilated":
            depth = rhs.size // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        else:
            ragged = eqn.params.get("ragged_dot_dimension_numbers")
            (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
            depth = math.prod(lhs.shape[axis] for axis in contracted)
        flops, source = 2 * out.size * depth, _asked_at(eqn)
        found = Contraction(name, lhs, rhs, out, numbers, place.stack, place.times, flops, place.context, source)
        self.found.append(found)

    def _scan(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        body = open_jaxpr(eqn.params["jaxpr"])
        consts, carries = scan_counts(eqn.params)
        carried = [_value("scan_carry", (value,), value) for value in inputs[consts : consts + carries]]
        slices = _moved("scan_slice", inputs[consts + carries :], body.invars[consts + carries :])
        results = self.run(body, [*inputs[:consts], *carried, *slices], place.repeated(eqn.params["length"]))
        return self._close(carried, results, eqn.outvars)

    def _close(self, carried: list[Value], results: list[Value], outvars: Sequence[Any]) -> list[Value]:
        """Tie a loop's carry to what its last step made of it, and return the loop's results."""
        for value, result in zip(carried, results, strict=False):
            value.inputs = (*value.inputs, result)
        count = len(carried)
        finals = _moved("scan_result", results[:count], outvars[:count])
        return [*finals, *_moved("scan_stack", results[count:], outvars[count:])]

    def _while(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        test, body = open_jaxpr(eqn.params["cond_jaxpr"]), open_jaxpr(eqn.params["body_jaxpr"])
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = inputs[first : first + second]
        carried = [_value("scan_carry", (value,), value) for value in inputs[first + second :]]
        decided = self.run(test, [*inputs[:first], *carried], place.branch(0))
        outs = self._close(carried, self.run(body, [*consts, *carried], place.branch(1)), eqn.outvars)
        self._condition(outs, decided)
        return outs

    def _cond(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        results = [
            self.run(open_jaxpr(branch), inputs[1:], place.branch(number)) for number, branch in _branches(eqn.params)
        ]
        if len(results) == 1:
            return results[0]
        outs = zip(zip(*results, strict=True), eqn.outvars, strict=True)
        merged = [_value("branch", values, var.aval) for values, var in outs]
        self._condition(merged, inputs[:1])
        return merged

    def _kernel(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        """Note what a Pallas kernel multiplies, block by block, as contractions of the kernel."""
        inner = _Walk()
        for program in programs(eqn.params):
            opaque = [_value("unknown", (), getattr(var.aval, "inner_aval", var.aval)) for var in program.invars]
            inner.run(program, opaque, place.repeated(_programs_of(eqn)))
        self.found += [dataclasses.replace(each, operation="pallas_call") for each in inner.found]
        outs = [_value("pallas_call", tuple(inputs), var.aval, i) for i, var in enumerate(eqn.outvars)]
        self._condition(outs, [each.out for each in inner.found])
        self._keep(eqn, inputs, outs)
        return outs


def _branches(params: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return the branches of a cond that may run, each with its number: of one a platform, that of this process.

    A kernel of ours stands for its reference, the branch of all other platforms: the same matmul of whole operands.
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
        (eqn.primitive.name == "pallas_call" and str(eqn.params.get("name")).startswith(KERNEL_PREFIX))
        or any(map(_has_own_kernel, programs(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _asked_at(eqn: Any) -> str:
    """Return the file, line and function that asked for an equation, outside of jax and of this package."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not frame.file_name.startswith(_HIDDEN):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({frame.function_name})"
    return ""


def _shards(eqn: Any) -> int:
    sizes = dict(eqn.params["mesh"].shape)
    return math.prod(sizes[axis] for axis in eqn.params.get("newly_manual_axes", sizes))


def _programs_of(eqn: Any) -> int:
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(size for size in grid if isinstance(size, int))
