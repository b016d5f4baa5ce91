"""Check of quant state in a step with gradients: state must advance, and must not be summed or treated as a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jaxquant.audit.dataflow import Graph, Value, ancestors
from jaxquant.audit.labels import LabeledContraction
from jaxquant.audit.scales import Origin
from jaxquant.core.paths import layer_name
from jaxquant.core.quant_state import BINS, HISTORY
from jaxquant.state.table import is_field
from jaxquant.state.watch import FROZEN_MARK
from jaxquant.trace.plan import CONTRACTIONS

_SUMS = frozenset({"add", "sub", "mul", "div"})
_POWERS = frozenset(
    {"integer_pow", "square", "sqrt", "rsqrt", "cbrt", "abs", "sign", "pow", "dot_general"}
    | {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "sin", "cos", "tan", "atan2", "asinh"}
)
_PARTS = frozenset(
    {"neg", "max", "min", "clamp", "select_n", "convert_element_type", "copy", "reshape", "broadcast_in_dim", "name"}
    | {"transpose", "squeeze", "expand_dims", "concatenate", "slice", "pad", "split", "dynamic_slice", "pvary", "pcast"}
    | {"dynamic_update_slice", "optimization_barrier", "branch", "shard", "unshard"}
    | {"scan_slice", "scan_stack", "scan_carry", "scan_result"}
)
"""Operations that move or select values without changing them."""
_LINEAR = _PARTS | {"add", "add_any", "sub", "mul", "div", "reduce_sum", "psum", "psum_invariant"}
_MOVES = _PARTS | {"sharding_constraint", "reshard", "device_put", "reduce_precision"}
_ADDS = frozenset({"add", "add_any", "sub", "scatter-add"})
_MIXED = _ADDS | {"mul", "div", "reduce_sum", "psum", "psum_invariant", "reduce_scatter", "cumsum"}
"""Operations that compute one number from several numbers, or a multiple of a number."""
_KEEPS_SUMS = _LINEAR | _MOVES | _MIXED | {"all_gather", "all_to_all", "ppermute", "gather", "scatter", "rev"}
"""Operations whose result contains a sum if one of their inputs contains the sum."""


class StateUse(NamedTuple):
    """Use of quant state in a step.

    Attributes:
      faults: error messages about state that does not advance, is overwritten with a sum, or is treated as a weight.
      frozen: paths of layers that are differentiated and whose state is frozen with ``state.frozen``.
    """

    faults: tuple[str, ...]
    frozen: tuple[str, ...]


def check_state(program: Graph, labeled: Sequence[LabeledContraction]) -> StateUse:
    """Find quant state that a step uses wrongly, and layers whose quant state is frozen.

    An amax history advances if a result contains the history, shifted by one entry. A history is treated as a weight if
    a result contains sums or multiples of the history, or if observations are squared or used as divisors, as norms and
    optimizers do. A history is lost if a step that trains parameters replaces it with sums or multiples of the
    observations.
    """
    # Histories in jaxquant's tables, and histories of flax's own ops, whose names also end in "amax_history".
    histories = [each for each in program.inputs if each.name and each.name[-1].endswith(HISTORY)]
    if not histories or not any(each.is_backward for each in labeled):
        return StateUse((), ())
    results = [each for each in program.outputs if each not in histories]
    reached = ancestors(results, stop=_is_reduced)
    rolled = ancestors([each for each in reached if each.operation == "concatenate"], stop=_is_reduced)
    layers, frozen = _differentiated_layers(labeled)
    faults: list[str] = []
    if touched := next(_find_summed(reached, histories, program.observed), None):
        faults.append(
            f"quant state {'/'.join(touched.name)!r} is added to or multiplied, as by an optimizer, a decay or an "
            "average of all variables; first remove the quant state with jaxquant.state.split, or use "
            "jaxquant.state.TrainState or jaxquant.state.Optimizer"
        )
    readers = _map_readers(ancestors(program.outputs))
    if lost := next(_find_overwritten(program, histories, readers, labeled), None):
        beside = {each.name[-1] for each in program.inputs if each.name[:-1] == lost.name[:-1]}
        fix = "use TrainState or Optimizer of jaxquant.state, or pass the observations to jaxquant.state.update"
        faults.append(
            f"quant state {'/'.join(lost.name)!r} is overwritten with the sum or a multiple of the observations of "
            "several uses, micro-batches or devices, as by flax's TrainState; "
            + (fix if BINS in beside else "set amax_init to 'warmup', because 'flax' supports a single use of a layer")
        )
    if any(_find_nonlinear(readers, program.observed)):
        faults.append(
            "observations of quant state are squared, used as a divisor or passed to a function, as by "
            "optax.global_norm, clipping or an optimizer of all gradients; pass only jaxquant.state.split(grads)[0] "
            "to the function, or use jaxquant.state.TrainState or jaxquant.state.Optimizer"
        )
    for path in dict.fromkeys(path for each in histories if each not in rolled for path in layers.get(each, ())):
        faults.append(
            f"{layer_name(path)} is differentiated, but its quant state does not advance; pass the observations to "
            "jaxquant.state.update, TrainState, Optimizer or apply_gradients, or use jaxquant.state.frozen()"
        )
    return StateUse(tuple(faults), tuple(frozen))


def _is_reduced(value: Value) -> bool:
    return value.operation.startswith(("reduce_", "arg")) or value.operation in CONTRACTIONS


def _differentiated_layers(labeled: Sequence[LabeledContraction]) -> tuple[dict[Value, list[str]], list[str]]:
    """Return the layers that are differentiated, by amax history, and the layers that are frozen.

    Returns:
      A mapping from each value on which a scale depends, such as an amax history, to the paths of the layers that use
      the scale; and the paths of the frozen layers.
    """
    layers: dict[Value, list[str]] = {}
    frozen: dict[str, None] = {}
    with_backward = {each.forward for each in labeled if each.is_backward}
    for forward in labeled:
        for operand in forward.origins if forward in with_backward else ():
            made = _scale_sources(operand)
            if any(value.operation == "name" and value.params.get("name") == FROZEN_MARK for value in made):
                frozen[forward.path] = None
                continue
            for value in made:
                layers.setdefault(value, []).append(forward.path)
    return layers, list(frozen)


def _scale_sources(operand: Origin) -> Iterable[Value]:
    """Return the values that the scale of an operand was computed from, up to the operand and other contractions."""
    scales = [] if operand.divisor is None else [operand.divisor]
    return ancestors(scales, lambda value: value is operand.source or value.operation in CONTRACTIONS)


def _find_summed(reached: Iterable[Value], histories: Sequence[Value], observed: set[Value]) -> Iterator[Value]:
    """Yield the histories from which sums or multiples are computed, unless only through observations."""
    shapes = {each.shape for each in histories}
    sums = [each for each in reached if each.operation in _SUMS and each.shape in shapes and each.dtype == "float32"]
    made = ancestors(sums, stop=lambda value: _is_reduced(value) or value in observed)
    yield from (each for each in histories if each in made)


def _map_readers(needed: Iterable[Value]) -> dict[Value, list[Value]]:
    """Return the values computed from each value."""
    readers: dict[Value, list[Value]] = {}
    for value in needed:
        for each in value.inputs:
            readers.setdefault(each, []).append(value)
    return readers


def _reachable(
    values: Iterable[Value], readers: Mapping[Value, Sequence[Value]], operations: Set[str] = _LINEAR
) -> set[Value]:
    """Return the values, and everything that ``operations`` (by default linear operations) compute from them."""
    known = set(values)
    queue = list(known)
    while queue:
        found = {each for each in readers.get(queue.pop(), ()) if each.operation in operations} - known
        known |= found
        queue += found
    return known


def _find_overwritten(
    program: Graph,
    histories: Sequence[Value],
    readers: Mapping[Value, Sequence[Value]],
    labeled: Sequence[LabeledContraction],
) -> Iterator[Value]:
    """Yield the histories that a training step replaces by sums of observations.

    Histories that no contraction depends on are ignored, for example while a large batch is accumulated.
    """
    known = _reachable(program.observed, readers, _KEEPS_SUMS)
    forward = ancestors(_operands(each for each in labeled if not each.is_backward))
    weights = {each for each in forward if each.operation == "argument" and not is_field(each.name)}
    if not any(_is_trained(each, weights) for each in program.outputs if each not in known):
        return
    sums = (each for each in known if each.operation in _MIXED and _is_mixed(each, known))
    summed = _reachable(sums, readers, _KEEPS_SUMS)
    results = [each for each in program.outputs if each not in histories]
    lost = _source_histories((each for each in results if each in summed), histories)
    if lost:
        lost -= _source_histories((each for each in results if each not in summed), histories)
        lost &= ancestors(_operands(labeled)).keys()
    yield from (each for each in histories if each in lost)


def _source_histories(results: Iterable[Value], histories: Sequence[Value]) -> set[Value]:
    """Return the histories from which results of their shape are computed."""
    alike: dict[tuple[int, ...], list[Value]] = {each.shape: [] for each in histories}
    for each in results:
        alike.get(each.shape, []).append(each)
    made = {shape: ancestors(values, stop=_is_lost) for shape, values in alike.items()}
    return {each for each in histories if each in made[each.shape]}


def _operands(labeled: Iterable[LabeledContraction]) -> Iterator[Value]:
    return (each for one in labeled for each in (one.contraction.lhs, one.contraction.rhs))


def _is_lost(value: Value) -> bool:
    return _is_reduced(value) and value.operation not in ("reduce_sum", "reduce_scatter")


def _is_mixed(value: Value, known: Set[Value]) -> bool:
    """Whether a value is a sum of known values or a multiple; a sum that joins padded parts does not count."""
    if value.operation not in _ADDS:
        return True
    parts = _sources([value], lambda each: each.operation in ("add", "add_any"))
    places = [str(each.params["padding_config"]) for each in parts if each.operation == "pad"]
    is_joined = len(set(places)) == len([each for each in parts if each.operation not in ("add", "add_any")])
    return not is_joined and all(each in known for each in value.inputs)


def _is_trained(result: Value, weights: Set[Value]) -> bool:
    """Whether a result is a weight plus an update, that is, a trained weight."""
    within = _sources([result], lambda each: each.operation in _MOVES | _ADDS)
    sums = _sources((each for each in within if each.operation in _ADDS), lambda each: each.operation in _MOVES | _ADDS)
    return any(each in weights and each.shape == result.shape for each in sums)


def _sources(values: Iterable[Value], is_open: Callable[[Value], bool]) -> dict[Value, None]:
    return ancestors(values, stop=lambda each: not is_open(each))


def _find_nonlinear(readers: Mapping[Value, Sequence[Value]], observed: set[Value]) -> Iterator[Value]:
    """Yield nonlinear results, such as squares and quotients, of observations or their sums."""
    known = _reachable(observed, readers)
    for value in {value for each in known for value in readers.get(each, ())}:
        both = value.operation in ("mul", "div") and all(each in known for each in value.inputs)
        if value.operation in _POWERS or both or (value.operation == "div" and value.inputs[1] in known):
            yield value
