"""Labels of contractions: layer and matmul (fwd, dlhs or drhs) of each contraction."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxquant.audit.dataflow import Contraction, Value, ancestors
from jaxquant.audit.parameters import FunctionAnalysis, contains
from jaxquant.audit.scales import Origin, find_origin
from jaxquant.core.hadamard import SCOPE
from jaxquant.core.matmul_dtypes import MatmulDtypes
from jaxquant.trace.paths import Name
from jaxquant.trace.plan import Contraction as Site
from jaxquant.trace.report import Row as LayerRow

_OP_MODULE = re.compile(r"(Aqt\w*|aqt_\w+|Fp8\w+|NANOO\w+|DotGeneral)_\d+(\..*)?|aqt_\w+|DotGeneral|dlhs|drhs")
_REMAT = "rematted_computation"
_NO_MODULE = frozenset({_REMAT, "checkpoint", "remat", ""})
_ROOT = re.compile(r"[A-Z][A-Za-z0-9]*")


@dataclasses.dataclass(eq=False)
class LabeledContraction:
    """Contraction with its layer and matmul.

    Attributes:
      contraction: contraction in the graph.
      origins: origins of the operands, in executed order.
      site: the contraction in ``trace.analysis``, or None if no operand is a parameter.
      scopes: enclosing module scopes and einsum equations, without scopes of transformations and quantized ops.
      op_label: "dlhs" or "drhs" if the scopes of the quantized op contain this word, else "".
      is_backward: whether the contraction is a matmul of the backward pass, but not a recomputed forward matmul.
      is_recomputed: whether the contraction is a forward matmul that the backward pass recomputes.
      path: "/"-joined module path.
      matmul: "fwd", "dlhs", "drhs", "bwd" for a backward matmul of unknown side, or "update" in an optimizer.
      swapped: whether the operands are in another order than activation · weight, grad · weight, activation · grad.
      forward: for a backward contraction, its forward contraction, or None if it was not found; a forward contraction
        refers to itself.
    """

    contraction: Contraction
    origins: tuple[Origin, Origin]
    scopes: tuple[str, ...]
    op_label: str
    is_backward: bool
    is_recomputed: bool
    site: Site | None = None
    path: str = ""
    matmul: str = "fwd"
    swapped: bool = False
    forward: LabeledContraction | None = None

    @property
    def input_sides(self) -> list[int]:
        """Indices of the operands that come from an argument or from an array that the function captures."""
        return [side for side, found in enumerate(self.origins) if found.source.operation in ("argument", "constant")]

    @property
    def weight_side(self) -> int | None:
        """Index of a forward contraction's operand that is a parameter, else the last of ``input_sides``, else None."""
        if self.site is not None and self.site.side is not None:
            return self.site.side
        return self.input_sides[-1] if self.input_sides else None

    @property
    def operands(self) -> tuple[tuple[Value, Origin], ...]:
        """Both operands, in the order of a recipe."""
        pairs = tuple(zip((self.contraction.lhs, self.contraction.rhs), self.origins, strict=True))
        return pairs[::-1] if self.swapped else pairs

    @property
    def dtypes(self) -> MatmulDtypes:
        return MatmulDtypes(*(found.dtype for _, found in self.operands))

    @property
    def layers(self) -> Mapping[str, LayerRow]:
        """Layers, by path, of the quantized model that contains the contraction."""
        decided = self.contraction.location.decided or (self.forward and self.forward.contraction.location.decided)
        return decided.layers if decided else {}

    @property
    def modules(self) -> tuple[str, ...]:
        """Scopes that are modules, without einsum equations and method names."""
        return tuple(scope.partition(".")[0] for scope in self.scopes if not re.search(r"->|,", scope))


