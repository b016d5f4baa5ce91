"""Health: effect of quantization on the input, kernel and output gradient of every linear layer.

Data flow of one call of a health monitor:

    layer's input, kernel ── quantized by the layer's recipe ──► record ┐
    layer's output ── tap (the identity) ──► loss                       │
    its gradient ── quantized by the layer's recipe ──► record ─────────┴──► cotangent of the layer's probe

A probe is a zero vector next to the quant state of a layer. A probe has the leading axes of the state: the scans that
slice the weight, and the batch axes of the weight. The engine evaluates the traced program with taps, also in float
layers. The measured tensors are the tensors of the running model. The statistics come from ``core.quantize`` with the
parameters of the recipe and, for delayed scaling, with this step's scale from the quant state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from jaxquant.audit.statistics import STATISTICS, WIDTH, read, record
from jaxquant.backends import Backend
from jaxquant.backends.base import Setup
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import HEALTH, HISTORY, PROBE, SCALE, TENSORS, LayerState
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.core.rounding import content_key
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE
from jaxquant.inject.faces import face_of
from jaxquant.inject.linen import Face
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.gradients import align
from jaxquant.ops.operand import quantize_operand
from jaxquant.state import frozen
from jaxquant.terminal import Tabular
from jaxquant.trace import contract
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.decisions import Decisions
from jaxquant.trace.engine import Engine, evaluator_override
from jaxquant.trace.plan import Contraction, Key
from jaxquant.trace.quantize import QuantizedFunction
from jaxquant.trace.rewrite import Rewriter

Array = jax.Array
_SCALE_FIELDS = (SCALE, HISTORY)
"""Fields of a tensor's quant state that determine its scale."""
_FORMATS = {"sqnr": "{:.1f}"} | dict.fromkeys(("saturated", "flushed", "nonfinite"), "{:.2%}")
"""Formats of printed statistics; other statistics are printed with ``{:.4g}``."""
_FLOAT_RECIPE = Recipe("float", fwd=MatmulSpec())
"""Recipe that float layers have during a call of a monitor."""


@dataclasses.dataclass(frozen=True, slots=True)
class HealthRow:
    """One linear layer, or one layer of a stack (scan or batch axis).

    Attributes:
      path: "/"-joined path of the layer.
      index: position along the stacked axes, or ().
      dtypes: element type by tensor (``input``, ``kernel``, ``output_grad``), None for a tensor that stays in float.
    """

    path: str
    index: tuple[int, ...]
    dtypes: dict[str, str | None] = dataclasses.field(hash=False)

    @property
    def name(self) -> str:
        return self.path + (f", layer {'.'.join(map(str, self.index))}" if self.index else "")


class Health(Tabular, dict[str, Array]):
    """Statistics of every layer's tensors: statistic -> float32 [rows, 3]; prints as a table.

    Attributes:
      rows: the layers.
    """

    _right = STATISTICS

    def __init__(self, statistics: Mapping[str, Array], rows: tuple[HealthRow, ...]):
        super().__init__(statistics)
        self.rows = rows

    def _lines(self) -> list[Sequence[str]]:
        lines: list[Sequence[str]] = [("layer", "tensor", "dtype", *STATISTICS)]
        table = {name: np.asarray(self[name]) for name in STATISTICS}
        for index, row in enumerate(self.rows):
            for place, (tensor, dtype) in enumerate(row.dtypes.items()):
                found = (_FORMATS.get(name, "{:.4g}").format(table[name][index, place]) for name in STATISTICS)
                lines.append((row.name, tensor, dtype or "float", *("-" if "nan" in each else each for each in found)))
        return lines

    def summary(self) -> str:
        """Return one line with the number of layers and the tensor with the lowest SQNR."""
        sqnr = np.asarray(self["sqnr"])
        if np.isnan(sqnr).all():
            return f"{len(self.rows)} layers"
        row, tensor = np.unravel_index(np.nanargmin(sqnr), sqnr.shape)
        where = f"{self.rows[row].name or 'the root layer'}, {[*TENSORS][tensor]}"
        return f"{len(self.rows)} layers; lowest SQNR {sqnr[row, tensor]:.1f} dB ({where})"

    def __repr__(self) -> str:  # must also work while the statistics are traced
        return f"<Health: {len(self.rows)} layers>"


jax.tree_util.register_pytree_node(
    Health,
    lambda health: ([*health.values()], (tuple(health), health.rows)),
    lambda known, arrays: Health(dict(zip(known[0], arrays, strict=True)), known[1]),
)


