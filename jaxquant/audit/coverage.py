"""Coverage: every contraction that a function runs, with its actual dtypes, and the reason if it stays in float."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import flax.linen as nn

from jaxquant.audit.dataflow import Graph, Value, ancestors
from jaxquant.audit.labels import LabeledContraction, label_contractions
from jaxquant.audit.parameters import FunctionAnalysis, input_names
from jaxquant.audit.rows import MATMULS, Coverage, Row
from jaxquant.audit.state_use import check_state
from jaxquant.audit.tracing import trace
from jaxquant.backends import Backend, load
from jaxquant.config.quant_config import ConfigLike, QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.dtypes import element
from jaxquant.core.matmul_dtypes import MatmulDtypes, matmul_dtypes
from jaxquant.core.recipe import Recipe
from jaxquant.trace.decisions import head_hint, structural_exclusion, unsupported_reason
from jaxquant.trace.paths import Name
from jaxquant.trace.plan import Contraction as Site
from jaxquant.trace.reach import NOT_FLOAT
from jaxquant.trace.report import Row as LayerRow


def coverage(fn: Callable[..., Any], *args: Any, config: ConfigLike | None = None, **kwargs: Any) -> Coverage:
    """Return every contraction that a function runs, forward and backward, without running it.

    The function is traced, including all that it calls: jitted functions, scans, branches, rematerialized blocks,
    shards, Pallas kernels. The rows describe the traced program, without operations that neither an output nor a side
    effect needs. The compiled program may still use another dtype. Arguments that the function changes, such as an NNX
    model or a dictionary, count as outputs.

    Args:
      fn: any function of arrays, such as a training step; jitted or not, quantized by any library. NNX models and
        optimizers are passed as arguments; ``fn`` can also be an NNX model itself.
      args, kwargs: arguments of the function, arrays or ``jax.ShapeDtypeStruct``.
      config: any value that ``QuantConfig.from_any`` accepts. If a config is passed, the rows and ``Coverage.check``
        compare the function with this config. Pass a config if another library quantized the function, or if a model is
        quantized with a different config. Without a config, each layer that jaxquant quantized is compared with its
        decision at trace time, and ``check`` raises if all matmuls are float.

    Raises:
      TypeError: fn is not callable, or is a Linen model that is not bound.
      TypeError, ValueError, NotImplementedError: the config is invalid; see ``QuantConfig.from_any``.
    """
    if not callable(fn) or (isinstance(fn, nn.Module) and fn.scope is None):
        raise TypeError(f"coverage needs a function and its arguments, got {type(fn).__name__}; pass model.apply")
    traced, names = trace(fn, args, kwargs)
    return _cover_jaxpr(traced.jaxpr, names, config, may_be_float=config is not None)


def of_trace(traced: Any) -> Coverage:
    """Return the coverage of a traced function, as ``coverage`` does without a config; all matmuls may be float.

    Args:
      traced: result of ``jax.jit(fn).trace(*args)``.
    """
    return _cover_jaxpr(traced.jaxpr, input_names(traced.args_info), None, may_be_float=True)


def _cover_jaxpr(closed: Any, names: Sequence[Name], config: Any, may_be_float: bool) -> Coverage:
    program = Graph(closed, names)
    labeled, analysis = label_contractions(closed, names, program.contractions)
    asked, has_config = QuantConfig() if config is None else QuantConfig.from_any(config), config is not None
    backend = load(asked.resolved_backend or "native", is_completed=asked.leaves_backend_open)
    resolver, sites = asked.resolver(), _sites_by_layer(labeled)
    floats = {} if resolver is None else resolver.float_blocks(sites, must_have=False)
    decide = _Decider(resolver, has_config, analysis, sites, floats, backend)
    layers = _layers_to_quantize(labeled, decide)
    unnamed = _unassigned(layers, labeled, decide)
    rows = tuple(_make_row(each, decide, is_unnamed=each in unnamed) for each in labeled)
    missing = tuple(_missing_gradients(layers, labeled, len(unnamed), program.observed))
    return Coverage(rows, missing, tuple(_check_quantized(rows, decide, may_be_float)), *check_state(program, labeled))


def _sites_by_layer(labeled: Sequence[LabeledContraction]) -> dict[str, list[Site]]:
    """Return the forward contractions of each layer, with its parameters."""
    sites: dict[str, list[Site]] = {}
    for each in dict.fromkeys(each.forward for each in labeled):
        if each is not None and each.site is not None and each.site.side is not None:
            sites.setdefault(each.path, []).append(each.site)
    return sites


def _check_quantized(rows: Sequence[Row], decide: _Decider, may_be_float: bool) -> Iterator[str]:
    """Yield a fault if no contraction is quantized although the config or the caller requires one."""
    if any(row.expected or row.dtypes.rhs.is_quantized for row in rows):
        return
    if decide.resolver is not None:
        what = "no matmul belongs to a layer to quantize" if rows else "the function has no matmul"
        yield f"the config quantizes nothing of this function: {what}"
    elif rows and not may_be_float:
        yield "no matmul of this function is quantized; pass the quantized function"


_Layers = dict[str, list[LabeledContraction]]
"""Path of each layer to quantize -> its contractions, forward and backward."""


def _layers_to_quantize(labeled: Sequence[LabeledContraction], decide: _Decider) -> _Layers:
    layers: _Layers = {}
    for each in labeled:
        is_known = each.path in layers or ((report := decide.report(each)) is not None and report.recipe is not None)
        is_own = is_known and each.matmul != "update"
        if is_own or ((decision := decide(each)) is not None and any(decision.expected.values())):
            layers.setdefault(each.path, []).append(each)
    return layers


def _unassigned(layers: _Layers, labeled: Sequence[LabeledContraction], decide: _Decider) -> set[LabeledContraction]:
    """Return the gradients whose layer is unknown, but whose dtypes match the recipe of a layer to quantize.

    Rematerialized ops of other libraries or of the user have such gradients: their activations are recomputed, so
    neither a scope nor an operand identifies the layer. The scopes of jaxquant's own layers contain the layer's name.
    """
    foreign = (each for own in layers.values() for each in own if each.contraction.location.decided is None)
    pairs = [found.expected[matmul] for found in map(decide, foreign) if found for matmul in ("dlhs", "drhs")]
    rest = (each for each in labeled if each.forward is None and each.dtypes.is_low and decide(each) is None)
    return {each for each in rest if any(_match(each.dtypes.elements, wants[::n]) for wants in pairs for n in (1, -1))}


def _missing_gradients(
    layers: _Layers, labeled: Sequence[LabeledContraction], unnamed: int, observed: Set[Value]
) -> Iterator[str]:
    """Yield the missing backward matmuls of layers to quantize, for models that are differentiated.

    Args:
      layers: contractions of each layer to quantize.
      labeled: all contractions.
      unnamed: number of gradients without a layer; each may be a missing gradient of a layer.
      observed: observations of quant state. A dependence through an observation does not count as a dependence on
        another layer.
    """
    trained = {each.path for each in labeled if each.is_backward and each.path}
    results = {each.contraction.out for each in labeled if not each.is_backward and each.path in trained}
    models = {each.contraction.location.decided for each in labeled if each.is_backward}
    for path, own in layers.items():
        name = path or "the model itself"
        if any(each.contraction.location.decided in models for each in own):
            found = [each.matmul for each in own if each.is_backward]
            lacking = [matmul for matmul in _gradients_of(own, results, observed) if matmul not in found]
            lost = max(len(lacking) - found.count("bwd"), 0)
            unnamed -= lost
            if lost and unnamed < 0:
                yield from (f"{name} {matmul}" for matmul in lacking)


def _gradients_of(layer: Sequence[LabeledContraction], results: set[Value], observed: Set[Value]) -> tuple[str, ...]:
    """Return the gradients that a layer needs. The input gradient is included if the input depends on ``results``."""
    forward = [each for each in layer if not each.is_backward and each.weight_side is not None]
    made_of = ancestors((each.operands[0][0] for each in forward), observed.__contains__)
    is_required = not results.isdisjoint(made_of)
    return ("dlhs", "drhs") if is_required else ("drhs",)


# -- decisions about contractions -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Decision:
    expected: dict[str, tuple[str, ...]]
    reason: str


@dataclasses.dataclass(frozen=True)
class _Decider:
    """Function that returns the decision for a contraction, from the rules of a config, otherwise from its trace."""

    resolver: Resolver | None
    has_config: bool
    analysis: FunctionAnalysis
    sites: dict[str, list[Site]]
    floats: dict[str, str]
    backend: Backend

    def report(self, each: LabeledContraction) -> LayerRow | None:
        """Return the decision from the trace of a contraction, or None if there is none or a config is given."""
        site, dtypes = (each.forward or each).site, (each.forward or each).dtypes
        is_no_layer = site is not None and site.side is None and not dtypes.is_low  # a product of parameters
        return None if self.has_config or is_no_layer else each.layers.get(each.path)

    def __call__(self, each: LabeledContraction) -> _Decision | None:
        """Return the decision for a contraction, or None if it is not part of a linear layer."""
        if each.matmul == "update":
            return None
        if (report := self.report(each)) is not None:
            expected = {name: report.dtypes[name].elements for name in MATMULS}
            return _Decision(expected, _describe_reason(report.recipe, report.reason))
        forward = each.forward
        if self.resolver is None or forward is None or not _is_layer(forward):
            return None
        assert forward.site is not None
        decision = self.resolver(each.path, forward.site.out_features)
        recipe, reason = decision.recipe, decision.reason
        if recipe is not None and decision.rule is None:
            excluded = self.floats.get(each.path, "")
            if not excluded and not forward.dtypes.rhs.is_quantized:
                # A layer that is already quantized is not excluded, because it may have been quantized in a trace of
                # only a part of the step, without the reason for the exclusion.
                excluded = self._exclusion(forward, recipe)
            hint = head_hint(self.analysis, self.sites[forward.path], self.resolver.switches)
            recipe, reason = (None, excluded) if excluded else (recipe, reason + hint)
        expected = {name: dtypes.elements for name, dtypes in matmul_dtypes(recipe).items()}
        return _Decision(expected, _describe_reason(recipe and recipe.name, reason))

    def _exclusion(self, forward: LabeledContraction, recipe: Recipe) -> str:
        """Return the structural reason for which a layer stays in float, or ""."""
        if any(value.dtype.startswith("complex") for value, _ in forward.operands):
            return NOT_FLOAT
        sites = self.sites[forward.path]
        switches = self.resolver.switches if self.resolver else ()
        return structural_exclusion(self.analysis, sites, switches) or unsupported_reason(sites, recipe, self.backend)


def _describe_reason(recipe: str | None, reason: str) -> str:
    return reason if recipe is None or repr(recipe) in reason else f"{recipe}, by {reason}"


def _is_layer(forward: LabeledContraction) -> bool:
    """Whether rules apply to a forward contraction: both operands are float, and one is computed from parameters."""
    if forward.site is None or forward.site.side is None or forward.contraction.is_outer:
        return False
    return "int" not in {found.source.dtype.rstrip("0123456789").removeprefix("u") for found in forward.origins}


def _make_row(each: LabeledContraction, decide: _Decider, *, is_unnamed: bool) -> Row:
    contraction, dtypes = each.contraction, each.dtypes
    (lhs, left), (rhs, right) = each.operands
    expected, reason, fault = _judge(each, decide, is_unnamed=is_unnamed)
    if fault:
        reason = fault = f"{fault}, but {left.dtype} × {right.dtype} was found"
    return Row(
        path=each.path,
        matmul=each.matmul,
        operation=contraction.operation,
        lhs_shape=lhs.shape,
        rhs_shape=rhs.shape,
        dtypes=dtypes,
        result_dtype=contraction.out.dtype,
        lhs_scale=left.scale,
        rhs_scale=right.scale,
        times=contraction.location.times,
        flops=contraction.flops,
        is_recomputed=each.is_recomputed,
        expected=expected,
        reason=reason,
        fault=fault,
        source=contraction.source,
        has_parameter=(each.forward or each).site is not None,
    )


def _judge(each: LabeledContraction, decide: _Decider, *, is_unnamed: bool) -> tuple[tuple[str, ...], str, str]:
    """Return the expected operand dtypes, the reason for the actual dtypes, and a fault or ""."""
    dtypes, decision = each.dtypes, decide(each)
    widened, why = _original_dtypes(each, dtypes)
    if decision is not None:
        choices = [decision.expected[name] for name in (("dlhs", "drhs") if each.matmul == "bwd" else (each.matmul,))]
        expected, found = choices[0], dtypes.elements or widened
        is_right = any(_match(found, choice) for choice in choices) or decision.reason == NOT_FLOAT
        fault = "" if is_right else f"{' × '.join(expected) or 'float'} is expected ({decision.reason})"
        if not dtypes.is_low and not expected and any(decision.expected.values()):
            return expected, f"{each.matmul} stays in float for {decision.reason}", fault
        return expected, why or decision.reason, fault
    if not dtypes.is_low:
        return (), why or _explain_float(each, decide), ""
    if not decide.has_config:
        return (), "", ""
    return (), "not a layer of the config", "" if is_unnamed else "float is expected (not a linear layer of the model)"


def _match(found: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether operands have the expected dtypes. Wider integers are accepted: they represent the same values."""
    if not expected or not found:
        return not expected and not found
    return all(map(_represents, found, expected))