def label_contractions(
    closed: Any, names: Sequence[Name], found: Iterable[Contraction]
) -> tuple[list[LabeledContraction], FunctionAnalysis]:
    """Label each contraction whose result is needed: find the path of its layer, and its matmul.

    A contraction with a parameter gets the parameter's path, as in ``jaxquant.quantize``, or the path of the known
    layer that contains the parameter. A forward contraction without a parameter gets the path of its name scopes. A
    backward contraction without a parameter gets the path of its forward contraction. Whether a gradient is dlhs or
    drhs follows from the op's scopes, or else from the operand that the gradient shares with its forward contraction.

    Args:
      closed: jaxpr of the program.
      names: paths of the program's inputs.
      found: contractions of the program, including contractions whose result is not needed: a gradient may belong to
        such a forward contraction.
    """
    labeled = [_label_by_scopes(each) for each in found if SCOPE not in each.location.scopes]  # without rotations
    read = [each for each in labeled if each.contraction.is_read]
    forward = [each for each in sorted(labeled, key=lambda each: not each.contraction.is_read) if not each.is_backward]
    backward = [each for each in read if each.is_backward]
    models = dict.fromkeys(each.contraction.location.decided for each in labeled)
    known = [_split_path(path) for model in models if model is not None for path in model.layers]
    analysis = FunctionAnalysis(closed, names, [each.origins for each in read if not each.is_backward], known)
    for each in (*forward, *backward):
        each.site = analysis.site(each.contraction.location.context)
        if each.site is not None or not each.is_backward:
            each.path = _find_path(each, analysis.layer(each.site))
    for each in forward:
        each.swapped, each.forward = each.weight_side == 0, each
    _find_forward(forward, backward)
    for each in backward:
        if each.forward is not None:
            each.path = each.forward.path
            each.matmul, residual = _identify_gradient(each, each.forward)
        else:
            each.path = each.path or _find_path(each, "")
            each.matmul = each.op_label or "bwd"
            residual = _residual_side(each, each.matmul, None)
        each.swapped = residual == (1 if each.matmul == "drhs" else 0)
    _mark_updates(forward, backward)
    return read, analysis


def _split_path(path: str) -> Name:
    return tuple(path.split("/"))


def _mark_updates(forward: Sequence[LabeledContraction], backward: Sequence[LabeledContraction]) -> None:
    """Mark the float contractions of an optimizer such as Muon: computed from gradients, and not differentiated."""
    used, gradients = {each.forward for each in backward}, {each.contraction.out for each in backward}
    for each in forward:
        is_layer = each.site is not None or each.dtypes.is_low or each.path in each.layers
        if gradients and not is_layer and not each.is_recomputed and each not in used:
            operands = each.contraction.lhs, each.contraction.rhs
            if not gradients.isdisjoint(ancestors(operands, stop=gradients.__contains__)):
                each.matmul = "update"


def _find_forward(forward: Sequence[LabeledContraction], backward: Sequence[LabeledContraction]) -> None:
    """Set the forward contraction of every backward contraction; found by path, then by scopes, then by operands.

    Scopes are used before the path if the quantized op labels a contraction as the weight's gradient: its path can then
    be the path of a later layer, whose kernel is part of the output's gradient. Scopes are also used if no layer has
    the path.

    If there are several candidates, the order of preference is: a shared operand of the same dtype, an operand of the
    same size, the same line of the user's program, and a candidate without a gradient of this kind.
    """
    taken: set[tuple[LabeledContraction, str]] = set()

    def rank(each: LabeledContraction, other: LabeledContraction) -> tuple[int, int, bool, bool]:
        distance, is_elsewhere = _distance(each, other), each.contraction.source != other.contraction.source
        difference = _compare_residual(each, other) if distance == 2 else 0
        return distance, difference, is_elsewhere, (other, each.op_label) in taken

    for each in backward:
        choice = of_path = [other for other in forward if each.path and other.path == each.path]
        has_grads_path = each.site is not None and each.op_label == "drhs"
        if (each.scopes or not each.path) and (has_grads_path or not of_path):
            near = [other for other in forward if not each.scopes or other.scopes == each.scopes]
            near = near or [other for other in forward if _deduplicate(other.scopes) == _deduplicate(each.scopes)]
            close = [other for other in near if _distance(each, other) < 2]
            alike = [other for other in near if each.scopes and _distance(each, other) == 2]
            choice = close or alike or of_path
        if choice:
            each.forward = min(choice, key=lambda other: rank(each, other))
            if each.site is None or has_grads_path:
                taken.add((each.forward, each.op_label))


def _distance(backward: LabeledContraction, forward: LabeledContraction) -> int:
    """Return how well a backward contraction matches a forward contraction, from 0 (best) to 3.

    - 0: the two contractions share an operand of the same dtype, and the gradient has the size of the other operand.
    - 1: like 0, but the dtypes of the common operand differ.
    - 2: the contractions share no operand, but the gradient has the size of a forward operand.
    - 3: the gradient has another size.
    """
    sizes, out = (forward.contraction.lhs.size, forward.contraction.rhs.size), backward.contraction.out.size
    shared = [pair for pair in _shared_operands(backward, forward) if sizes[1 - pair[1]] == out]
    dtypes = (int(backward.origins[mine].dtype != forward.origins[theirs].dtype) for mine, theirs in shared)
    return min(dtypes, default=2 if out in sizes else 3)


