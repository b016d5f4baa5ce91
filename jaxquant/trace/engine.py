"""Engine: trace a function of parameters, choose recipes for its layers, and run it quantized. All faces use it.

A face (``jaxquant.quantize``, a Linen model, an NNX model) passes a pure function of parameters and arguments. Its
``FaceHooks`` name layers and state and build error messages in the terms of the framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.interpreters.partial_eval import DynamicJaxprTracer

from jaxquant.backends import load
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.rounding import fold_many
from jaxquant.ops.gradients import reverse_only
from jaxquant.state.table import Tables, layers_of, make_state
from jaxquant.state.tree import refuse_trained
from jaxquant.state.watch import NOT_TRAINED, refuse_gradient
from jaxquant.trace import contract, converted, kernels, paths
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.arguments import Static, array_names, mark_static, restore_static, split_arrays
from jaxquant.trace.decisions import Decisions, FaceHooks, decide
from jaxquant.trace.plan import Contraction, mark_shared_activations, mark_stored
from jaxquant.trace.registry import registered
from jaxquant.trace.report import Decided, Report, layer_rows, row_of
from jaxquant.trace.rewrite import Rewriter

Function = Callable[..., Any]

# Part of jit's cache key: a function that was traced without the override is traced again with it.
evaluator_override = jax.make_user_context(None)
"""Evaluator that replaces the quantized program in its ``engine`` while set; ``audit.health`` uses it."""


_SKIPPED = Static.of(object())
"""Result of an engine whose trace has nothing to quantize; the caller then computes the call itself."""


class Traced(NamedTuple):
    """Traced call: analysis, jaxpr, abstract outputs, and parameters with their paths."""

    analysis: Analysis
    closed: Any
    outputs: Any
    leaves: list[Any]
    names: list[paths.Name]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return the outputs of the call, built from these arrays."""
        return jax.tree.unflatten(jax.tree.structure(self.outputs), arrays)


