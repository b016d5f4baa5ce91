"""Operations of a compiled program whose result for a row may depend on the batch, on padding or on chunks.

A program without such an operation is batch invariant if it does not combine rows. The check reads optimized HLO text,
and assumes:

- Rows are not combined. The check does not find a maximum, an integer sum or a sort over the batch, such as the amax of
  a tensor.
- A compiler may join a float multiplication and the addition that reads it if both are in one fusion. XLA:CPU does.
  XLA for H200 (jax 0.10.2) writes ``mul.rn`` and ``add.rn``, which are not joined. TPU compilers were not examined.
- Slices that devices write into zeros, at an index that is linear in the device's number, are disjoint.
- Products with a power of two do not underflow. They are then exact, and joining them changes no bit.
- All casts are kept. The text does not show that a compiler removed a cast from float32 to bfloat16 and back.
- Custom calls may depend on the batch, because the text does not contain their code. The exception is our own matmul
  kernel for int8 operands: it adds in int32, and multiplies the sums by the scales (``kernels/fp8_einsum``).
- Results without ``transpose(`` upstream are forward results (``find_variant_operations``).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxquant.aot import kernels
from jaxquant.aot.flow import Flow, Place, reach
from jaxquant.aot.hlo import Array, Instruction, parse
from jaxquant.aot.outcome import locate
from jaxquant.aot.program import contracted_size

_FUNCTIONS = {
    **dict.fromkeys(("exponential", "exponential-minus-one"), "exact.exp"),
    **dict.fromkeys(("log", "log-plus-one"), "exact.log"),
    **dict.fromkeys(("logistic", "tanh"), "exact.sigmoid"),
    "rsqrt": "exact.rsqrt",
    **dict.fromkeys(("sine", "cosine", "power"), "a constant table"),
    **dict.fromkeys(("tan", "atan2", "cbrt", "erf"), "exact functions"),
}
"""Function that XLA approximates -> replacement. The approximation may differ between vector widths."""

CURES = {
    "sum": "exact.sum",
    "sum across devices": "exact.sum",
    "matmul": "exact.dot, or int8",
    "kernel": "a test of the kernel",
    "product in a sum": "exact.hold",
} | _FUNCTIONS
"""Kind of operation -> replacement."""

_UNCHANGED: dict[str, slice] = {
    **dict.fromkeys(("broadcast", "reshape", "transpose", "bitcast", "copy", "reverse", "negate"), slice(1)),
    **dict.fromkeys(("slice", "dynamic-slice", "gather"), slice(1)),
    **dict.fromkeys(("pad", "dynamic-update-slice"), slice(2)),
    "concatenate": slice(None),
    "select": slice(1, 3),
}
"""Instructions whose elements are elements of operands, possibly negated -> these operands."""

_STRUCTURE = frozenset({"parameter", "get-tuple-element", "tuple", "fusion", "call", "while", "conditional"})
_NUMBERS = frozenset({"partition-id", "replica-id"})
_KEEPS_FLOAT32 = r"exponent_bits=(8|9|1\d), mantissa_bits=(2[3-9]|[3-9]\d)"
_FORWARD = r"^(?!.*transpose\().*jvp\("
"""Pattern for paths in the forward pass of a function that is differentiated."""


@dataclasses.dataclass(frozen=True)
class VariantOperation:
    """An operation, or several equal operations, that may depend on the shapes of the program.

    Attributes:
      kind: key of ``CURES``.
      layer: path in the traced program.
      types: types of the operands and of the result.
      is_forward: whether a result of the program that does not depend on a gradient depends on the operation. Other
        operations are part of the backward pass and of the update; they do not affect log-probabilities.
      count: number of equal operations in the program.
    """

    kind: str
    layer: str
    types: str
    is_forward: bool
    count: int = 1


def find_variant_operations(program: Any) -> list[VariantOperation]:
    """Return the operations of a program whose result for a row may depend on the shapes of the program.

    Kinds of operations, all with float operands: sums over an axis (their order depends on the tiling), sums across
    devices, matrix products with a contracted axis, additions of a product in the same fusion (the compiler may round
    once instead of twice), complex products and quotients (they are such additions), functions that XLA approximates,
    and custom calls. Integer operations are never listed.

    Operations in the backward pass are those on which no forward result depends: a forward result does not depend on an
    instruction with ``transpose(`` in its path. A rematerialized forward pass is part of the backward pass.

    Args:
      program: compiled program (``jax.jit(f).lower(...).compile()``), or its optimized HLO text.

    Raises:
      ValueError: the text has no entry computation.
    """
    flow = Flow(parse(program if isinstance(program, str) else program.as_text()))
    every = reach(flow.results, flow.inputs)
    forward = {place[:2] for place in reach(_forward_results(flow, every), flow.inputs)}
    counts = collections.Counter[VariantOperation]()
    for place in sorted({place._replace(path=()) for place in every}):
        if kind := _kind_of(flow, place):
            layer, _ = locate(flow.op_name(place))
            counts[VariantOperation(kind, layer, _types(flow, place), place[:2] in forward)] += 1
    found = (dataclasses.replace(each, count=n) for each, n in counts.items())
    return sorted(found, key=lambda each: (not each.is_forward, [*CURES].index(each.kind), each.layer))


def _forward_results(flow: Flow, every: set[Place]) -> list[Place]:
    """Return the results that do not depend on the backward pass; all forward values if all results depend on it.

    A compiler may merge equal instructions of both passes and keep either name. An instruction on which a forward
    computation depends is therefore forward, whatever its name, and so is one that depends on no argument.
    """
    readers: dict[Place, list[Place]] = collections.defaultdict(list)
    for place in every:
        for source in flow.inputs(place):
            readers[source].append(place)
    names = {place: flow.instruction(place).op_name for place in every}
    computed = (each for each in every if flow.instruction(each).opcode not in _STRUCTURE | _UNCHANGED.keys())
    forward = reach([each for each in computed if re.search(_FORWARD, names[each])], flow.inputs)
    variable = reach([each for each in every if _is_argument(flow, each)], lambda place: readers[place])
    start = [place for place in variable - forward if "transpose(" in names[place]]
    backward = reach(start, lambda place: readers[place])
    found = [place for place in flow.results if place not in backward]
    return [place for place in found if _has_rows(flow, place)] if found else list(every - backward)


def _is_argument(flow: Flow, place: Place) -> bool:
    return place.computation == flow.module.entry and flow.instruction(place).opcode == "parameter"


def _has_rows(flow: Flow, result: Place) -> bool:
    """Return whether a result depends on an array argument; a learning rate depends on scalars only."""
    given = (flow.instruction(place) for place in reach([result], flow.inputs) if _is_argument(flow, place))
    return any(array.shape for each in given for array in each.arrays)


def _kind_of(flow: Flow, place: Place) -> str:
    """Return the kind of an operation that may depend on shapes, or ""."""
    each = flow.instruction(place)
    operands = _operands(flow, place)
    if not any(map(_is_float, [*each.arrays, *(array for operand in operands for array in operand.arrays)])):
        return ""
    if each.opcode == "custom-call":
        return _kind_of_call(each, flow.op_name(place), operands)
    if each.opcode in ("convolution", "ragged-dot", "fft", "cholesky", "triangular-solve"):
        return "matmul"
    if each.opcode == "dot":
        return "matmul" if contracted_size(each, operands[0].arrays[0], operands[1].arrays[0]) > 1 else ""
    if each.opcode in _FUNCTIONS:
        return each.opcode
    if each.opcode.removesuffix("-start") in ("all-reduce", "reduce-scatter") and _adds(flow, each):
        return "" if all(_is_slice_in_zeros(flow, source) for source in flow.sources(place)) else "sum across devices"
    if each.opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter") and _adds(flow, each):
        return "sum" if each.opcode != "reduce" or _reduced_size(each, operands[0].arrays[0]) > 1 else ""
    is_complex = each.opcode in ("multiply", "divide") and each.arrays[0].dtype in ("c64", "c128")
    is_sum = each.opcode in ("add", "subtract") and place.computation in flow.kernels
    return "product in a sum" if is_complex or (is_sum and any(_products(flow, place))) else ""


def _kind_of_call(each: Instruction, path: str, operands: Sequence[Instruction]) -> str:
    if kernels.NO_WORK.fullmatch(each.target) or kernels.MOVES.fullmatch(each.target):
        return ""
    if kernels.is_own_matmul(each.target, path) and all(x.arrays[0].dtype == "s8" for x in operands[:2]):
        return ""
    is_product = kernels.product_name(each.target, path) or re.search("gemm|matmul", each.target)
    return "matmul" if is_product else "kernel"


def _products(flow: Flow, place: Place) -> Iterator[Place]:
    """Yield the inexact products that an addition reads, unchanged, within its kernel."""

    def following(place: Place) -> Sequence[Place]:
        each = flow.instruction(place)
        if each.opcode == "select":
            # ``select(x > limit, limit, x)`` reads x twice, which keeps x apart from the sum. A mask does not: LLVM
            # moves the addition into the selection.
            read = reach(flow.sources(place)[:1], lambda each: flow.sources(each) if _is_test(flow, each) else ())
            return [arm for arm in flow.sources(place)[1:] if arm not in read]
        if each.opcode in _UNCHANGED:
            return flow.sources(place)[_UNCHANGED[each.opcode]]
        if each.opcode == "reduce-precision" and re.search(_KEEPS_FLOAT32, each.rest):
            return flow.sources(place)
        if each.opcode in _STRUCTURE:
            return [source for source in flow.sources(place) if source.computation in flow.kernels]
        return ()

    for value in reach(flow.sources(place), following):
        is_product = flow.instruction(value).opcode == "multiply" and value.computation in flow.kernels
        if is_product and not any(_is_power_of_two(flow, factor) for factor in flow.sources(value)):
            yield value


def _is_test(flow: Flow, place: Place) -> bool:
    return flow.instruction(place).opcode in ("compare", "is-finite", "abs", "and", "or", "not")


def _is_power_of_two(flow: Flow, place: Place) -> bool:
    """Return whether every element of a value is a power of two, zero, infinite or NaN, wherever it was computed."""
    is_proven = True

    def following(place: Place) -> Sequence[Place]:
        nonlocal is_proven
        each, sources = flow.instruction(place), flow.sources(place)
        if each.opcode in _UNCHANGED:
            return sources[_UNCHANGED[each.opcode]]
        if sources and (each.opcode in _STRUCTURE or each.opcode in ("multiply", "divide", "abs")):
            return sources
        is_proven &= _LEAVES.get(each.opcode, lambda *_: False)(flow, place)
        return ()

    reach([place], following)
    return is_proven


def _is_exact_constant(flow: Flow, place: Place) -> bool:
    try:
        value = float(np.float32(flow.instruction(place).arguments))  # HLO text has nine digits
    except ValueError:  # an array
        return False
    return not math.isfinite(value) or math.frexp(abs(value))[0] in (0.0, 0.5)


def _is_exact_cast(flow: Flow, place: Place) -> bool:
    return _operands(flow, place)[0].arrays[0].dtype in ("pred", "f8e8m0fnu")


def _is_exponent(flow: Flow, place: Place) -> bool:
    """Return whether a float32 is made of integers that are shifted into its exponent."""
    bits = _operands(flow, place)[0]
    if bits.opcode != "shift-left" or flow.instruction(place).arrays[0].dtype != "f32":
        return False
    by = reach([flow.sources(flow.sources(place)[0])[1]], flow.sources)
    return all(
        (each := flow.instruction(place)).opcode in ("broadcast", *_STRUCTURE)
        or (each.opcode == "constant" and each.arguments == "23")
        for place in by
    )


_LEAVES: dict[str, Callable[[Flow, Place], bool]] = {
    "constant": _is_exact_constant,
    "convert": _is_exact_cast,
    "bitcast-convert": _is_exponent,
}
"""Instruction that starts a value -> function that returns whether its elements are powers of two."""


def _adds(flow: Flow, each: Instruction) -> bool:
    """Return whether the reducer of an instruction adds or multiplies floats."""
    reducers = (flow.module.computations[name].values() for name in each.called)
    steps = [step for reducer in reducers for step in reducer if step.opcode in ("add", "multiply")]
    return any(_is_float(array) for step in steps for array in step.arrays)


def _is_slice_in_zeros(flow: Flow, place: Place) -> bool:
    """Return whether each device writes its own slice into zeros; the sum across devices then gathers the slices."""
    if flow.instruction(place).opcode != "dynamic-update-slice":
        return False
    zeros, part, *starts = _operands(flow, place)
    if part.bytes == zeros.bytes or zeros.opcode != "broadcast":
        return False
    filled = flow.module.computations[place.computation][zeros.operands[0]]
    by = {flow.instruction(each).opcode for each in reach([place._replace(name=x.name) for x in starts], flow.sources)}
    is_own = not by.isdisjoint(_NUMBERS) and by <= {*_NUMBERS, *_STRUCTURE, "constant", "add", "multiply", "convert"}
    return is_own and filled.opcode == "constant" and filled.arguments == "0"


def _reduced_size(each: Instruction, operand: Array) -> int:
    axes = re.search(r"dimensions=\{([\d,]*)\}", each.rest)
    return math.prod(operand.shape[int(axis)] for axis in axes[1].split(",") if axis) if axes else 1


def _operands(flow: Flow, place: Place) -> list[Instruction]:
    computation = flow.module.computations[place.computation]
    return [computation[name] for name in computation[place.name].operands]


def _types(flow: Flow, place: Place) -> str:
    given = ", ".join(str(array) for operand in _operands(flow, place)[:2] for array in operand.arrays[:1])
    return f"{given} → {flow.instruction(place).arrays[0]}"


def _is_float(array: Array) -> bool:
    return array.dtype.startswith(("f", "bf", "c"))