class Monitor:
    """Monitor that measures amax, scale, saturation, flushing and SQNR of every linear layer's tensors.

    A monitor runs a loss forward and backward once, without gradients of the parameters, and returns {statistic:
    float32 [rows, 3]}, which prints as a table. Columns are ``input``, ``kernel``, ``output_grad``;
    ``audit.statistics.read`` has the formulas of the statistics. Jit the monitor together with the code that prepares
    its arguments.

    ``input`` and ``kernel`` are the tensors that the forward matmul quantizes; ``output_grad`` is the tensor that the
    matmul of the activation's gradient quantizes. If the recipe first multiplies the output gradient by the kernel's
    per-channel scale, all statistics except its amax describe the product. A recipe with stochastic rounding is
    measured with one draw of noise, which differs from the noise of the step. All uses of a layer count together. For
    float layers, ragged matmuls and convolutions, only amax and nonfinite are known. All statistics of a layer that no
    gradient reaches are NaN.

    Attributes:
      rows: layers, in the order of the forward pass.
    """

    def __init__(self, engine: Engine, analysis: Analysis, run: Callable[..., Array]) -> None:
        self._engine, self._run = engine, run
        if engine.resolver is not None:
            engine.decide(analysis)
        self._sites: dict[Key, Contraction] = {}
        for site in analysis.plan.contractions():
            # Embedding tables are not measured.
            if site.is_layer and not any(leaf.index in analysis.looked_up for leaf in site.leaves):
                self._sites.setdefault(site.key, site)
        self._order, self.rows = _make_rows(list(self._sites.values()))

    def __call__(self, params: Any, *args: Any) -> Health:
        """Return the statistics of every layer's tensors.

        Args:
          params, args: arguments of the loss if the monitor has a Linen model, otherwise of the quantized function.
        """

        def tapped(probes: list[Array]) -> Array:
            taps = _Taps(self._engine, dict(zip(self._sites, probes, strict=True)))
            with evaluator_override(taps):
                return self._run(params, *args)

        probes = [jnp.zeros((*contract.leading_axes(site), len(TENSORS) * WIDTH)) for site in self._sites.values()]
        with frozen():  # a measurement does not record observations
            found = jax.grad(tapped)(probes)
        records = jnp.concatenate([each.reshape(-1, len(TENSORS), WIDTH) for each in found])
        return Health(read(records[self._order]), self.rows)

    @property
    def shards(self) -> int:
        """Number of shards into which recipes split a batch; it must divide the size of a partial batch."""
        return math.lcm(*(site.recipe.drhs.shards for site in self._sites.values() if site.recipe))


def health(model_or_function: Any, loss: Callable[..., Array], /, *args: Any, **kwargs: Any) -> Monitor:
    """Return a monitor of the layers of a Linen model or of a quantized function, without running it.

    ``health(model, loss, *example_inputs)`` returns a monitor that is called as ``monitor(params, *args)`` with the
    arguments of ``loss(params, *args) -> scalar``. ``health(function, loss, params, *args)`` returns a monitor that is
    called like the quantized function, as ``monitor(params, quant_state, *args)``. For a function, ``loss(output,
    *args)`` maps the function's output to a scalar.

    Pass an NNX model as a function of its parameters: ``graph, params, rest = nnx.split(model, nnx.Param, ...)``, and
    ``lambda params, rest, x: nnx.merge(graph, params, rest)(x)``.

    Args:
      model_or_function: quantized Linen model that ``loss`` applies, float Linen model, or function of
        ``jaxquant.quantize``.
      loss: loss to differentiate. If a Linen model has quant state, pass it to the loss as another argument.
      args, kwargs: arguments of the model's ``__call__``, or of the function; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      TypeError: the first argument is neither a Linen module nor a quantized function.
      ValueError: the model has no linear layer, or the function's config quantizes nothing.
    """
    if isinstance(model_or_function, nn.Module):
        return _tap_model(model_or_function, loss, *args, **kwargs)
    if not isinstance(model_or_function, QuantizedFunction):
        raise TypeError(
            f"health needs a Linen module or a result of jaxquant.quantize, got {type(model_or_function).__name__}; "
            "quantize an NNX model as a function of its parameters"
        )
    return _tap_function(model_or_function, loss, *args, **kwargs)


