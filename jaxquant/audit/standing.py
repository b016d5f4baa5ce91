"""Standing: quant state that a step with gradients leaves as it was, or treats as a weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxquant.audit.dataflow import Graph, Value, ancestors
from jaxquant.audit.labels import LabeledContraction
from jaxquant.audit.scales import Origin
from jaxquant.core.quant_state import HISTORY, is_named
from jaxquant.state.watch import FROZEN_MARK
from jaxquant.trace.plan import CONTRACTIONS

_SUMS = frozenset({"add", "sub", "mul", "div"})
_POWERS = frozenset(
    {"integer_pow", "square", "sqrt", "rsqrt", "cbrt", "abs", "sign", "pow", "dot_general"}
    | {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos", "tan", "atan2", "asinh"}
)
_LINEAR = frozenset(
    {"add", "add_any", "sub", "neg", "mul", "div", "max", "min", "clamp", "select_n", "convert_element_type", "copy"}
    | {"reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "concatenate", "slice", "name", "pad"}
    | {"split", "dynamic_slice", "dynamic_update_slice", "reduce_sum", "optimization_barrier", "psum", "pvary", "pcast"}
    | {"scan_slice", "scan_stack", "scan_carry", "scan_result", "shard", "unshard", "branch"}
)


class Standing(NamedTuple):
    """What becomes of quant state in a step.

    Attributes:
      faults: sentences about state that stands still, or is treated as a weight.
      frozen: paths of layers that are differentiated and whose state stands still on purpose, ``state.frozen``.
    """

    faults: tuple[str, ...]
    frozen: tuple[str, ...]


def standing(program: Graph, labeled: Sequence[LabeledContraction]) -> Standing:
    """Find quant state of layers with a backward pass that does not advance.

    An amax history advances where a result holds it rolled on. It is treated as a weight where a result holds sums or
    multiples of it, or where what was observed is squared or divided by, as norms and optimizers do.
    """
    histories = [each for each in program.inputs if each.name and is_named(each.name[-1], HISTORY)]
    if not histories or not any(each.is_backward for each in labeled):
        return Standing((), ())
    results = [each for each in program.outputs if each not in histories]
    reached = ancestors(results, stop=_is_reduced)
    rolled = ancestors([each for each in reached if each.operation == "concatenate"], stop=_is_reduced)
    layers, frozen = _differentiated(labeled)
    faults: list[str] = []
    if touched := next(_summed(reached, histories, program.observed), None):
        faults.append(
            f"quant state {'/'.join(touched.name)!r} is added to or multiplied, as an optimizer, a decay or an average "
            "of all variables does; give them parameters alone (jaxquant.state.split), or use "
            "jaxquant.state.TrainState or Optimizer"
        )
    if any(_raised(ancestors(program.outputs), program.observed)):
        faults.append(
            "what was observed of quant state is squared or divided by, or a function of it taken, as "
            "optax.global_norm, clipping or an optimizer of all gradients does; give them "
            "jaxquant.state.split(grads)[0], or use jaxquant.state.TrainState or Optimizer"
        )
    for path in dict.fromkeys(path for each in histories if each not in rolled for path in layers.get(each, ())):
        faults.append(
            f"{path}: it is differentiated and its quant state stands still; hand what was observed to "
            "jaxquant.state.update, TrainState, Optimizer or apply_gradients, or hold jaxquant.state.frozen()"
        )
    return Standing(tuple(faults), tuple(frozen))


def _is_reduced(value: Value) -> bool:
    return value.operation.startswith(("reduce_", "arg")) or value.operation in CONTRACTIONS


def _differentiated(labeled: Sequence[LabeledContraction]) -> tuple[dict[Value, list[str]], list[str]]:
    """Return, by amax history, the paths of the layers with a backward pass that it scales; and those frozen."""
    layers: dict[Value, list[str]] = {}
    frozen: dict[str, None] = {}
    with_backward = {each.forward for each in labeled if each.is_backward}
    for forward in labeled:
        for operand in forward.origins if forward in with_backward else ():
            made = _made_of(operand)
            if any(value.operation == "name" and value.params.get("name") == FROZEN_MARK for value in made):
                frozen[forward.path] = None
                continue
            for value in made:
                layers.setdefault(value, []).append(forward.path)
    return layers, list(frozen)


def _made_of(operand: Origin) -> Iterable[Value]:
    """Return what the scale of an operand was computed from, as far back as the operand and other contractions."""
    scales = [] if operand.divisor is None else [operand.divisor]
    return ancestors(scales, lambda value: value is operand.source or value.operation in CONTRACTIONS)


def _summed(reached: Iterable[Value], histories: Sequence[Value], observed: set[Value]) -> Iterator[Value]:
    """Yield the histories that sums or multiples of their shape are made of, other than in what was observed."""
    shapes = {each.shape for each in histories}
    sums = [each for each in reached if each.operation in _SUMS and each.shape in shapes and each.dtype == "float32"]
    made = ancestors(sums, stop=lambda value: _is_reduced(value) or value in observed)
    yield from (each for each in histories if each in made)


def _raised(needed: Iterable[Value], observed: set[Value]) -> Iterator[Value]:
    """Yield what is squared, divided by or the like of what was observed, sums of it included."""
    readers: dict[Value, list[Value]] = {}
    for value in needed:
        for each in value.inputs:
            readers.setdefault(each, []).append(value)
    known, queue = set(observed), [each for each in needed if each in observed]
    while queue:
        for value in readers.get(queue.pop(), ()):
            both = value.operation in ("mul", "div") and all(each in known for each in value.inputs)
            if value.operation in _POWERS or both or (value.operation == "div" and value.inputs[1] in known):
                yield value
            elif value.operation in _LINEAR and value not in known:
                known.add(value)
                queue.append(value)