def _original_dtypes(each: LabeledContraction, dtypes: MatmulDtypes) -> tuple[tuple[str, ...], str]:
    """Return the original dtypes and the reason if both operands are stored in a wider dtype, else () and "".

    ``ops.conv`` converts both operands to a common dtype, and ``ops.contract`` dequantizes tiles.
    """
    left, right = dtypes.lhs.rounded_to, dtypes.rhs.rounded_to
    if not left or not right:
        return (), ""
    held = " and ".join(sorted({left, right}))
    if each.contraction.operation == "conv_general_dilated":
        is_wide = {dtypes.lhs.dtype, dtypes.rhs.dtype} == {"bfloat16"} and left != right
        why = f"a convolution multiplies {held} as bfloat16, because its operands must have the same dtype"
    else:
        is_wide = any(origin.is_emulated for origin in each.origins)
        why = f"tiles of {held} are dequantized, because no matmul supports their scales"
    return ((left, right), why) if is_wide else ((), "")


def _represents(found: str, expected: str) -> bool:
    if found == expected:
        return True
    a, b = element(found), element(expected)
    return a.kind == b.kind == "int" and a.bits > b.bits


def _explain_float(each: LabeledContraction, decide: _Decider) -> str:
    if each.matmul == "update":
        return "computed from gradients, in the optimizer"
    forward = each.forward or each
    site = forward.site
    if site is not None and any(name.rpartition("/")[2] == "embedding" for name in site.names):
        return "embeddings stay in float"
    if site is not None and site.side is None and site.reason:
        return site.reason
    if site is None and not forward.input_sides:
        return "no parameter: activation × activation"
    if decide.has_config:
        return "quantization is off" if decide.resolver is None else "not a linear layer of the model"
    return "float operands: quantization did not reach this matmul"