def _compare_residual(backward: LabeledContraction, forward: LabeledContraction) -> int:
    """Compare the operand that a backward contraction saved from the forward pass with the forward operand.

    Returns:
      0 if both have the same size, 1 if both have the same number of columns (the rows may be padded to full blocks),
      otherwise 2.
    """
    pair = forward.contraction.lhs, forward.contraction.rhs
    matmul = "drhs" if backward.contraction.out.size == pair[1].size else "dlhs"
    kept = (backward.contraction.lhs, backward.contraction.rhs)[_residual_side(backward, matmul, forward)]
    other = pair[0 if matmul == "drhs" else 1]
    return 0 if kept.size == other.size else 1 if kept.shape[-1:] == other.shape[-1:] else 2


def _find_path(each: LabeledContraction, own: str) -> str:
    """Return the path of the layer that has the parameter or a scope, otherwise the parameter's path or the scopes."""
    known = list(map(_split_path, each.layers))
    if known == [("",)]:  # the model is itself a layer
        return ""
    matches = [layer for layer in known if _split_path(own)[-len(layer) :] == layer]
    if matches := matches or [layer for layer in known if contains(each.modules, layer)]:
        return "/".join(max(matches, key=len))
    if each.site is not None:
        return own
    return "/".join(_remove_repeats(tuple(itertools.dropwhile(_ROOT.fullmatch, each.modules))))


def _label_by_scopes(contraction: Contraction) -> LabeledContraction:
    location = contraction.location
    ops = [part for part in location.scopes if _OP_MODULE.fullmatch(part)]
    label = next((part[-4:] for part in reversed(ops) if part.endswith(("dlhs", "drhs"))), "")
    scopes = _remove_repeats(tuple(part for part in location.scopes if part not in _NO_MODULE and part not in ops))
    origins, is_recomputed = (find_origin(contraction.lhs), find_origin(contraction.rhs)), _REMAT in location.scopes
    is_backward = location.is_backward and not is_recomputed
    return LabeledContraction(contraction, origins, scopes, label, is_backward, is_recomputed)


def _remove_repeats(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Remove a repetition of the leading scopes, which the backward pass of a rematerialized block has."""
    for size in range(1, len(scopes) // 2 + 1):
        while scopes[:size] == scopes[size : 2 * size]:
            scopes = scopes[size:]
    return scopes


def _deduplicate(scopes: Sequence[str]) -> list[str]:
    """Remove consecutive duplicate scopes, which lifted ``nn.remat`` adds in the backward pass."""
    return [scope for scope, _ in itertools.groupby(scopes)]


def _shared_operands(each: LabeledContraction, forward: LabeledContraction) -> list[tuple[int, int]]:
    sides = [(mine, theirs) for mine in (0, 1) for theirs in (0, 1)]
    mine, theirs = ([found.source for found in both.origins] for both in (each, forward))
    return [pair for pair in sides if mine[pair[0]] is theirs[pair[1]]]


def _residual_side(each: LabeledContraction, matmul: str, forward: LabeledContraction | None) -> int:
    """Return the index of the operand that the forward pass saved: by its dtype, else by its size.

    If dtypes and sizes are equal, the output's gradient is taken to be the first operand, as in jax and the
    quantization libraries. In the weight's gradient of a grouped matmul or a convolution, the output's gradient is the
    second operand.
    """
    mine = (each.contraction.lhs, each.contraction.rhs)
    if forward is not None and matmul in ("dlhs", "drhs"):
        kept = int((matmul == "dlhs") != forward.swapped)
        other = (forward.contraction.lhs, forward.contraction.rhs)[kept]
        dtypes = [found.dtype == forward.origins[kept].dtype for found in each.origins]
        for alike in (dtypes, [operand.size == other.size for operand in mine]):
            if alike[0] != alike[1]:
                return alike.index(True)
    is_first = matmul == "drhs" and each.contraction.operation in ("ragged_dot_general", "conv_general_dilated")
    return 0 if is_first else 1


def _identify_gradient(each: LabeledContraction, forward: LabeledContraction) -> tuple[str, int]:
    """Return the matmul of a gradient, and the index of the operand that the forward pass saved.

    ``dlhs`` is the gradient of the activation and ``drhs`` the gradient of the weight. ``_residual_side`` determines
    the index if the shared operands do not.
    """
    names = ("drhs", "dlhs") if not forward.swapped else ("dlhs", "drhs")  # index: shared operand
    shared = _shared_operands(each, forward)
    side, operand = shared[0] if len(shared) == 1 else (None, None)
    if each.op_label:  # lhs and rhs are in the order in which the forward matmul ran
        matmul = names[0 if each.op_label == "drhs" else 1]
    elif operand is not None:
        matmul = names[operand]
    elif each.site is not None and each.site.side is not None:
        return "dlhs", each.site.side
    else:  # a gradient without the weight as an operand is not dlhs
        is_layer = each.site is None and forward.site is not None and forward.site.side is not None
        matmul = "drhs" if is_layer else "bwd"
    return matmul, _residual_side(each, matmul, forward) if side is None else side
