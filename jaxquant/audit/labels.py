"""Labels for contractions: which layer each one belongs to, and which of its three matmuls it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxquant.audit.dataflow import Contraction, Value, ancestors
from jaxquant.audit.parameters import Reading, read
from jaxquant.audit.scales import Origin, argument, carried_argument, origin
from jaxquant.trace.paths import Name
from jaxquant.trace.plan import Contraction as Site

_TRANSFORM = re.compile(r"(\w+)\((.*)\)")
_OP_MODULE = re.compile(r"(Aqt\w*|aqt_\w+|Fp8\w+|NANOO\w+|DotGeneral)_\d+(\..*)?|aqt_\w+|DotGeneral|dlhs|drhs")
_NO_MODULE = frozenset({"rematted_computation", "checkpoint", "remat"})
_CAPTURED = ("array captured by the function",)
_ROOT = re.compile(r"[A-Z][A-Za-z0-9]*")


@dataclasses.dataclass(eq=False)
class LabeledContraction:
    """A contraction with its layer and matmul.

    Attributes:
      contraction: as found.
      origins: of its operands, as executed.
      arguments: for each operand the argument, or captured array, that it is a multiple of, or None.
      carried: the same, and for what a loop carries the argument that it begins with.
      site: what ``trace.analysis`` says of it, None where it multiplies no parameter.
      scopes: module scopes and equations around it, without those of transformations and quantized ops.
      op_label: "dlhs" or "drhs" where the quantized op's own scopes say so.
      is_backward, is_recomputed: within the backward pass; a forward matmul done again there.
      path: "/"-joined module path.
      matmul: "fwd", "dlhs", "drhs", or "bwd" where it cannot be told which of the two.
      swapped: its operands stand in another order than activation · weight, grad · weight, activation · grad.
      forward: the forward contraction that a backward one belongs to, where it was found; itself for a forward one.
      is_stray: a backward one that shares no operand with a forward one and that no other backward one is computed
        from: a weight gradient, and nothing tells of which weight.
    """

    contraction: Contraction
    origins: tuple[Origin, Origin]
    arguments: tuple[Value | None, Value | None]
    carried: tuple[Value | None, Value | None]
    scopes: tuple[str, ...]
    op_label: str
    is_backward: bool
    is_recomputed: bool
    site: Site | None = None
    path: str = ""
    matmul: str = "fwd"
    swapped: bool = False
    forward: LabeledContraction | None = None
    is_stray: bool = False

    @property
    def parameters(self) -> tuple[Name | None, Name | None]:
        """For each operand the path of the argument whose elements it holds, or None."""
        left, right = (None if value is None else value.name or _CAPTURED for value in self.arguments)
        return left, right

    @property
    def modules(self) -> tuple[str, ...]:
        """Scopes that are modules: without einsum equations, and methods without their names."""
        return tuple(scope.partition(".")[0] for scope in self.scopes if not re.search(r"->|,", scope))


def label_contractions(
    closed: Any, names: Sequence[Name], found: Iterable[Contraction], layers: Iterable[str]
) -> tuple[list[LabeledContraction], Reading]:
    """Label contractions with the path of their layer and with their matmul.

    A path is that of the parameter, as ``jaxquant.quantize`` spells it, or of the known layer that this belongs to.
    What multiplies no parameter (the gradients of parameters do not) has the path of the forward contraction with which
    it shares an operand, and otherwise that of the name scopes around it. Which backward matmul one is follows from
    the operand that it shares with the forward matmul: the weight (dlhs) or the activation (drhs).

    Args:
      closed: jaxpr of a program.
      names: of its inputs.
      found: its contractions.
      layers: paths of the layers that are known.
    """
    labeled = [_open(contraction) for contraction in found]
    known = [tuple(path.split("/")) for path in layers]
    reading = read(closed, names, [each for each in labeled if not each.is_backward], known)
    for each in labeled:
        each.site = reading.site(each.contraction.context)
        if each.site is not None:
            each.path = _known_path(reading.path(each.site), each, known)
    groups: dict[tuple[str, ...], list[LabeledContraction]] = {}
    for each in labeled:
        groups.setdefault(_without_repeats(each.scopes), []).append(each)
    _label_by_operands(labeled, groups)
    for scopes, group in groups.items():
        if scopes:
            _label_by_scopes(group, known)
    layered = {each.path for each in labeled if each.site is not None and each.path}
    by_layer: dict[tuple[tuple[str, ...], str], list[LabeledContraction]] = {}
    for each in labeled:
        scopes = () if each.path in layered else _without_repeats(each.scopes)
        by_layer.setdefault((scopes, each.path), []).append(each)
    for group in by_layer.values():
        _find_matmuls(group)
    _find_strays(labeled)
    return labeled, reading


def _known_path(path: str, each: LabeledContraction, known: Sequence[Name]) -> str:
    """Return the known layer that a parameter's path belongs to, or a scope around it does; else the path."""
    if known == [("",)]:  # a model that is a layer itself
        return ""
    for whole in (tuple(path.split("/")), each.modules):
        if matches := [layer for layer in known if contains(whole, layer)]:
            return "/".join(max(matches, key=len))
    return path


