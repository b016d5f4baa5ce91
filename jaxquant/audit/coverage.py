"""coverage: every contraction that a function runs, with the dtypes that it really has, and why the float ones are."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxquant.audit.dataflow import Value, ancestors, contractions
from jaxquant.audit.labels import Placed, place, weight_side
from jaxquant.audit.rows import MATMULS, Coverage, Row
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.dtypes import element
from jaxquant.core.recipe import FORWARD, Recipe, TensorSpec
from jaxquant.inject.layers import LayerReport

_JITTED = type(jax.jit(lambda: None))


def coverage(
    fn: Callable[..., Any],
    *args: Any,
    config: Any = None,
    layers: Iterable[LayerReport] | None = None,
    **kwargs: Any,
) -> Coverage:
    """List every contraction that a function runs, forward and backward, without running it.

    The function is traced and all that it calls is looked into: jitted functions, scans, branches, rematerialized
    blocks, shards, Pallas kernels. What is listed is what the program asks for, without what no output and no side
    effect needs; a compiler may still fall back to another dtype.

    Args:
      fn: any function of arrays, such as a training step; jitted or not, quantized by whatever library.
      args, kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``.
      config: anything that ``QuantConfig.from_any`` takes, for reasons and for ``Coverage.check``.
      layers: what ``describe_layers`` says of the model, which knows the layers better than ``config`` alone.

    Raises:
      TypeError: fn cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"coverage takes a function and its arguments, got {type(fn).__name__}")
    jitted: Any = fn if isinstance(fn, _JITTED) else jax.jit(fn)
    traced = jitted.trace(*args, **kwargs)
    return of_trace(traced, config=config, layers=layers)


def of_trace(traced: Any, config: Any = None, layers: Iterable[LayerReport] | None = None) -> Coverage:
    """List the contractions of a traced function, ``jax.jit(fn).trace(*args)``; else as ``coverage``."""
    paths = jax.tree_util.tree_flatten_with_path(traced.args_info)[0]
    names = [tuple(_key(key) for key in path[1:]) for path, _ in paths]  # the first key tells args from kwargs
    decide = _decider(config, layers)
    placed = place(contractions(traced.jaxpr, names), decide.reports)
    rows = tuple(_row(each, decide) for each in placed)
    return Coverage(rows, tuple(_missing(placed, decide)))


def _missing(placed: Sequence[Placed], decide: _Decider) -> Iterator[str]:
    """Name the layers to quantize that are not there, and of those that are there the backward matmuls that are not.

    The gradient of a layer's input is asked for where a layer that is trained itself comes before it.
    """
    layers: dict[str, list[Placed]] = {path: [] for path, report in decide.reports.items() if report.recipe}
    for each in placed:
        if each.path in layers or ((decision := decide(each)) is not None and any(decision.wanted.values())):
            layers.setdefault(each.path, []).append(each)
    trained = {each.path for each in placed if each.is_backward and each.path}
    results = {each.contraction.out for each in placed if not each.is_backward and each.path in trained}
    has_backward = any(each.is_backward for each in placed)
    for path, own in layers.items():
        name = path or "the model itself"
        if not own:
            yield name
        elif has_backward:
            found = Counter(each.matmul for each in own if each.is_backward)
            wanted = ("drhs",) if found["dlhs"] or not _comes_after(own, results) else ("dlhs", "drhs")
            absent = [matmul for matmul in wanted if not found[matmul]]
            if len(absent) > found["bwd"]:
                yield from (f"{name} {matmul}" for matmul in absent)


def _comes_after(layer: Sequence[Placed], results: set[Value]) -> bool:
    """Whether the activation of a layer is computed from some of these results."""
    activations = [
        (each.contraction.lhs, each.contraction.rhs)[1 - side]
        for each in layer
        if not each.is_backward and (side := weight_side(each)) is not None
    ]
    return not results.isdisjoint(ancestors(activations))


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclasses.dataclass(frozen=True)
class _Decision:
    wanted: dict[str, tuple[str, ...]]
    reason: str


@dataclasses.dataclass(frozen=True)
class _Decider:
    """What a config makes of a contraction: of known layers by their report, else by its rules."""

    reports: dict[str, LayerReport]
    resolver: Resolver | None
    has_config: bool

    @property
    def is_off(self) -> bool:
        return self.has_config and not self.reports and self.resolver is None

    def __call__(self, each: Placed) -> _Decision | None:
        """Decide, or give None for what is no linear layer."""
        if each.path in self.reports:
            report = self.reports[each.path]
            wanted = {name: _dtypes_of(getattr(report, name)) for name in MATMULS}
            return _Decision(wanted, _reason(report.recipe, report.reason))
        forward = each.forward
        if self.reports or self.resolver is None or forward is None or not _has_kernel(forward):
            return None
        decision = self.resolver(each.path, _out_features(forward))
        recipe = decision.recipe
        if recipe is None:
            return _Decision(dict.fromkeys(MATMULS, ()), decision.reason)
        wanted = {name: _recipe_dtypes(recipe, name) for name in MATMULS}
        return _Decision(wanted, _reason(recipe.name, decision.reason))


