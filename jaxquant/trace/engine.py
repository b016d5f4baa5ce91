"""Engine: trace a function of parameters, decide over its layers, and run it quantized. The faces stand on it.

A face (``jaxquant.quantize``, a Linen model, an NNX model) hands over a pure function of parameters and arguments, and
says in its ``Dialect`` how layers, state and errors are called where it comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jaxquant.backends import load
from jaxquant.config.backends import BackendName
from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.quant_state import nested
from jaxquant.core.rounding import fold_many
from jaxquant.ops.gradients import reverse_only
from jaxquant.state import watch
from jaxquant.state.packed import State, unpack
from jaxquant.state.tree import refuse_trained
from jaxquant.trace import contract, converted, kernels, paths
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.arguments import Outputs, Split, array_names, split_arrays
from jaxquant.trace.decisions import Decisions, decide
from jaxquant.trace.plan import Contraction, mark_readings
from jaxquant.trace.registry import registered
from jaxquant.trace.report import Report, Row, layer_rows, row_of
from jaxquant.trace.rewrite import Rewriter

Function = Callable[..., Any]

# Part of the key of jit's caches: a function that was traced without it is traced again with it.
INSTEAD = jax.make_user_context(None)
"""What an engine, ``INSTEAD.value.engine``, evaluates in place of the quantized program; see ``audit.health``."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a face speaks.

    Attributes:
      what: the thing that is quantized, in errors.
      layers: what its layers are called there.
      root_is_layer: whether a parameter ``kernel`` at the root makes the whole a layer, of the path "".
      may_extend: whether a layer that no trace has shown so far is decided when one does; else it is an error.
      numbers: whether Python's numbers are traced, as under ``jax.jit``.
      operation: name below the layer's path under which the state of a contraction stands; "" for none.
      owner: path of what holds the state of a contraction, where that is not the layer's.
      missing: the sentence about state that is missing, of (recipe's name, path, field).
      misfit: the sentence about state of another shape, of (path of the layer, field, shape, shape that is needed).
      has_scopes: whether the layers' calls are in name scopes already; else each gets that of its path.
      watch: reads the state of a contraction, of (path, operands, state).
    """

    what: str = "this function"
    layers: str = "matmul"
    root_is_layer: bool = False
    may_extend: bool = False
    numbers: bool = True
    operation: Callable[[Contraction], str] = lambda _: ""
    owner: Callable[[Contraction], str] | None = None
    missing: Callable[[str, str, str], str] = lambda recipe, path, field: (
        f"recipe {recipe!r} at {path!r} keeps state, and quant_state has no {field!r} there; make it with the "
        "quantized function's init(params, *args)"
    )
    misfit: Callable[[str, str, tuple[int, ...], tuple[int, ...]], str] = lambda path, field, has, wanted: (
        f"quant_state {path!r} has {field!r} of shape {has}, and this call needs {wanted}; make it with init on the "
        "same model and config"
    )
    has_scopes: bool = False
    watch: watch.Watch = watch.FUNCTION


class Traced(NamedTuple):
    """A traced call: what analysis found, and the program."""

    analysis: Analysis
    closed: Any
    outputs: Outputs


class Engine:
    """Decide over the layers of one model, once, and run functions of its parameters.

    Args:
      config: what is asked.
      dialect: how the face speaks.
      backend: whose ops run; None where nothing is quantized.

    Attributes:
      decisions: what was decided, None before the first trace.

    Raises:
      NotImplementedError: a recipe that the backend does not honour.
    """

    def __init__(self, config: QuantConfig, dialect: Dialect, backend: BackendName | None) -> None:
        self.config, self.dialect = config, dialect
        self.resolver: Resolver | None = config.resolver()
        self.backend = load(backend or "native", is_completed=config.leaves_backend_open)
        for recipe in () if self.resolver is None else self.resolver.recipes:
            self.backend.check(recipe)
        self.decisions: Decisions | None = None
        self._has_seen_all = False
        self._left_float: Mapping[str, str] = {}  # by path, why ``convert`` left a weight in float
        # jit for its cache alone: without it each call outside of a jit would trace and compile anew.
        self._cached = jax.jit(self._run, static_argnums=(0, 1, 2), inline=True)
        # make_jaxpr keeps programs as jit does, so that init, the first step and convert read the same one.
        self._make_jaxpr = jax.make_jaxpr(_Call(dialect.numbers), static_argnums=(0, 1), return_shape=True)
        self._analyses: dict[tuple[Any, ...], Analysis] = {}

    def run(
        self,
        fn: Function,
        params: Any,
        args: tuple[Any, ...],
        quant_state: State,
        key: jax.Array | None = None,
        *,
        prefix: paths.Name = (),
        is_whole: bool = True,
        is_cached: bool = True,
        plain: Callable[[], Any] | None = None,
    ) -> Any:
        """Compute a function in low precision.

        Args:
          fn: pure, of (params, *args); hashable, and equal to another only where that computes the same.
          params: parameters.
          args: further arguments.
          quant_state: of the parameters' part of the model, nested or packed.
          key: for stochastic rounding; None makes noise from the bits of what is rounded.
          prefix: path of the parameters in the model.
          is_whole: whether the call runs the whole model, so that rules which match nothing are an error.
          is_cached: whether the trace may be kept, and a kept one taken.
          plain: called for the result where there is nothing to quantize.
        """
        refuse_trained(quant_state)
        static, arrays = split_arrays(params, args, self.dialect.numbers)
        is_cached = is_cached and self._instead() is None
        run = self._cached if is_cached else functools.partial(self._run, is_kept=False)
        out = run(fn, static, (prefix, is_whole, plain is not None), arrays, quant_state, key)
        return plain() if out.is_skipped and plain is not None else out.rebuild()

    def init(
        self, fn: Function, params: Any, args: tuple[Any, ...], *, prefix: paths.Name = (), is_whole: bool = True
    ) -> dict[str, Any]:
        """Make the quant state of a function's layers, at ``prefix``, without computing anything; as ``run``."""
        static, arrays = split_arrays(params, args, self.dialect.numbers)
        analysis = self._trace(fn, static, arrays, prefix).analysis
        state: dict[str, Any] = {}
        if self.resolver is None:
            return state
        decisions = self.decide(analysis, is_whole)
        for site in analysis.plan.chosen:
            if site.key in decisions.states:
                paths.put(state, decisions.states[site.key], contract.make_state(site, arrays[0]))
        for part in prefix:
            state = state.get(part, {})
        return state

    def convert(
        self,
        fn: Function,
        params: Any,
        args: tuple[Any, ...],
        quant_state: State,
        missing: Callable[[str, str, str], str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """Quantize the weight of every layer as the training forward does; as ``find_kernels``.

        Returns:
          The parameters, with a ``ConvertedKernel`` for the leaf of every layer that is converted, and for each layer
          whose weight stays float the reason.
        """
        found, reasons = self.find_kernels(fn, params, args, quant_state, missing)
        leaves, structure = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, ConvertedKernel))
        for index, name in enumerate(paths.leaf_names(jax.tree.unflatten(structure, range(len(leaves))))):
            if name in found:
                leaves[index] = found[name].convert_stacked(leaves[index], found[name].states)
        return jax.tree.unflatten(structure, leaves), reasons

    def find_kernels(
        self,
        fn: Function,
        params: Any,
        args: tuple[Any, ...],
        quant_state: State,
        missing: Callable[[str, str, str], str] | None = None,
    ) -> tuple[dict[paths.Name, kernels.LayerKernel], dict[str, str]]:
        """Find the weight of every layer, without computing anything; as ``run``.

        Args:
          fn, params, args, quant_state: as for ``run``; arrays may be anything with a shape and a dtype.
          missing: as in ``Dialect``.

        Returns:
          By path of the parameter, its kernel, and for each layer whose weight stays float the reason.
        """
        refuse_trained(quant_state)
        static, arrays = split_arrays(params, args, self.dialect.numbers)
        analysis = self._trace(fn, static, arrays).analysis
        if self.resolver is None:
            return {}, {}
        decisions = self.decide(analysis)
        served = converted.check_served(analysis, arrays[0], self.backend)
        sentences = missing or self.dialect.missing, self.dialect.misfit
        states = decisions.read_states(analysis.plan, unpack(quant_state), *sentences, served, contract.kernel_fields)
        names = array_names(static)
        found, reasons = kernels.find_kernels(analysis, arrays[0], names, states, self.backend)
        self._left_float = reasons
        what = "; ".join(f"{path or 'the root layer'}: {why}" for path, why in reasons.items())
        text = f"the weights of {len(reasons)} layers stay in float and need their quant state, if any ({what})"
        if reasons and self.config.strict:
            raise NotImplementedError(f"strict true, and {text}")
        if reasons:
            warnings.warn(text, stacklevel=3)
        return {names[index]: kernel for index, kernel in found.items()}, reasons

    def trace(self, fn: Function, params: Any, args: tuple[Any, ...], prefix: paths.Name = ()) -> Traced:
        """Trace a function; arrays may be ``jax.ShapeDtypeStruct``."""
        return self._trace(fn, *split_arrays(params, args, self.dialect.numbers), prefix)

    def report(self, fn: Function, params: Any, args: tuple[Any, ...]) -> Report:
        """List every contraction, with its recipe or the reason for which it is in float; binds nothing."""
        split = split_arrays(params, args, self.dialect.numbers)
        analysis = self._trace(fn, *split, is_kept=self.decisions is not None).analysis
        if self.resolver is not None and not analysis.is_decided:
            self._extended(analysis, self.decisions).apply(analysis.plan)
        return Report(tuple(row_of(site, self.backend) for site in analysis.plan.contractions()))

    def decide(self, analysis: Analysis, is_whole: bool = True) -> Decisions:
        """Apply the decisions to a trace; the first one makes them.

        Raises:
          ValueError: a rule that matches no layer, no layer at all, or one that was not decided on.
          NotImplementedError: the config is strict, and a layer is out of reach.
        """
        is_first = is_whole and not self._has_seen_all
        if analysis.is_decided and self.decisions is not None and not is_first:
            return self.decisions
        if not is_whole and not self._has_seen_all and self.resolver is not None:
            self.resolver.check_alone()
        decisions = self._extended(analysis, self.decisions, check=is_first)
        decisions.apply(analysis.plan)
        self._check(analysis, is_first)
        mark_readings(analysis.plan, self.backend.can_share)
        self.decisions, analysis.is_decided = decisions, True
        self._has_seen_all |= is_whole
        return decisions

    def layers(self, analysis: Analysis) -> list[Row]:
        """List the layers of a program, with what would be decided, to the errors of ``decide``; binds nothing."""
        if self.resolver is not None:
            self._extended(analysis, self.decisions).apply(analysis.plan)
        return layer_rows(analysis, self.resolver, self.backend)

    def _extended(self, analysis: Analysis, known: Decisions | None, check: bool = True) -> Decisions:
        assert self.resolver is not None
        if known is not None and not self.dialect.may_extend:
            return known
        names: dict[str, Any] = {"operation": self.dialect.operation, "owner": self.dialect.owner}
        return decide(analysis, self.resolver, self.backend, known, check=check, **names)

    def _check(self, analysis: Analysis, is_first: bool) -> None:
        assert self.resolver is not None
        sites = list(analysis.plan.contractions())
        if is_first and not analysis.plan.chosen:
            kind = f"no {self.dialect.layers}"
            what = "; ".join(dict.fromkeys(f"{site.path}: {site.reason}" for site in sites)) or f"it has {kind}"
            raise ValueError(
                f"quantization {self.config.quantization!r} would quantize {kind} of {self.dialect.what} ({what})"
            )
        if not self.config.strict:
            return
        lost = [site for site in sites if site.is_out_of_reach and self.resolver(site.path, site.out_features).recipe]
        if lost:
            what = "; ".join(dict.fromkeys(f"{site.path}: {site.reason}" for site in lost))
            raise NotImplementedError(
                f"strict true, and {len(lost)} matmuls with parameters stay in float ({what}); leave them out by a "
                "rule with recipe null, or set strict to false"
            )

    def _trace(
        self,
        fn: Function,
        static: Split,
        arrays: tuple[list[Any], list[Any]],
        prefix: paths.Name = (),
        is_kept: bool = True,
    ) -> Traced:
        """Trace and analyse a function; with ``is_kept``, once for arguments of the same shapes."""
        converted.refuse_bare(arrays[0])
        seen = [converted.standin(leaf) for leaf in arrays[0]], arrays[1]
        make = self._make_jaxpr
        if not is_kept:
            make = jax.make_jaxpr(_Call(self.dialect.numbers), static_argnums=(0, 1), return_shape=True)
        closed, outputs = make(fn, static, *seen)
        place = id(closed.jaxpr), prefix, registered()
        analysis = self._analyses.get(place) if is_kept else None
        if analysis is None:
            names = [(*prefix, *name) for name in array_names(static)]
            shapes = [tuple(getattr(leaf, "shape", ())) for leaf in arrays[0]]
            analysis = Analysis(closed, names, shapes, root_is_layer=self.dialect.root_is_layer)
            # One that closes over traced arrays belongs to this trace alone.
            if is_kept and not any(isinstance(each, Tracer) for each in closed.consts):
                self._analyses[place] = analysis
        return Traced(analysis, closed, dataclasses.replace(outputs, arrays=[]))

    def _missing(self, is_served: bool, recipe: str, path: str, field: str) -> str:
        """Return the sentence about state that is missing, of a trained model or beside converted kernels."""
        if not is_served and path not in self._left_float:
            return self.dialect.missing(recipe, path, field)
        why = f" ({self._left_float[path]})" if path in self._left_float else ""
        return (
            f"convert left the weight at {path!r} in float{why}, so that recipe {recipe!r} needs its quant state there "
            f"and this call has no {field!r}; pass the quant state that convert was given"
        )

    def _instead(self) -> Any:
        return INSTEAD.value if INSTEAD.value is not None and INSTEAD.value.engine is self else None

    def _run(
        self,
        fn: Function,
        static: Split,
        place: tuple[paths.Name, bool, bool],
        arrays: tuple[list[Any], list[Any]],
        quant_state: State,
        key: jax.Array | None,
        is_kept: bool = True,
    ) -> Outputs:
        instead = self._instead()
        if self.resolver is None and instead is None:
            return Outputs.of(fn(*static.rebuild(arrays)), self.dialect.numbers)
        prefix, is_whole, skips = place
        whole_state: Any = unpack(quant_state)
        for part in reversed(prefix):
            whole_state = {part: whole_state}
        analysis, closed, outputs = self._trace(fn, static, arrays, prefix, is_kept)
        if instead is not None:
            return dataclasses.replace(
                outputs, arrays=instead(analysis, closed.consts, [*arrays[0], *arrays[1]], whole_state)
            )
        decisions = self.decide(analysis, is_whole)
        if skips and not analysis.plan.chosen:
            return dataclasses.replace(outputs, is_skipped=True)
        must = self.config.checkpoint_is_quantized
        served = converted.check_served(analysis, arrays[0], self.backend, must_be_converted=must)
        missing = functools.partial(self._missing, bool(served))
        states = decisions.read_states(analysis.plan, whole_state, missing, self.dialect.misfit, served)
        noise = None
        if key is not None and any(site.recipe.is_stochastic for site in analysis.plan.chosen if site.recipe):
            noise = fold_many(key, analysis.plan.seeds)
        run = Rewriter(self._contract, self._share)
        outs = run.evaluate(analysis.plan, closed.consts, [*arrays[0], *arrays[1]], states, noise)
        return dataclasses.replace(outputs, arrays=outs)

    def _contract(self, site: Contraction, eqn: Any, operands: list[Any], state: Any, *rest: Any) -> Any:
        assert site.side is not None
        if state:
            state = self.dialect.watch(site.path, (operands[1 - site.side], operands[site.side]), state)
        layer = layer_name(site.path)
        operands = [
            each if isinstance(each, ConvertedKernel) or index > 1 else reverse_only(layer, each)
            for index, each in enumerate(operands)
        ]
        with self._scope(site):
            return contract.contract(self.backend, site, eqn, operands, state, *rest)

    def _share(self, site: Contraction, activation: Any, states: Any) -> Any:
        """Quantize an activation for all contractions that read it; ``states`` are theirs, without axes of scans."""
        reading = site.reading
        assert reading is not None
        options: dict[str, Any] = {"axes": reading.axes, "implementation": reading.implementation}
        with self._scope(site):
            return self.backend.share(activation, list(map(nested, states)), recipe=reading.recipe, **options)

    def _scope(self, site: Contraction) -> Any:
        return contextlib.nullcontext() if self.dialect.has_scopes else jax.named_scope(site.path)


class _Call:
    """A call of a function on the arrays of its arguments. Each object has programs of its own in jax's caches."""

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers

    def __call__(self, fn: Function, static: Split, *arrays: Any) -> Outputs:
        return Outputs.of(fn(*static.rebuild(arrays)), self._numbers)
