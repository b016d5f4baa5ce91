"""A traced function as one graph of values, with every function, loop and branch in it opened.

Where an operand of a matmul comes from (a parameter, a division by a scale, a reduction) crosses the borders of jitted
functions, scans and rematerialized blocks. Here each variable of each of them becomes a ``Value`` that knows the values
that it was computed from, and each contraction becomes a ``Contraction`` that knows its place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

CONTRACTIONS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite"}
    | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
"""Primitives whose one inner program takes their operands and gives their results, in order."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of the program.

    Attributes:
      operation: name of the primitive that made it; "argument" and "constant" have none, and a loop adds its own:
        "scan_slice" (one step's part of an input), "scan_carry" (made from the first value and the last step's),
        "scan_stack" (one step's results, stacked); ``shard_map`` adds "shard" and "unshard".
      inputs: what it was computed from.
      shape, dtype: dtype by name.
      position: which of the primitive's results it is.
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
    """

    operation: str
    lhs: Value
    rhs: Value
    out: Value
    dimension_numbers: Any
    stack: tuple[str, ...]
    times: int
    flops: int


def contractions(jaxpr: Any, names: Sequence[tuple[str, ...]]) -> list[Contraction]:
    """List the contractions of a closed jaxpr that its outputs or side effects need, in the order of the program.

    Args:
      jaxpr: a ``ClosedJaxpr``.
      names: a path for every input of it.
    """
    walk = _Walk()
    inputs = [_value("argument", (), var.aval, name=name) for var, name in zip(jaxpr.jaxpr.invars, names, strict=True)]
    outputs = walk.run(jaxpr.jaxpr, inputs, (), 1)
    needed = ancestors([*outputs, *walk.read_by_effects], walk.conditions)
    return [each for each in walk.found if each.out in needed]


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


def _value(
    operation: str,
    inputs: tuple[Value, ...],
    aval: Any,
    position: int = 0,
    name: tuple[str, ...] = (),
    params: Mapping[str, Any] | None = None,
) -> Value:
    # Tokens and references have no shape or dtype of their own.
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", "")
    return Value(operation, inputs, tuple(shape), str(dtype), position, name, params or {})


class _Walk:
    """Run a program on ``Value`` in place of arrays, and note its contractions.

    Attributes:
      found: contractions.
      conditions: what decides over a value, a branch's index or a loop's test, and the contractions inside of what made
        it where how they do is not known. No operand comes from these, so they are no ``inputs``.
      read_by_effects: what equations with side effects read and make.
    """

    def __init__(self) -> None:
        self.found: list[Contraction] = []
        self.conditions: dict[Value, list[Value]] = {}
        self.read_by_effects: list[Value] = []

    def run(self, jaxpr: Any, inputs: Sequence[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update({var: _value("constant", (), var.aval) for var in jaxpr.constvars})

        def read(atom: Any) -> Value:
            return _value("constant", (), atom.aval) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            own = str(eqn.source_info.name_stack)
            outs = self._apply(eqn, [read(atom) for atom in eqn.invars], (*stack, own) if own else stack, times)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, inputs: list[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        name = eqn.primitive.name
        special: Callable[..., list[Value]] | None = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "pallas_call": self._kernel,
        }.get(name)
        if special is not None:
            return special(eqn, inputs, stack, times)
        inner = list(_programs(eqn.params))
        if name == "shard_map":
            parts = [_value("shard", (value,), var.aval) for value, var in zip(inputs, inner[0].invars, strict=True)]
            results = self.run(inner[0], parts, stack, times * _shards(eqn))
            return [_value("unshard", (out,), var.aval) for out, var in zip(results, eqn.outvars, strict=True)]
        if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(inputs):
            return self.run(inner[0], inputs, stack, times)
        before = len(self.found)
        for program in inner:  # of an unknown primitive: its contractions are found, their operands' origin is not
            self.run(program, [_value("unknown", (), var.aval) for var in program.invars], stack, times)
        outs = [_value(name, tuple(inputs), var.aval, i, params=eqn.params) for i, var in enumerate(eqn.outvars)]
        if name in CONTRACTIONS:
            self._note(eqn, name, inputs, outs[0], stack, times)
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

    def _note(self, eqn: Any, name: str, inputs: list[Value], out: Value, stack: tuple[str, ...], times: int) -> None:
        lhs, rhs = inputs[:2]
        numbers = eqn.params.get("dimension_numbers") if name == "dot_general" else None
        if name == "conv_general_dilated":
            depth = rhs.size // rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        else:
            ragged = eqn.params.get("ragged_dot_dimension_numbers")
            (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
            depth = math.prod(lhs.shape[axis] for axis in contracted)
        self.found.append(Contraction(name, lhs, rhs, out, numbers, stack, times, 2 * out.size * depth))

    def _scan(self, eqn: Any, inputs: list[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        body = _open(eqn.params["jaxpr"])
        if "ft_in" in eqn.params:  # jax 0.12
            consts, carries, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
        else:
            consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        given = inputs[:consts]
        kinds = ["scan_carry"] * carries + ["scan_slice"] * (len(inputs) - consts - carries)
        given += [
            _value(kind, (value,), var.aval)
            for kind, value, var in zip(kinds, inputs[consts:], body.invars[consts:], strict=True)
        ]
        results = self.run(body, given, stack, times * eqn.params["length"])
        return self._close(given[consts : consts + carries], results, eqn.outvars)

    def _close(self, carried: list[Value], results: list[Value], outvars: Sequence[Any]) -> list[Value]:
        """Tie a loop's carry to what its last step made of it, and return the loop's results."""
        for value, result in zip(carried, results, strict=False):
            value.inputs = (*value.inputs, result)
        kinds = ["scan_result"] * len(carried) + ["scan_stack"] * (len(results) - len(carried))
        return [_value(kind, (value,), var.aval) for kind, value, var in zip(kinds, results, outvars, strict=True)]

    def _while(self, eqn: Any, inputs: list[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        test, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = inputs[first : first + second]
        carried = [_value("scan_carry", (value,), value) for value in inputs[first + second :]]
        decided = self.run(test, [*inputs[:first], *carried], stack, times)
        outs = self._close(carried, self.run(body, [*consts, *carried], stack, times), eqn.outvars)
        self._condition(outs, decided)
        return outs

    def _cond(self, eqn: Any, inputs: list[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        results = [self.run(_open(branch), inputs[1:], stack, times) for branch in eqn.params["branches"]]
        outs = zip(zip(*results, strict=True), eqn.outvars, strict=True)
        merged = [_value("branch", values, var.aval) for values, var in outs]
        self._condition(merged, inputs[:1])
        return merged

    def _kernel(self, eqn: Any, inputs: list[Value], stack: tuple[str, ...], times: int) -> list[Value]:
        """Note what a Pallas kernel multiplies, block by block, as contractions of the kernel."""
        inner = _Walk()
        for program in _programs(eqn.params):
            opaque = [_value("unknown", (), getattr(var.aval, "inner_aval", var.aval)) for var in program.invars]
            inner.run(program, opaque, stack, times * _programs_of(eqn))
        self.found += [dataclasses.replace(each, operation="pallas_call") for each in inner.found]
        outs = [_value("pallas_call", tuple(inputs), var.aval, i) for i, var in enumerate(eqn.outvars)]
        self._condition(outs, [each.out for each in inner.found])
        self._keep(eqn, inputs, outs)
        return outs


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _programs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the programs among a primitive's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_open(item), "eqns"):
                yield _open(item)


def _shards(eqn: Any) -> int:
    sizes = dict(eqn.params["mesh"].shape)
    return math.prod(sizes[axis] for axis in eqn.params.get("manual_axes", sizes))


def _programs_of(eqn: Any) -> int:
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    return math.prod(size for size in grid if isinstance(size, int))