class Engine:
    """Engine that chooses the recipes of one model's layers, once, and runs functions of its parameters.

    Args:
      config: quantization config.
      hooks: wording and naming of the face.

    Attributes:
      decisions: chosen recipes, or None before the first trace.

    Raises:
      NotImplementedError: the backend does not support a recipe.
    """

    def __init__(self, config: QuantConfig, hooks: FaceHooks) -> None:
        self.config, self.hooks = config, hooks
        self.resolver: Resolver | None = config.resolver()
        self.backend = load(config.resolved_backend or "native", is_completed=config.leaves_backend_open)
        for recipe in () if self.resolver is None else self.resolver.recipes:
            self.backend.check(recipe)
        self.decisions: Decisions | None = None
        self._has_seen_all = False
        self._left_float: Mapping[str, str] = {}  # by path, the reason for which ``convert`` left a weight in float
        self._warned: set[str] = set()  # layers that cannot be quantized, with the reason
        # jit is used only for its cache: without it, each call outside of a jit would trace and compile again.
        self._cached = jax.jit(self._run, static_argnums=(0, 1), inline=True)
        # make_jaxpr caches jaxprs like jit, so that init, the first step and convert share one.
        self._make_jaxpr = self._new_make_jaxpr()
        self._analyses: dict[tuple[Any, ...], Analysis] = {}

    def run(
        self,
        fn: Function,
        params: Any,
        args: tuple[Any, ...],
        quant_state: Any,
        key: jax.Array | None = None,
        *,
        prefix: paths.Name = (),
        is_whole: bool = True,
        is_cached: bool = True,
        plain: Callable[[], Any] | None = None,
    ) -> Any:
        """Compute a function in low precision.

        Args:
          fn: pure function of (params, *args). It must be hashable, and equal functions must compute the same.
          params: parameters.
          args: further arguments.
          quant_state: tables of the model, or a pytree of them, or {}.
          key: RNG key for stochastic rounding. None derives the noise from the bits of the rounded values.
          prefix: path of the parameters in the model.
          is_whole: whether the call runs the whole model, so that rules without a match are an error.
          is_cached: whether a cached trace may be used and this trace may be cached.
          plain: function that computes the result if there is nothing to quantize.
        """
        refuse_trained(quant_state)
        is_cached = is_cached and self._override() is None
        given = *self._marked(params, args), quant_state, key
        # An enclosing jit caches the program, and it differentiates each equation only once if this call adds no jit.
        # Repeated calls in one jit are evaluated each time.
        is_staged = any(map(_is_staged, jax.tree.leaves(given)))
        run = self._cached if is_cached and not is_staged else functools.partial(self._run, is_kept=is_cached)
        out = run(fn, (prefix, is_whole, plain is not None), *given)
        return plain() if plain is not None and isinstance(out, Static) and out == _SKIPPED else restore_static(out)

    def init(
        self, fn: Function, params: Any, args: tuple[Any, ...], *, prefix: paths.Name = (), is_whole: bool = True
    ) -> Tables:
        """Create the quant state of a function's layers. Only traces. See ``run`` for the arguments."""
        traced = self.trace(fn, params, args, prefix)
        if self.resolver is None:
            return Tables()
        decisions = self.decide(traced.analysis, is_whole)
        rows: dict[str, Any] = {}
        for site in traced.analysis.plan.chosen:
            if (path := decisions.states.get(site.key)) is not None:
                made = contract.make_state(site, traced.leaves)
                rows |= {f"{path}/{tensor}" if path else tensor: fields for tensor, fields in made.items()}
        return make_state(rows)

    def convert(
        self, fn: Function, params: Any, args: tuple[Any, ...], quant_state: Any
    ) -> tuple[dict[paths.Name, QTensor], dict[str, str]]:
        """Quantize the weight of every layer like the training forward pass; see ``find_kernels``.

        Returns:
          The converted kernel of every layer by path of the parameter, and the reason for each layer whose weight stays
          in float.
        """
        found, reasons = self.find_kernels(fn, params, args, quant_state)
        arrays, structure = split_arrays(self._marked(params, args)[0])
        leaves = dict(zip(array_names(structure), arrays, strict=True))
        return {name: kernel.convert_stacked(leaves[name]) for name, kernel in found.items()}, reasons

    def find_kernels(
        self, fn: Function, params: Any, args: tuple[Any, ...], quant_state: Any
    ) -> tuple[dict[paths.Name, kernels.LayerKernel], dict[str, str]]:
        """Find the weight of every layer. Only traces.

        Args:
          fn, params, args, quant_state: see ``run``; arrays may be any objects with a shape and a dtype.

        Returns:
          Kernels by path of the parameter, and the reason for each layer whose weight stays in float.
        """
        refuse_trained(quant_state)
        analysis, _, _, leaves, names = self.trace(fn, params, args)
        if self.resolver is None:
            return {}, {}
        decisions = self.decide(analysis)
        served = converted.check_served(analysis, leaves, self.backend)
        fields = contract.kernel_fields
        states = decisions.read_states(analysis.plan, layers_of(quant_state), self.hooks, served, fields_of=fields)
        for text in kernels.far_examples(analysis, jax.tree.leaves(self._marked(params, args)[1]), states):
            warnings.warn(text, stacklevel=3)
        found, reasons = kernels.find_kernels(analysis, leaves, names, states, self.backend)
        self._left_float = reasons
        what = "; ".join(f"{path or 'the root layer'}: {why}" for path, why in reasons.items())
        text = f"convert leaves the weights of {len(reasons)} layers in float ({what})"
        if reasons and self.config.strict:
            raise NotImplementedError(f"strict true does not allow that {text}; set strict to false")
        if reasons:
            warnings.warn(f"{text}; when you serve, pass the quant state of these layers, if any", stacklevel=3)
        return found, reasons

    def trace(self, fn: Function, params: Any, args: tuple[Any, ...], prefix: paths.Name = ()) -> Traced:
        """Trace a function; arrays may be ``jax.ShapeDtypeStruct``."""
        return self._trace(fn, *self._marked(params, args), prefix)

    def report(self, fn: Function, params: Any, args: tuple[Any, ...]) -> Report:
        """Return every contraction, with its recipe or the reason for which it is in float. Stores no decisions."""
        analysis = self._trace(fn, *self._marked(params, args), is_kept=self.decisions is not None).analysis
        if self.resolver is not None and not analysis.is_decided:
            self._extended(analysis, self.decisions).apply(analysis.plan)
        return Report(tuple(row_of(site, self.backend) for site in analysis.plan.contractions()))

    def decide(self, analysis: Analysis, is_whole: bool = True) -> Decisions:
        """Apply the decisions to a trace; the first call makes them.

        Raises:
          ValueError: a rule matches no layer, there is no layer to quantize, or a layer has no decision.
          NotImplementedError: the config is strict, and a layer cannot be quantized.

        Warns:
          UserWarning: a layer cannot be quantized; once for each layer and reason.
        """
        is_first = is_whole and not self._has_seen_all
        if analysis.is_decided and self.decisions is not None and not is_first:
            return self.decisions
        if not is_whole and not self._has_seen_all and self.resolver is not None:
            self.resolver.check_no_float_blocks()
        decisions = self._extended(analysis, self.decisions, check=is_first)
        decisions.apply(analysis.plan)
        self._check(analysis, is_first, decisions.paths)
        mark_shared_activations(analysis.plan, self.backend.can_share)
        mark_stored(analysis.plan)
        self.decisions, analysis.is_decided = decisions, True
        self._has_seen_all |= is_whole
        return decisions

    def layers(self, analysis: Analysis) -> Report:
        """Return a row for each layer with its decision. Raises like ``decide``, but stores no decisions."""
        if self.resolver is not None:
            self._extended(analysis, self.decisions).apply(analysis.plan)
        return Report(tuple(layer_rows(analysis, self.resolver, self.backend)), "layers")

    def _extended(self, analysis: Analysis, known: Decisions | None, check: bool = True) -> Decisions:
        assert self.resolver is not None
        if known is not None and not self.hooks.is_model:
            return known
        return decide(analysis, self.resolver, self.backend, self.hooks, known, check=check)

    def _check(self, analysis: Analysis, is_first: bool, decided: Iterable[str]) -> None:
        assert self.resolver is not None
        sites = list(analysis.plan.contractions())
        if is_first and not analysis.plan.chosen:
            kind, whole = ("no layer", "this model") if self.hooks.is_model else ("no matmul", "this function")
            reasons = [f"{site.path or f'{site.operation} of {site.shapes}'}: {site.reason}" for site in sites]
            what = "; ".join(dict.fromkeys(reasons)) or f"there is {kind}"
            raise ValueError(f"quantization {self.config.quantization!r} quantizes {kind} of {whole} ({what})")
        selected = {site.path for site in sites if self.resolver(site.path, site.out_features).recipe is not None}
        lost = [each for each in sites if each.is_lost]
        floats = self.resolver.float_blocks([*decided, *(each.path for each in lost)], must_have=False)
        lost = [each for each in lost if each.path in selected and each.path not in floats]
        what = list(dict.fromkeys(f"{site.path or 'the root layer'}: {site.reason}" for site in lost))
        text = f"{len(lost)} matmuls with parameters stay in float ({'; '.join(what)}); add a rule with recipe null"
        if lost and self.config.strict:
            raise NotImplementedError(f"strict true does not allow that {text}, or set strict to false")
        if not self._warned.issuperset(what):
            warnings.warn(f"quantization {self.config.quantization!r}: {text}", stacklevel=2)
            self._warned.update(what)

    def _marked(self, params: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return the marked arguments of a call (``mark_static``); static arguments of functions must be hashable."""
        if self.hooks.is_model:
            return mark_static(params, numbers=False), mark_static(args, numbers=False)
        return mark_static(params, what="parameter"), mark_static(args, what="argument")

    def _new_make_jaxpr(self) -> Any:
        """Return a ``jax.make_jaxpr`` of calls with its own cache."""
        return jax.make_jaxpr(_Call(not self.hooks.is_model), static_argnums=0, return_shape=True)

    def _trace(self, fn: Function, params: Any, args: Any, prefix: paths.Name = (), is_kept: bool = True) -> Traced:
        """Trace and analyze a function of marked arguments; with ``is_kept``, once for each set of shapes."""
        leaves, structure = split_arrays(params)
        own = array_names(structure)
        seen = jax.tree.unflatten(structure, map(converted.abstract_leaf, leaves, map("/".join, own)))
        make = self._make_jaxpr if is_kept else self._new_make_jaxpr()
        closed, outputs = make(fn, seen, args)
        place = id(closed.jaxpr), prefix, registered()
        analysis = self._analyses.get(place) if is_kept else None
        if analysis is None:
            names = [(*prefix, *name) for name in own]
            shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
            analysis = Analysis(closed, names, shapes, root_is_layer=self.hooks.is_model)
            # An analysis whose jaxpr closes over traced arrays belongs to this trace only.
            if is_kept and not any(isinstance(each, Tracer) for each in closed.consts):
                self._analyses[place] = analysis
        return Traced(analysis, closed, outputs, leaves, own)

    def _missing(self, is_served: bool, recipe: str, path: str, field: str) -> str:
        """Return the error message for missing state, for a trained model or next to converted kernels."""
        if not is_served and path not in self._left_float:
            return self.hooks.missing(recipe, path, field)
        why = f" ({self._left_float[path]})" if path in self._left_float else ""
        return (
            f"convert left the weight of {path!r} in float{why}, so recipe {recipe!r} needs quant state for the layer, "
            f"but this call has no {field!r}; pass the quant state that convert received"
        )

    def _override(self) -> Any:
        return (
            evaluator_override.value
            if evaluator_override.value is not None and evaluator_override.value.engine is self
            else None
        )

    def _run(
        self,
        fn: Function,
        place: tuple[paths.Name, bool, bool],
        params: Any,
        args: Any,
        quant_state: Any,
        key: jax.Array | None,
        is_kept: bool = True,
    ) -> Any:
        instead = self._override()
        if self.resolver is None and instead is None:
            return _Call(not self.hooks.is_model)(fn, params, args)
        prefix, is_whole, skips = place
        layers = layers_of(quant_state)
        traced = self._trace(fn, params, args, prefix, is_kept)
        analysis, consts, arrays = traced.analysis, traced.closed.consts, [*traced.leaves, *jax.tree.leaves(args)]
        if instead is not None:
            return traced.rebuild(instead(analysis, consts, arrays, layers))
        decisions = self.decide(analysis, is_whole)
        if skips and not analysis.plan.chosen:
            return _SKIPPED
        must = self.config.checkpoint_is_quantized
        served = converted.check_served(analysis, traced.leaves, self.backend, must_be_converted=must)
        hooks = dataclasses.replace(self.hooks, missing=functools.partial(self._missing, bool(served)))
        states = decisions.read_states(analysis.plan, layers, hooks, served)
        noise = None
        if key is not None and any(site.recipe.is_stochastic for site in analysis.plan.chosen if site.recipe):
            noise = fold_many(key, analysis.plan.seeds)
        run, stack = Rewriter(self._contract, self._share), source_info_util.current_name_stack()
        mark = Decided(functools.partial(layer_rows, analysis, self.resolver, self.backend, has_tables=True))
        with source_info_util.set_name_stack(type(stack)((*stack.stack, mark))):  # pyright: ignore[reportArgumentType]
            return traced.rebuild(run.evaluate(analysis.plan, consts, arrays, states, noise))

    def _contract(self, site: Contraction, eqn: Any, operands: list[Any], state: Any, *rest: Any) -> Any:
        assert site.side is not None
        if state:
            state = self.hooks.watch(site.path, (operands[1 - site.side], operands[site.side]), state)
        layer = layer_name(site.path)
        weight = operands[site.side]
        if isinstance(weight, QTensor):
            operands[site.side] = refuse_gradient(f"{layer} has a converted kernel, {NOT_TRAINED}", weight)
        operands = [
            each if isinstance(each, QTensor) or index > 1 else reverse_only(layer, each)
            for index, each in enumerate(operands)
        ]
        with self._scope(site):
            return contract.contract(self.backend, site, eqn, operands, state, *rest)

    def _share(self, site: Contraction, activation: Any, states: Any) -> Any:
        """Quantize an activation for all contractions that read it; ``states`` are their states, without scan axes."""
        shared_activation = site.shared_activation
        assert shared_activation is not None
        options: dict[str, Any] = {"axes": shared_activation.axes, "implementation": shared_activation.implementation}
        options["is_stored"] = site.stored[0]
        with self._scope(site):
            return self.backend.share(activation, states, recipe=shared_activation.recipe, **options)

    def _scope(self, site: Contraction) -> Any:
        return contextlib.nullcontext() if self.hooks.has_scopes else jax.named_scope(site.path)


def _is_staged(leaf: Any) -> bool:
    """Whether a value belongs to a program that is being traced, differentiated or not."""
    while isinstance(inner := getattr(leaf, "primal", None), Tracer):
        leaf = inner
    return isinstance(leaf, DynamicJaxprTracer)


class _Call:
    """Call of a function on marked arguments. Each object has its own entries in jax's caches."""

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers

    def __call__(self, fn: Function, params: Any, args: Any) -> Any:
        return mark_static(fn(restore_static(params), *restore_static(args)), self._numbers)