def _label_by_scopes(group: Sequence[LabeledContraction], known: Sequence[Name]) -> None:
    """Label what multiplies no parameter, of the contractions in the same scopes."""
    layers = {each.path for each in group if each.site is not None}
    if known == [("",)]:
        path = ""
    elif len(layers) == 1 and all(each.site is not None for each in group if not each.is_backward):
        [path] = layers
    else:
        path = _path(group, known)
    for each in group:
        if each.site is None and not each.path:
            each.path = path


def _label_by_operands(labeled: Sequence[LabeledContraction], groups: dict[Name, list[LabeledContraction]]) -> None:
    """Label backward contractions without a parameter by a forward one that each shares an operand with.

    Of several it is one of a shape that fits; then the one whose layer has the other gradient from the same output
    gradient already; then one that has none yet. Where there is no such, one of a shape that fits whose layer has the
    other gradient from the same output gradient.
    """
    forward = [each for each in labeled if not each.is_backward]
    paths: dict[Value, set[str]] = {}
    for each in labeled:
        if each.is_backward and each.path:
            for found in each.origins:
                paths.setdefault(found.source.known_as, set()).add(each.path)
    taken: set[int] = set()
    for each in labeled:
        if not each.is_backward or each.path or each.site is not None:
            continue
        near = [other for other in groups[_without_repeats(each.scopes)] if not other.is_backward]
        by_gradient = set[str]().union(*(paths.get(found.source.known_as, ()) for found in each.origins))
        choice = [other for other in (near if each.scopes else forward) if _same_source(each, other)]
        if not choice:
            choice = [other for other in forward if other.path in by_gradient]
            choice = [other for other in choice if _is_gradient_of(each.contraction, other.contraction)]
        for better in (
            [other for other in choice if _is_gradient_of(each.contraction, other.contraction)],
            [other for other in choice if other.path in by_gradient],
            [other for other in choice if id(other) not in taken],
        ):
            choice = [other for other in choice if other in better] or choice
        if choice:
            each.path, each.scopes = choice[0].path, choice[0].scopes
            taken.add(id(choice[0]))


def _is_gradient_of(backward: Contraction, forward: Contraction) -> bool:
    return any(_continues(backward, mine, forward, theirs) for mine in (0, 1) for theirs in (0, 1))


def _open(contraction: Contraction) -> LabeledContraction:
    scopes: list[str] = []
    is_backward = is_recomputed = False
    label = ""
    for part in (part for text in contraction.stack for part in _split(text)):
        while match := _TRANSFORM.fullmatch(part):
            is_backward |= match[1] == "transpose"
            part = match[2]
        is_recomputed |= part == "rematted_computation"
        if part.endswith(("dlhs", "drhs")) and _OP_MODULE.fullmatch(part):
            label = part[-4:]
        if part and part not in _NO_MODULE and not _OP_MODULE.fullmatch(part):
            scopes.append(part)
    origins = (origin(contraction.lhs), origin(contraction.rhs))
    arguments = (argument(origins[0].source), argument(origins[1].source))
    carried = (arguments[0] or carried_argument(origins[0].source), arguments[1] or carried_argument(origins[1].source))
    is_backward &= not is_recomputed
    return LabeledContraction(
        contraction, origins, arguments, carried, tuple(scopes), label, is_backward, is_recomputed
    )


