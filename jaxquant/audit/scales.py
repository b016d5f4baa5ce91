"""Origins of matmul operands: the parameter, its quantization, and the granularity and scaling of its scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxquant.audit.dataflow import Value, ancestors
from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.matmul_dtypes import OperandDtype
from jaxquant.core.qtensor import CODEC_MARK
from jaxquant.core.rounding import HOLD
from jaxquant.ops.byte_dot import KEEP
from jaxquant.ops.contract import DEQUANTIZED_MARK

# Operations that keep the elements of their first input but change their position, shape or number.
_MOVES = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims", "rev", "slice", "dynamic_slice", "pad"}
    | {"copy", "copy_p", "name", "reduce_precision", "bitcast_convert_type", "optimization_barrier", KEEP, HOLD}
    | {"scan_slice", "scan_stack", "scan_result"}
    | {"sharding_constraint", "mesh_cast", "reshard", "shard", "unshard", "pvary", "pcast", "all_gather"}
)
# Operations between the division by the scale and the cast: clipping, rounding, noise, a zero point.
_ROUNDING = frozenset(
    {"max", "min", "clamp", "round", "floor", "ceil", "add", "sub", "select_n", "nextafter", "integer_pow"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Value that an operand was quantized from, and the operand's dtype and scale.

    Attributes:
      source: value before quantization, casts and changes of shape.
      dtype: dtype of the operand, and of the elements that a float operand was dequantized from.
      scale: granularity and scaling, such as "per tensor, delayed"; "" if the operand was never quantized.
      divisor: value of the scale in the graph, or None if no scale was found.
      is_emulated: whether the op marks the operand as dequantized because no matmul supports its scales.
    """

    source: Value
    dtype: OperandDtype
    scale: str = ""
    divisor: Value | None = None
    is_emulated: bool = False


def find_origin(value: Value) -> Origin:
    """Return the origin of an operand."""
    if value.dtype in ELEMENTS:
        return _origin_of_quantized(value)
    plain = _unmoved(value, through_casts=True)
    if (codec := _codec(plain)) is not None:
        source, scale = _origin_of_decoded(plain, codec)
        return Origin(source, OperandDtype(value.dtype, codec), scale)
    if (low := _find_quantized(plain)) is not None:
        found = _origin_of_quantized(low)
        dtype = OperandDtype(value.dtype, found.dtype.dtype)
        return dataclasses.replace(found, dtype=dtype, is_emulated=_is_emulated(value))
    return Origin(plain, OperandDtype(value.dtype))


def find_argument(value: Value) -> Value | None:
    """Return the argument or captured array that a value is an elementwise multiple of, e.g. a cast or masked kernel.

    The search continues from a loop's carry to its initial value of the same shape, which is a parameter in a loop of
    training steps. The search stops at a sum: the residual stream of a model is a sum that includes the model's input,
    but not a multiple of the input.
    """
    visited: set[int] = set()
    queue = [value]
    while queue:
        value = _unmoved(queue.pop(0), through_casts=True)
        if id(value) in visited:
            continue
        visited.add(id(value))
        if value.operation == "argument" or (value.operation == "constant" and value.size > 1):
            return value
        if value.operation in ("mul", "div", "select_n", "clamp"):
            queue += [each for each in value.inputs if each.size == value.size and each.operation != "broadcast_in_dim"]
        elif value.operation == "scan_carry" and value.inputs[0].shape == value.shape:
            queue.append(value.inputs[0])
    return None


def _unmoved(value: Value, through_casts: bool = False) -> Value:
    """Return the value before changes of position and shape, and before float casts if ``through_casts``."""
    while value.inputs:
        is_cast = value.operation == "convert_element_type" and value.inputs[0].dtype not in ELEMENTS
        if _codec(value) is not None or not (value.operation in _MOVES or (through_casts and is_cast)):
            break
        value = value.inputs[0]
    return value


def _is_emulated(value: Value) -> bool:
    while value.inputs and (value.operation in _MOVES or value.operation == "convert_element_type"):
        if value.params.get("name") == DEQUANTIZED_MARK:
            return True
        value = value.inputs[0]
    return False


def _codec(value: Value) -> str | None:
    """Return the tensor format that a value was decoded from or will be encoded in, or None."""
    name = value.params.get("name") if value.operation == "name" else None
    return name.removeprefix(CODEC_MARK) if isinstance(name, str) and name.startswith(CODEC_MARK) else None


def _origin_of_decoded(value: Value, codec: str) -> tuple[Value, str]:
    """Return (source, scale) of a value that was decoded from a tensor format."""
    reached = ancestors(value.inputs, lambda each: _codec(each) == codec)
    if (encoded := next((each for each in reached if _codec(each) == codec), None)) is not None:
        return _unmoved(encoded.inputs[0], through_casts=True), f"per block of {codec}, dynamic"
    return next((each for each in reached if each.operation == "argument" and each.dtype == "uint8"), value), "stored"


