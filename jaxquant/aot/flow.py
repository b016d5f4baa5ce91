"""Flow of values through a compiled program, across fusions, loops and branches."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from jaxquant.aot.hlo import CALLED, Instruction, Module


class Place(NamedTuple):
    """A value of a program: an instruction, or an element of the tuple that an instruction returns.

    Attributes:
      computation: name of the computation.
      name: name of the instruction.
      path: indices into nested tuples; empty for the whole result.
    """

    computation: str
    name: str
    path: tuple[int, ...] = ()


T = TypeVar("T")
_FLOW_CALLS = ("fusion", "call", "while", "conditional", "async-start")
_SMALL_CALL = 'xla_cpu_small_call="true"'
"""Attribute of a call that XLA:CPU compiles as one function, with the loop in it."""
_SAME_ELEMENTS = frozenset(
    {"opt-barrier", "optimization-barrier", "copy", "copy-done", "add-dependency", "domain", "all-reduce-done"}
)
"""Instructions that return their first operand, element by element."""
_ONE_BY_ONE = ("all-reduce", "all-reduce-start", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
"""Instructions that return one result for each operand."""


class Flow:
    """Sources of every value of a program.

    Args:
      module: parsed program.

    Attributes:
      module: parsed program.
      kernels: computations of fusions, and of calls that become one function. The compiler can join operations within
        a kernel.
      results: results of the program.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._callers: dict[str, list[tuple[str, Instruction]]] = collections.defaultdict(list)
        starts: list[str] = []
        for name, computation in module.computations.items():
            for each in computation.values():
                if each.opcode in _FLOW_CALLS:
                    for called in each.called:
                        self._callers[called].append((name, each))
                if each.opcode == "fusion" or _SMALL_CALL in each.rest:
                    starts += each.called
        self.kernels = reach(starts, self._computations_in)
        root = self._root(module.entry)
        count = len(self.instruction(root).operands) if self.instruction(root).opcode == "tuple" else 0
        self.results = [root._replace(path=(i,)) for i in range(count)] or [root]

    def instruction(self, place: Place) -> Instruction:
        return self.module.computations[place.computation][place.name]

    def op_name(self, place: Place) -> str:
        """Return the path of a value in the traced program, or the path of the call around it if it has none."""
        name = self.instruction(place).op_name
        callers = self._callers[place.computation]
        return name or (self.op_name(Place(callers[0][0], callers[0][1].name)) if callers else "")

    def inputs(self, place: Place) -> list[Place]:
        """Return the values that a value depends on, including the conditions of loops and branches."""
        each = self.instruction(place)
        if each.opcode == "while":
            condition = [self._root(name) for role, name in CALLED.findall(each.rest) if role == "condition"]
            return [*self.sources(place), *condition]
        if each.opcode == "conditional":
            return [*self.sources(place), Place(place.computation, each.operands[0])]
        return self.sources(place)

    def sources(self, place: Place) -> list[Place]:
        """Return the operands of a value; for a parameter, a call or an element, the values that it is a copy of."""
        computation, _, path = place
        each = self.instruction(place)
        operands = [Place(computation, name) for name in each.operands]
        match each.opcode:
            case "parameter":
                return [value for caller in self._callers[computation] for value in self._passed(place, *caller)]
            case "tuple" if path:
                return [operands[path[0]]._replace(path=path[1:])]
            case "get-tuple-element":
                index = re.search(r"index=(\d+)", each.rest)
                assert index is not None
                return [operands[0]._replace(path=(int(index[1]), *path))]
            case "fusion" | "call" | "conditional":
                return [self._root(name, path) for name in each.called]
            case "while":
                return [operands[0]._replace(path=path), self._root(self._body(each), path)]
            case "async-start":
                return [*operands, *map(self._root, each.called)]
            case opcode if opcode in _SAME_ELEMENTS:
                return [operands[0]._replace(path=path)]
            case opcode if opcode in _ONE_BY_ONE and path and len(operands) > 1:
                return [operands[path[-1]]]
        return operands

    def _passed(self, parameter: Place, computation: str, caller: Instruction) -> list[Place]:
        """Return the values that a caller passes to a parameter."""
        name, path = parameter.computation, parameter.path
        if caller.opcode == "while":
            return [Place(computation, caller.operands[0], path), self._root(self._body(caller), path)]
        number = int(self.instruction(parameter).arguments)
        if caller.opcode == "conditional":
            number = 1 + caller.called.index(name)
        return [Place(computation, caller.operands[number], path)]

    def _root(self, computation: str, path: tuple[int, ...] = ()) -> Place:
        instructions = self.module.computations[computation].values()
        return Place(computation, next(each.name for each in instructions if each.is_root), path)

    def _body(self, loop: Instruction) -> str:
        return next(name for role, name in CALLED.findall(loop.rest) if role == "body")

    def _computations_in(self, name: str) -> list[str]:
        return [called for each in self.module.computations[name].values() for called in each.called]


def reach(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> set[T]:
    """Return all values that can be reached from ``start``, with ``start``."""
    found: set[T] = set()
    waiting = list(start)
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += following(each)
    return found
