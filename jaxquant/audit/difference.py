"""Search for the first value that differs between two runs of a function on the same rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxquant.audit.dataflow import caller_of
from jaxquant.trace.jaxprs import JITS, REMATS, called, scan_counts
from jaxquant.trace.registry import CUSTOM
from jaxquant.trace.rewrite import evaluate_equation


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value that differs between two runs.

    Attributes:
      primitive: primitive that computed the value, or "argument".
      path: name scopes of the value, such as "layers/mlp".
      source: file, line and function that computed the value.
      steps: index of the step in each enclosing scan, outermost first.
      shapes: shape of the value in both runs.
      count: number of compared elements whose bits differ.
      size: number of compared elements.
      largest: largest difference of two compared elements.
    """

    primitive: str
    path: str
    source: str
    steps: tuple[int, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    count: int
    size: int
    largest: float


def first_difference(
    function: Callable[..., Any], arguments: Sequence[Any], other_arguments: Sequence[Any], row: int
) -> Difference | None:
    """Return the first value that differs bit by bit between two runs of a function on the same rows, or None.

    The runs may have different batch sizes or padding. If the shapes of a value differ, a part of the longer value is
    compared. On the first axis with different sizes, it is block number ``row``, where a block has the size of the
    shorter axis. On other axes, it is the first elements. To find an error of batching, pass a batch of 8 and its row 3
    with ``row=3``. To find an error of padding, pass one row, and the row with padding at its end.

    Both runs are compiled, and every equation returns its value: also equations in jitted functions, rematerialized
    blocks, functions with custom derivatives, and scans. For a ``while`` or a ``cond``, only the results are compared.
    All values are kept in memory, also those that no result needs. An output changes what the compiler fuses: if the
    function's results differ but this function returns None, the difference comes from a fusion, such as those that
    ``aot.find_variant_operations`` lists.

    Args:
      function: function of arrays or pytrees of arrays.
      arguments: positional arguments of the first run.
      other_arguments: positional arguments of the second run.
      row: block of the first axis that differs, in the run with the longer axis; 0 for padding.

    Raises:
      ValueError: the function computes different equations in the two runs, or the longer run has no such row.
    """
    runs = [list(_values(_run(function, each))) for each in (arguments, other_arguments)]
    for tap, other in itertools.zip_longest(*runs):
        kinds = [None if each is None else (each[0][0], each[2].ndim, each[2].dtype) for each in (tap, other)]
        if tap is None or other is None or kinds[0] != kinds[1]:
            values = (f"{each[0][0]} {each[2].shape} {each[2].dtype}" if each else "nothing" for each in (tap, other))
            first = f"the two runs compute different equations, first {' and '.join(values)}"
            raise ValueError(f"{first}; pass arguments of equal rank and dtype")
        (primitive, path, source), steps, value = tap
        mine, others = _common_part(value, other[2], row)
        differs = (_bits(mine) != _bits(others)).any(-1)
        if differs.any():
            gap = np.abs(mine.astype(np.float64) - others.astype(np.float64))[differs]
            largest = float(np.nanmax(gap, initial=0.0))
            shapes = value.shape, other[2].shape
            return Difference(primitive, path, source, steps, shapes, int(differs.sum()), differs.size, largest)
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tap:
    """A value, with its primitive, path and source; in a scan, the values of all steps."""

    value: jax.Array
    label: tuple[str, str, str] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loop:
    """Taps of the body of a scan."""

    taps: list[Any]
    length: int = dataclasses.field(metadata={"static": True})


def _run(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Run a function and return the taps of its arguments and equations."""
    program = jax.make_jaxpr(function)(*arguments)

    def run(consts: list[Any], leaves: list[Any]) -> list[Any]:
        taps = [tap for number, leaf in enumerate(leaves) for tap in _taps([leaf], ("argument", str(number), ""))]
        _evaluate(program.jaxpr, consts, leaves, "", taps)
        return taps

    return jax.jit(run)(program.consts, jax.tree.leaves(tuple(arguments)))


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], scope: str, taps: list[Any]) -> list[Any]:
    """Evaluate a jaxpr and append a tap for each value."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        name, ins = eqn.primitive.name, list(map(read, eqn.invars))
        path = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        if name in JITS | REMATS | CUSTOM:
            inner = called(eqn)
            outs = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), ins, path, taps)
        elif name == "scan":
            outs = _scan(eqn, ins, path, taps)
        else:
            outs = evaluate_equation(eqn, ins)
            taps += _taps(outs, (name, path, caller_of(eqn)))
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _taps(values: Sequence[Any], label: tuple[str, str, str]) -> list[_Tap]:
    """Return a tap for each value that is not a random key."""
    return [_Tap(each, label) for each in values if not jnp.issubdtype(each.dtype, jax.dtypes.extended)]


def _scan(eqn: Any, ins: list[Any], path: str, taps: list[Any]) -> list[Any]:
    """Evaluate a scan whose steps also return their taps."""
    params, (consts, carries) = eqn.params, scan_counts(eqn.params)

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Any]:
        inner: list[Any] = []
        outs = _evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, [*ins[:consts], *carry, *slices], path, inner)
        return outs[:carries], (outs[carries:], inner)

    given = ins[consts : consts + carries], ins[consts + carries :]
    carry, (made, inner) = jax.lax.scan(body, *given, length=params["length"], reverse=params["reverse"])
    taps.append(_Loop(inner, params["length"]))
    return [*carry, *made]


def _values(taps: Sequence[Any], steps: tuple[int, ...] = ()) -> Iterator[tuple[tuple[str, str, str], Any, np.ndarray]]:
    """Yield the label, the steps and the value of each tap, the steps of a loop one after another."""
    for tap in taps:
        if isinstance(tap, _Loop):
            for step in range(tap.length):
                yield from _values(tap.taps, (*steps, step))
        else:
            yield tap.label, steps, np.asarray(tap.value)[steps]


def _common_part(value: np.ndarray, other: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of two values that belong to the same rows."""
    block = row
    for axis, sizes in enumerate(zip(value.shape, other.shape, strict=True)):
        if sizes[0] != sizes[1]:
            start = block * min(sizes)
            if start < 0 or start + min(sizes) > max(sizes):
                raise ValueError(
                    f"row {row} is not in the longer run, whose axis {axis} has size {max(sizes)}; pass a row in it"
                )
            part = (slice(None),) * axis + (slice(start, start + min(sizes)),)
            value, other = (value[part], other) if sizes[0] > sizes[1] else (value, other[part])
            block = 0
    return value, other


def _bits(value: np.ndarray) -> np.ndarray:
    """Return the bytes of each element, on a new last axis."""
    return np.frombuffer(value.tobytes(), np.uint8).reshape(*value.shape, value.dtype.itemsize)