def _origin_of_quantized(value: Value) -> Origin:
    """Follow a low-precision value back through its cast and the division by its scale."""
    element = value.dtype
    while True:
        value = _unmoved(value)
        if value.operation == "convert_element_type" and value.inputs[0].dtype in ELEMENTS:
            value = value.inputs[0]  # int4 stored as int8 has the same values
            element = value.dtype
        elif value.operation == "select_n" and value.inputs[1].dtype in ELEMENTS:
            value = value.inputs[1]
        else:
            break
    dtype = OperandDtype(element)
    if value.operation != "convert_element_type":
        return Origin(value, dtype, "stored" if value.operation in ("argument", "constant") else "unknown scale")
    found = next(_divisions(value.inputs[0]), None)
    if found is None:
        return Origin(_unmoved(value.inputs[0], through_casts=True), dtype, "no scale")
    x, scale = found
    source = _unmoved(x, through_casts=True)
    made = _scaling(scale, source)
    if made == "static" and source.operation == "convert_element_type" and source.inputs[0].dtype == element:
        return _origin_of_quantized(source.inputs[0])  # qvalues that were cast to float and rounded back
    return Origin(source, dtype, f"{_granularity(x, scale)}, {made}", scale)


def _find_quantized(value: Value) -> Value | None:
    """Return the low-precision value that a float value is a multiple of, or None."""
    for _ in range(4):  # at most two scales, a zero point and a cast
        if value.operation == "convert_element_type" and value.inputs[0].dtype in ELEMENTS:
            return value.inputs[0]
        if value.operation not in ("mul", "sub", "convert_element_type"):
            return None
        value = _unmoved(next((v for v in value.inputs if v.size == value.size and not _repeats(v)), value.inputs[0]))
    return None


def _divisions(value: Value) -> Iterator[tuple[Value, Value]]:
    """Yield (dividend, scale) of divisions before a rounding, the likeliest first, including ``x * (1 / scale)``."""
    value = _unmoved(value)
    if value.operation in ("div", "mul"):
        first, second = value.inputs
        pairs = [(first, second)] if value.operation == "div" else [(first, second), (second, first)]
        for x, scale in pairs:
            if x.size == value.size and not _repeats(x) and (_repeats(scale) or _unbroadcast(scale).size < value.size):
                yield x, scale
        if value.size == 1 and value.operation == "div":
            yield first, second
        if first.size == second.size == value.size and not _repeats(second):
            yield from _divisions(first)  # for noise, second is the distance to the next representable value
    elif value.operation == "clamp":
        yield from _divisions(value.inputs[1])
    elif value.operation in _ROUNDING or (
        value.operation == "convert_element_type" and value.inputs[0].dtype not in ELEMENTS
    ):
        operands = value.inputs[1:] if value.operation == "select_n" else value.inputs
        for operand in operands:
            if operand.size == value.size:
                yield from _divisions(operand)


def _repeats(value: Value) -> bool:
    """Whether a value is a broadcast of a smaller value."""
    return _unbroadcast(value).size < value.size


def _unbroadcast(value: Value) -> Value:
    """Return the value before broadcasts."""
    while value.operation in ("broadcast_in_dim", "reshape", "expand_dims", "squeeze", "convert_element_type"):
        if value.inputs[0].dtype in ELEMENTS:
            break
        value = value.inputs[0]
    return value


def _granularity(x: Value, scale: Value) -> str:
    """Return the granularity of a scale: "per tensor", "per tile" or "per channel"."""
    if _unbroadcast(scale).size == 1:
        return "per tensor"
    kept = _varying_axes(scale)
    for first, second in _split_axes(x):
        if (first in kept) != (second in kept):
            return "per tile"
    return "per channel"


def _varying_axes(scale: Value) -> set[int]:
    """Return the axes of a division along which its scale varies."""
    if scale.operation != "broadcast_in_dim":
        return {axis for axis, size in enumerate(scale.shape) if size > 1}
    places = scale.params["broadcast_dimensions"]
    return {places[axis] for axis, size in enumerate(scale.inputs[0].shape) if size > 1}


def _split_axes(x: Value) -> Iterator[tuple[int, int]]:
    """Yield pairs of adjacent axes of x that a reshape split from one axis."""
    while x.operation == "convert_element_type":
        x = x.inputs[0]
    place = list(range(len(x.shape)))  # position in x of each axis of the current value
    if x.operation == "transpose":
        place = [x.params["permutation"].index(axis) for axis in place]
        x = x.inputs[0]
    if x.operation != "reshape":
        return
    before, axis = x.inputs[0].shape, 0
    for size in before:
        first, done = axis, 1
        while axis < len(x.shape) and done < size:
            done *= x.shape[axis]
            axis += 1
        if done != size:
            return
        yield from ((place[i], place[i + 1]) for i in range(first, axis - 1))
        if size == 1 and axis < len(x.shape) and x.shape[axis] == 1:
            axis += 1


def _scaling(scale: Value, source: Value) -> str:
    """Return "delayed" if a scale is computed from another argument, "dynamic" if from the tensor, else "static"."""
    reached = ancestors([scale], lambda value: value is source or value.operation == "argument")
    if any(value.operation == "argument" and value is not source for value in reached):
        return "delayed"
    return "dynamic" if source in reached else "static"