def _reason(recipe: str | None, reason: str) -> str:
    return reason if recipe is None or repr(recipe) in reason else f"{recipe}, by {reason}"


def _decider(config: Any, layers: Iterable[LayerReport] | None) -> _Decider:
    resolver = None if config is None else QuantConfig.from_any(config).resolver()
    reports = {report.path: report for report in layers or ()}
    return _Decider(reports, resolver, config is not None or layers is not None)


def _has_kernel(each: Placed) -> bool:
    return any(name and name[-1] in ("kernel", "value") for name in each.parameters)


def _out_features(forward: Placed) -> int:
    """Count the outputs of a layer: the free axes of its weight."""
    side, numbers = weight_side(forward), forward.contraction.dimension_numbers
    if side is None or numbers is None:
        return 0
    shape = (forward.contraction.lhs, forward.contraction.rhs)[side].shape
    used = {*numbers[0][side], *numbers[1][side]}
    return math.prod(size for axis, size in enumerate(shape) if axis not in used)


def _dtypes_of(text: str) -> tuple[str, ...]:
    """Read "int8 × int8" of a ``LayerReport``; () for float."""
    return () if text.startswith("float (") or text == "float" else tuple(text.split(" × "))


def _recipe_dtypes(recipe: Recipe, name: str) -> tuple[str, ...]:
    matmul = getattr(recipe, name)
    specs = [
        (forward if spec == FORWARD else spec)
        for spec, forward in ((matmul.lhs, recipe.fwd.lhs), (matmul.rhs, recipe.fwd.rhs))
    ]
    found = tuple(spec.dtype for spec in specs if isinstance(spec, TensorSpec))
    return found if len(found) == 2 else ()


def _row(each: Placed, decide: _Decider) -> Row:
    contraction = each.contraction
    sides = [(contraction.lhs, each.origins[0]), (contraction.rhs, each.origins[1])]
    if each.swapped:
        sides.reverse()
    (lhs, left), (rhs, right) = sides
    found = (left.element, right.element)
    is_low = all(found)
    decision = decide(each)
    wanted: tuple[str, ...] = ()
    fault = ""
    if decision is not None:
        wanted = decision.wanted["dlhs" if each.matmul == "bwd" else each.matmul]
        choices = [decision.wanted["dlhs"], decision.wanted["drhs"]] if each.matmul == "bwd" else [wanted]
        if not any(_fits(found, choice) for choice in choices):
            got = " × ".join((left.dtype, right.dtype))
            fault = f"{' × '.join(wanted) or 'float'} is wanted ({decision.reason}) and {got} is there"
        reason = decision.reason
        if not is_low and not wanted and any(decision.wanted.values()):
            reason = f"{each.matmul} stays float in {decision.reason}"
    elif is_low:
        reason = "" if not decide.has_config else "no layer that the config knows"
        if decide.has_config:
            fault = f"float is wanted (no linear layer of the model) and {left.dtype} × {right.dtype} is there"
    else:
        reason = _float_reason(each, decide)
        if each.is_stray and decide.has_config and not decide.is_off:
            fault = f"a weight gradient in {left.dtype} × {right.dtype}, and nothing tells of which layer"
    return Row(
        each.path,
        each.matmul,
        contraction.operation,
        lhs.shape,
        rhs.shape,
        left.dtype,
        right.dtype,
        contraction.out.dtype,
        left.scale,
        right.scale,
        contraction.times,
        contraction.flops,
        each.is_recomputed,
        is_low,
        wanted,
        fault or reason,
        fault,
    )


def _fits(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether operands have the dtypes that are wanted; a wider integer holds the values of a narrower one."""
    if not wanted:
        return not all(found)
    return all(map(_holds, found, wanted))


def _holds(found: str, wanted: str) -> bool:
    if found == wanted or not found:
        return found == wanted
    a, b = element(found), element(wanted)
    return a.kind == b.kind == "int" and a.bits > b.bits


def _float_reason(each: Placed, decide: _Decider) -> str:
    names = [name for name in (each.forward or each).parameters if name]
    if any(name[-1] == "embedding" for name in names):
        return "embeddings stay float"
    if not names:
        return "no parameter: activation × activation"
    if decide.has_config:
        return "quantization is off" if decide.is_off else "not a linear layer of the model"
    return "float operands: no quantization reached it"
