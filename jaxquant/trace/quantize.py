"""quantize: the public function, and the quantized function that it returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxquant.config.quant_config import QuantConfig
from jaxquant.config.rules import Resolver
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.trace import native, paths
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.arguments import Split, array_names, split_arrays
from jaxquant.trace.decisions import Decisions, decide
from jaxquant.trace.report import Report, row_of
from jaxquant.trace.rewrite import Rewriter


def quantize(fn: Callable[..., Any], config: Any, *, like: QuantizedFunction | None = None) -> QuantizedFunction:
    """Return a function whose matmuls with parameters run in the low precision that a config asks for.

    The function is traced, and every ``dot_general`` of which one operand is made of parameters alone is a linear
    layer, whatever library wrote it. Its path is that of its parameter, without a last name such as ``kernel``; rules
    and ``intmp`` files match this path. The quantized function is called as ``qfn(params, quant_state, *args,
    key=None)``, and its training loop is

        quant_state = qfn.init(params, *args)
        grads, seen = jax.grad(lambda p, s: loss(qfn(p, s, *args)), argnums=(0, 1))(params, quant_state)
        params, quant_state = optimizer_step(params, grads), jaxquant.state.update(quant_state, seen)

    Weights that a scan slices have state for each of its steps, a weight that is the same in every step has one state,
    and each element of a weight's batch axes (experts) has scales and state of its own. (``vmap`` over weights of which
    all take one activation leaves no batch axis: that is one wide matmul, with one scale.) Decisions are made once, on
    the first trace (that of ``init``, or of the first call), and hold for the parameters whatever is called later.

    Left in float by default, below rules: tables of embeddings that are also looked up; the last layer where its result
    goes into a softmax, a log-sum-exp or an argmax; layers whose result is ranked (routers); and what
    ``maybe_quantize_model`` excludes by name. What cannot be replaced is in ``qfn.report(params, *args)`` with the
    reason, and an error where the config is ``strict``.

    Args:
      fn: ``fn(params, *args)``, of any tree of parameters. What it closes over is constant. As under ``jax.jit``,
        arrays and numbers are traced; other leaves of the arguments (bool, str, functions) are static.
      config: anything that ``QuantConfig.from_any`` takes. ``quant_backend: auto`` is native here.
      like: the quantized whole model, of whose parameters ``fn`` computes a part: its decisions are taken, and its
        quant state.

    Raises:
      NotImplementedError: the backends aqt and qwix, and settings of serving.

    Source: the interpreter pattern of "Writing custom interpreters in JAX"; quax does the same for array types.
    """
    config = QuantConfig.from_any(config)
    _refuse(config)
    return QuantizedFunction(fn, config, like)


def _refuse(config: QuantConfig) -> None:
    if config.use_qwix_quantization or config.quant_backend in ("aqt", "qwix"):
        wrote = (
            "use_qwix_quantization true" if config.use_qwix_quantization else f"quant_backend {config.quant_backend!r}"
        )
        raise NotImplementedError(
            f"{wrote} does not run in jaxquant.quantize yet; use quant_backend 'native', which runs the same recipes, "
            "or jaxquant.maybe_quantize_model"
        )
    for name, advice in (
        ("checkpoint_is_quantized", "converted parameters run through jaxquant.maybe_quantize_model"),
        ("save_quantized_params_path", "write converted parameters with jaxquant.serving.save"),
        ("quantize_kvcache", "give the model's attention a cache of jaxquant.serving.kv_cache"),
    ):
        if getattr(config, name):
            raise NotImplementedError(f"{name} {getattr(config, name)!r} does not run in jaxquant.quantize; {advice}")


class QuantizedFunction:
    """A function of parameters, quant state and arguments; make it with ``jaxquant.quantize``.

    Attributes:
      config: what it was quantized with.
    """

    def __init__(self, fn: Callable[..., Any], config: QuantConfig, like: QuantizedFunction | None) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.config = config
        self._fn, self._like, self._decisions = fn, like, None
        self._resolver: Resolver | None = config.resolver()
        # jit for its cache alone: without it each call outside of a jit would trace and compile anew.
        self._cached = jax.jit(self._run, static_argnums=0, inline=True)

    def __call__(self, params: Any, quant_state: Mapping[str, Any], *args: Any, key: jax.Array | None = None) -> Any:
        """Compute the function in low precision.

        Args:
          params: parameters.
          quant_state: from ``init`` and ``jaxquant.state.update``; {} for recipes that keep none. Its gradient is what
            was seen.
          args: further arguments.
          key: for stochastic rounding; None makes noise from the bits of what is rounded.

        Raises:
          ValueError: state that is missing or does not fit, a layer on which was not decided, a rule that matches no
            layer, or no layer at all.
          NotImplementedError: the config is strict, and a layer is out of reach.
        """
        _refuse_converted(params)
        static, arrays = split_arrays(params, args)
        return self._cached(static, arrays, quant_state, key)

    def init(self, params: Any, *args: Any) -> dict[str, Any]:
        """Make the quant state, {} for recipes that keep none, without computing anything of the function.

        Args:
          params, args: as the function takes them; arrays may be ``jax.ShapeDtypeStruct``. Where the function has
            collectives, their axes must be bound, as for the function itself.

        Raises:
          ValueError, NotImplementedError: as the function itself.
        """
        _refuse_converted(params)
        analysis, _ = self._analyze(*split_arrays(params, args))
        state: dict[str, Any] = {}
        if self._resolver is None:
            return state
        decisions = self._decide(analysis)
        for site in analysis.plan.chosen:
            if site.key in decisions.states:
                paths.put(state, decisions.states[site.key], native.make_state(site))
        return state

    def report(self, params: Any, *args: Any) -> Report:
        """List every contraction of the function, with its recipe or the reason for which it is in float.

        Args:
          params, args: as for ``init``.
        """
        analysis, _ = self._analyze(*split_arrays(params, args))
        if self._resolver is not None:
            (self._bound() or decide(analysis, self._resolver)).apply(analysis.plan)
        return Report(tuple(row_of(site) for site in analysis.plan.contractions()))

    def _bound(self) -> Decisions | None:
        if self._like is None:
            return self._decisions
        bound = self._like._bound()
        if bound is None:
            raise ValueError("jaxquant.quantize like: the whole model has no decisions yet; call its init first")
        return bound

    def _decide(self, analysis: Analysis) -> Decisions:
        """Apply the decisions to a trace; the first one makes them."""
        assert self._resolver is not None
        bound = self._bound()
        decisions = bound or decide(analysis, self._resolver)
        decisions.apply(analysis.plan)
        self._check(analysis, is_first=bound is None)
        if bound is None:
            self._decisions = decisions
        return decisions

    def _check(self, analysis: Analysis, is_first: bool) -> None:
        assert self._resolver is not None
        sites = list(analysis.plan.contractions())
        if is_first and not analysis.plan.chosen:
            what = "; ".join(dict.fromkeys(f"{site.path}: {site.reason}" for site in sites)) or "it has no matmul"
            raise ValueError(
                f"quantization {self.config.quantization!r} would quantize no matmul of this function ({what})"
            )
        if not self.config.strict:
            return
        lost = [site for site in sites if site.is_out_of_reach and self._resolver(site.path, site.out_features).recipe]
        if lost:
            what = "; ".join(dict.fromkeys(f"{site.path}: {site.reason}" for site in lost))
            raise NotImplementedError(
                f"strict true, and {len(lost)} matmuls with parameters stay in float ({what}); leave them out by a "
                "rule with recipe null, or set strict to false"
            )

    def _analyze(self, static: Split, arrays: tuple[list[Any], list[Any]]) -> tuple[Analysis, Any]:
        """Trace the function. Returns what it computes, and the traced program with its output's tree."""
        closed, shape = jax.make_jaxpr(lambda *arrays: self._fn(*static.rebuild(arrays)), return_shape=True)(*arrays)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in arrays[0]]
        return Analysis(closed, array_names(static), shapes), (closed, jax.tree.structure(shape))

    def _run(
        self, static: Split, arrays: tuple[list[Any], list[Any]], quant_state: Mapping[str, Any], key: jax.Array | None
    ) -> Any:
        if self._resolver is None:
            return self._fn(*static.rebuild(arrays))
        analysis, (closed, structure) = self._analyze(static, arrays)
        decisions = self._decide(analysis)
        states = decisions.read_states(analysis.plan, quant_state)
        if not any(site.recipe.is_stochastic for site in analysis.plan.chosen if site.recipe is not None):
            key = None
        flat = [*arrays[0], *arrays[1]]
        outs = Rewriter(native.contract).evaluate(analysis.plan, closed.consts, flat, states, key)
        return jax.tree.unflatten(structure, outs)


def _refuse_converted(params: Any) -> None:
    leaves = jax.tree.leaves(params, is_leaf=lambda each: isinstance(each, (QTensor, ConvertedKernel)))
    if any(isinstance(each, (QTensor, ConvertedKernel)) for each in leaves):
        raise NotImplementedError(
            "params hold converted kernels (QTensor), on which a function of jaxquant.quantize does not run yet; "
            "jaxquant.maybe_quantize_model with checkpoint_is_quantized true does"
        )