def _tap_function(function: QuantizedFunction, loss: Callable[..., Array], params: Any, *args: Any) -> Monitor:
    engine = function.engine
    if engine.resolver is None:
        raise ValueError("quantization is off, so there is nothing to measure; set quantization to a config string")

    def run(params: Any, quant_state: Any, *args: Any) -> Array:
        return loss(function(params, quant_state, *args), *args)

    return Monitor(engine, engine.trace(function.hashable, params, args).analysis, run)


def _tap_model(model: nn.Module, loss: Callable[..., Array], *example_inputs: Any, **example_kwargs: Any) -> Monitor:
    face = face_of(model)
    is_float = face is None
    face = face or Face(QuantConfig())

    def run(params: Any, *args: Any) -> Array:
        if not is_float:
            return loss(params, *args)
        program = jax.make_jaxpr(loss)(params, *args)  # arrays that the loss closes over are data, too

        def function(params: Any, consts: list[Any], *args: Any) -> Array:
            return eval_jaxpr(program.jaxpr, consts, *jax.tree.leaves((params, args)))[0]

        return face.engine.run(function, params, (program.consts, *args), {})

    monitor = Monitor(face.engine, face.trace_example(model, *example_inputs, **example_kwargs).analysis, run)
    if not monitor.rows:
        raise ValueError(f"{type(model).__name__} has no linear layer to measure; pass a model with a linear layer")
    return monitor


def _make_rows(sites: list[Contraction]) -> tuple[np.ndarray, tuple[HealthRow, ...]]:
    """Return the position of each row in the records, and the rows; each layer of a stack has a separate row."""
    found, block, previous = [], -1, None
    for position, site in enumerate(sites):
        stack = contract.leading_axes(site)
        current = (site.path.split("/")[0], stack) if stack else None
        block += current is None or current != previous
        previous = current
        measured = site.recipe if site.operation == "dot_general" else None
        dtypes = {name: spec and spec.dtype for name, spec in _specs_of(measured).items()}
        found += [(block, index, position, HealthRow(site.path, index, dtypes)) for index in np.ndindex(stack)]
    order = sorted(range(len(found)), key=lambda i: found[i][:3])
    return np.array(order, int), tuple(found[i][3] for i in order)


def _specs_of(recipe: Recipe | None) -> dict[str, TensorSpec | None]:
    """Return the spec of each tensor, or None if the tensor stays in float."""
    specs = {name: recipe.specs[operand] if recipe else None for name, (operand, _) in TENSORS.items()}
    return {name: spec if isinstance(spec, TensorSpec) else None for name, spec in specs.items()}


# -- taps --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Taps:
    """Evaluator of the quantized program with a tap after every layer."""

    engine: Engine
    probes: Mapping[Key, Array]

    def __call__(
        self, analysis: Analysis, consts: Any, args: list[Array], layers: Mapping[str, LayerState]
    ) -> list[Any]:
        plan = analysis.plan
        decisions = self.engine.decisions or Decisions({}, {})
        if self.engine.resolver is not None:
            decisions.apply(plan)
        for site in plan.contractions():
            if site.is_layer and site.recipe is None and site.key in self.probes:
                site.recipe = _FLOAT_RECIPE
        if absent := [site.path for site in plan.chosen if site.key not in self.probes]:
            raise ValueError(f"{layer_name(absent[0])} did not run on the example inputs; pass inputs of the layer")
        states = decisions.read_states(plan, layers, self.engine.hooks)
        given = {key: state | {HEALTH: {PROBE: self.probes[key]}} for key, state in states.items()}
        return Rewriter(functools.partial(_run_tapped, self.engine.backend)).evaluate(plan, consts, args, given, None)


def _run_tapped(
    backend: Backend, site: Contraction, eqn: Any, operands: list[Any], state: LayerState, *rest: Any
) -> Array:
    """Compute a contraction like the quantized function, or in float, and tap it."""
    if site.operation == "dot_general":
        return contract.contract(_TappedBackend(backend), site, eqn, operands, state, *rest)
    own = dict(state)
    probe = own.pop(HEALTH)[PROBE]
    if site.recipe is _FLOAT_RECIPE:
        out = eqn.primitive.bind(*operands, **eqn.params)
    else:
        out = contract.contract(backend, site, eqn, operands, own, *rest)
    # Only magnitudes are measured, so all groups share one record of the complete tensor.
    return _record_and_tap(_Tap(_FLOAT_RECIPE), out, probe.sum(tuple(range(probe.ndim - 1))), {}, *operands[:2])