def _without_repeats(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the second of leading scopes that stand twice, as in the backward pass of a rematerialized block."""
    for size in range(1, len(scopes) // 2 + 1):
        while scopes[:size] == scopes[size : 2 * size]:
            scopes = scopes[size:]
    return scopes


def _split(text: str) -> list[str]:
    """Cut a name stack at the slashes outside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def contains(whole: Sequence[str], part: Sequence[str]) -> bool:
    """Return whether the names of ``part`` stand one behind the other somewhere in ``whole``."""
    return any(tuple(whole[i : i + len(part)]) == tuple(part) for i in range(len(whole) - len(part) + 1))


def _path(group: Sequence[LabeledContraction], known: Sequence[tuple[str, ...]]) -> str:
    modules = group[0].modules
    matches = [path for path in known if contains(modules, path)]
    if matches:
        return "/".join(max(matches, key=len))
    for name in (name for each in group for name in each.parameters if name):
        runs = [name[i:-1] for i in range(len(name) - 1)]
        if run := next((run for run in runs if contains(modules, run)), None):
            return "/".join(run)
    start = 0
    while start < len(modules) and _ROOT.fullmatch(modules[start]):
        start += 1
    return "/".join(modules[start:])


def weight_side(each: LabeledContraction) -> int | None:
    """Return which operand of a forward contraction is a parameter: 0, 1, or None where none is."""
    if each.site is not None and each.site.side is not None:
        return each.site.side
    path = tuple(each.path.split("/")) if each.path else ()
    named = [side for side, name in enumerate(each.parameters) if name and path and contains(name, path)]
    if len(named) == 1:
        return named[0]
    given = [side for side, name in enumerate(each.parameters) if name is not None]
    return given[-1] if given else None


def _find_matmuls(group: Sequence[LabeledContraction]) -> None:
    forward = [each for each in group if not each.is_backward]
    for each in forward:
        each.swapped, each.forward = weight_side(each) == 0, each
    for each in group:
        if not each.is_backward:
            continue
        first = next((f for f in forward if _shared(each, f) is not None), forward[0] if forward else None)
        each.forward = first
        if first is not None:
            each.matmul, residual = _backward_matmul(each, first)
            each.swapped = residual == (1 if each.matmul == "drhs" else 0)
        else:
            each.matmul = each.op_label or "bwd"


def _find_strays(labeled: Sequence[LabeledContraction]) -> None:
    forward = [each for each in labeled if not each.is_backward]
    backward = [each for each in labeled if each.is_backward]
    sources = {origin.source.known_as for each in forward for origin in each.origins}
    ends = {each.contraction.out for each in forward}

    def is_left(value: Value) -> bool:
        """Whether a value is of the forward pass, or of a loop's step before: a parameter that was trained there."""
        return value in ends or value.operation == "scan_carry"

    operands = [operand for each in backward for operand in (each.contraction.lhs, each.contraction.rhs)]
    used = ancestors(operands, stop=is_left)
    for each in backward:
        shares = each.site is not None or any(origin.source.known_as in sources for origin in each.origins)
        each.is_stray = not shares and not any(each.parameters) and each.contraction.out not in used


def _shared(each: LabeledContraction, forward: LabeledContraction) -> tuple[int, int] | None:
    """Return (side, side of the forward) of the one operand that a backward contraction shares with a forward one."""
    pairs = _same_source(each, forward) or [
        (mine, theirs)
        for mine in (0, 1)
        for theirs in (0, 1)
        if each.parameters[mine] not in (None, _CAPTURED) and each.parameters[mine] == forward.parameters[theirs]
    ]
    return pairs[0] if len(pairs) == 1 else None


def _same_source(each: LabeledContraction, forward: LabeledContraction) -> list[tuple[int, int]]:
    sides = [(mine, theirs) for mine in (0, 1) for theirs in (0, 1)]
    mine, theirs = ([found.source.known_as for found in both.origins] for both in (each, forward))
    return [pair for pair in sides if mine[pair[0]] is theirs[pair[1]]]


def _backward_matmul(each: LabeledContraction, forward: LabeledContraction) -> tuple[str, int]:
    """Return the matmul and which of its operands is the forward's, activation being lhs and weight rhs.

    Where the side cannot be told it is the second: jax and the quantization libraries put the gradient first.
    """
    names = ("drhs", "dlhs") if not forward.swapped else ("dlhs", "drhs")  # by the forward's operand that is shared
    if shared := _shared(each, forward):
        return names[shared[1]], shared[0]
    if each.site is not None and each.site.side is not None:
        return "dlhs", each.site.side
    if each.op_label:
        # The op's own lhs and rhs are those of the executed forward matmul.
        return names[0 if each.op_label == "drhs" else 1], 1
    weight = weight_side(forward)
    if weight is not None and forward.parameters[weight] not in each.parameters:
        return names[1 - weight], 1  # the weight is in neither operand, so the activation is: made again, under remat
    fits = {
        theirs: mine
        for theirs in (0, 1)
        for mine in (0, 1)
        if _continues(each.contraction, mine, forward.contraction, theirs)
    }
    if len(fits) == 1:
        [(theirs, mine)] = fits.items()
        return names[theirs], mine
    return "bwd", 1


def _continues(backward: Contraction, mine: int, forward: Contraction, theirs: int) -> bool:
    """Whether an operand of a backward matmul can be one of the forward's: its shape, its axes, the result's size."""
    if backward.dimension_numbers is None or forward.dimension_numbers is None:
        return False
    operand, residual = ((backward.lhs, backward.rhs)[mine], (forward.lhs, forward.rhs)[theirs])
    other = (forward.lhs, forward.rhs)[1 - theirs]
    grad = (backward.lhs, backward.rhs)[1 - mine]
    if operand.shape != residual.shape or backward.out.size != other.size or grad.size != forward.out.size:
        return False
    contracted, batch = backward.dimension_numbers[0][mine], backward.dimension_numbers[1][mine]
    was_contracted, was_batch = forward.dimension_numbers[0][theirs], forward.dimension_numbers[1][theirs]
    free = set(range(len(residual.shape))) - set(was_contracted) - set(was_batch)
    return set(contracted) == free and set(batch) == set(was_batch)