class _TappedBackend(Backend):
    """Backend whose matmuls are tapped, separately for each expert with its own scales."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.name)
        self._backend = backend

    def runner(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> Backend:
        """Return the backend that computes a contraction, with taps; see ``Backend.runner``."""
        return _TappedBackend(self._backend.runner(operation, recipe, dtype, is_split))

    def contract(self, lhs: Array, rhs: Any, setup: Setup, group_sizes: Array | None = None) -> Array:
        """Compute a contraction and tap it; see ``Backend.contract``."""
        state: dict[str, Any] = dict(setup.state or {})
        probe = state.pop(HEALTH)[PROBE]
        if setup.recipe.name == _FLOAT_RECIPE.name:
            dtypes, place = (setup.precision, setup.dtype), setup.out_sharding
            out = jax.lax.dot_general(lhs, rhs, setup.numbers, *dtypes, out_sharding=place)
        else:
            out = self._backend.contract(lhs, rhs, dataclasses.replace(setup, state=state))
        return _record_and_tap(
            _Tap(setup.recipe, Dimensions.of(setup.numbers, lhs.ndim, rhs.ndim)), out, probe, state, lhs, rhs
        )


@dataclasses.dataclass(frozen=True)
class _Tap:
    """Trace-time constants of a layer's call: its recipe, and its dimension numbers if tensors are quantized."""

    recipe: Recipe
    dims: Dimensions = Dimensions((), (), (), (), 0, 0)

    def measure(
        self, name: str, x: Array, axes: tuple[Any, Any], state: Mapping[str, Any], original: Array | None = None
    ) -> tuple[Array, QTensor | None]:
        """Quantize a tensor with the recipe, with this step's delayed scale if there is one, and compute its record.

        Args:
          name: name of the tensor.
          x: tensor to quantize.
          axes: contraction axes and batch axes of the tensor.
          state: quant state of the layer.
          original: tensor whose amax to record, if it is not ``x``.

        Returns:
          The record, and the quantized tensor, or None if the recipe leaves it in float.
        """
        spec = _specs_of(self.recipe)[name]
        if spec is None:
            return record(x, None, None, original), None
        read = {field: value for field, value in state.get(name, {}).items() if field in _SCALE_FIELDS}
        tensor, _, _ = quantize_operand(
            x,
            spec,
            axes[0],
            recipe=self.recipe,
            batch=axes[1],
            state=read if spec.scaling == "delayed" else None,
            key=content_key(x) if spec.rounding == "stochastic" else None,
            floor=SMALLEST_GRADIENT_SCALE if name == "output_grad" else SMALLEST_SCALE,
        )
        return record(x, spec, tensor, original), tensor


def _record_and_tap(static: _Tap, out: Array, probe: Array, state: Mapping[str, Any], lhs: Array, rhs: Array) -> Array:
    """Record the activation and the weight, and tap the output with the values that measure its gradient."""
    dims, (lhs, rhs) = static.dims, jax.lax.stop_gradient((lhs, rhs))
    left, _ = static.measure("input", lhs, (dims.lhs_contract, dims.lhs_batch), state)
    right, kernel = static.measure("kernel", rhs, (dims.rhs_contract, dims.rhs_batch), state)
    kept = kernel if static.recipe.dlhs.rhs == FORWARD else None  # only its scale is read; XLA removes the rest
    state = {name: state[name] for name in state if name == "output_grad"}
    return _tap(static, out, probe, jnp.concatenate([left, right]), (kept, state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(static: _Tap, out: Array, probe: Array, forward: Array, backward: Any) -> Array:
    """Return ``out``. The cotangent of ``probe`` is the layer's three records."""
    return out


def _tap_fwd(static, out, probe, forward, backward):
    return out, (forward, backward)


def _tap_bwd(static, residuals, grad):
    forward, (kernel, state) = residuals
    spec, (dims, _), aligned = _specs_of(static.recipe)["output_grad"], static.dims.for_dlhs(), grad
    if kernel is not None and spec is not None:
        aligned, kept = align(grad, kernel, dims, static.recipe.fwd.rhs, is_delayed=spec.scaling == "delayed")
        if kept is not kernel and kept.scale.size == 1:  # align divided the product by this power of two
            aligned = aligned * kept.scale.reshape(())
    axes = dims.lhs_contract, dims.lhs_batch
    backward, _ = static.measure("output_grad", aligned, axes, state, original=grad)
    return grad, jnp.concatenate([forward, backward]), None, None


_tap.defvjp(_tap_fwd, _tap_bwd)
