"""Health: what quantization does to the input, kernel and output gradient of every linear layer.

Data flow of one call of a health monitor:

    layer's input, kernel ── quantized by the layer's recipe ──► record ┐
    layer's output ── tap (the identity) ──► loss                       │
    its gradient ── quantized by the layer's recipe ──► record ─────────┴──► cotangent of the layer's probe

A probe is a zero vector beside the quant state of a layer, with the axes that state has: the scans that slice the
weight, and its batch axes. The engine evaluates the traced program with the taps in it, float layers too. The tensors
are those of the running model, and their statistics come from ``core.quantize`` with the recipe's numbers and, for
delayed scaling, with the scale that the quant state gives in this step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jaxtyping import Float

from jaxquant.audit.statistics import WIDTH, read, record
from jaxquant.backends import Backend
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import HISTORY, MASK, SCALE, SPARSITY, TENSORS, fields_of
from jaxquant.core.recipe import FORWARD, MatmulSpec, Recipe, TensorSpec
from jaxquant.core.rounding import RandomKey, content_key
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE
from jaxquant.inject.faces import quantized_with
from jaxquant.inject.linen import Face
from jaxquant.ops.converted import each_element
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.gradients import align
from jaxquant.ops.operand import quantize_operand
from jaxquant.state import frozen
from jaxquant.trace import contract
from jaxquant.trace.analysis import Analysis
from jaxquant.trace.decisions import Decisions
from jaxquant.trace.engine import INSTEAD, Engine
from jaxquant.trace.plan import Contraction, Key
from jaxquant.trace.rewrite import Rewriter

Array = jax.Array
PROBE = "quant_health"
"""The name of a layer's probe, beside its quant state."""
_READ = (SCALE, HISTORY)
"""The quant state of a tensor from which its scale is computed."""
_FLOAT = Recipe("float", fwd=MatmulSpec())
"""The recipe of a float layer, for the length of a call."""


@dataclasses.dataclass(frozen=True, slots=True)
class HealthRow:
    """One linear layer, or one of those that a scan or a batch axis stacks.

    Attributes:
      path: "/"-joined path of the layer.
      index: position along the stacked axes, () where there are none.
      dtypes: element type by tensor (``input``, ``kernel``, ``output_grad``), None for one that stays float.
    """

    path: str
    index: tuple[int, ...]
    dtypes: dict[str, str | None]

    @property
    def name(self) -> str:
        return self.path + (f", layer {'.'.join(map(str, self.index))}" if self.index else "")


class Monitor:
    """Measure amax, scale, saturation, flushing and SQNR of every linear layer's tensors.

    A monitor runs a loss forward and backward once, without gradients of the parameters, and returns {statistic:
    float32 [rows, 3]}, columns in the order ``input``, ``kernel``, ``output_grad``; ``audit.statistics.read`` has the
    formulas. Jit it together with what prepares its arguments.

    ``input`` and ``kernel`` are what the forward matmul quantizes, ``output_grad`` what the matmul of the activation's
    gradient does: where the recipe multiplies the kernel's per-channel scale into the output gradient first, all but
    its amax are of the product. A recipe that rounds stochastically is measured with one draw of the noise, not that of
    the step. A layer used more than once counts all its uses together. Of float layers, ragged matmuls and convolutions
    only amax and nonfinite are known, and a layer that no gradient reaches has NaN.

    Attributes:
      rows: the layers, in the order of the forward pass.
    """

    def __init__(self, engine: Engine, analysis: Analysis, run: Callable[..., Array]) -> None:
        self._engine, self._run = engine, run
        if engine.resolver is not None:
            engine.decide(analysis)
        self._sites: dict[Key, Contraction] = {}
        for site in analysis.plan.contractions():
            if site.is_replaceable and not any(leaf.index in analysis.looked_up for leaf in site.leaves):  # no table
                self._sites.setdefault(site.key, site)
        self._order, self.rows = _make_rows(list(self._sites.values()))

    def __call__(self, params: Any, *args: Any) -> dict[str, Float[Array, "rows 3"]]:
        """Return the statistics of every layer's tensors.

        Args:
          params, args: of the loss of ``HealthMonitor``; of the quantized function of ``FunctionHealth``.
        """

        def tapped(probes: list[Array]) -> Array:
            taps = _Taps(self._engine, dict(zip(self._sites, probes, strict=True)))
            with INSTEAD(taps):
                return self._run(params, *args)

        probes = [jnp.zeros((*contract.leading_axes(site), len(TENSORS) * WIDTH)) for site in self._sites.values()]
        with frozen():  # it measures, and records nothing
            found = jax.grad(tapped)(probes)
        return read(jnp.concatenate([each.reshape(-1, len(TENSORS), WIDTH) for each in found])[self._order])

    @property
    def shards(self) -> int:
        """Blocks into which recipes cut a batch: a part of a batch must be a multiple of it."""
        return math.lcm(*(site.recipe.drhs.shards for site in self._sites.values() if site.recipe))


class HealthMonitor(Monitor):
    """Measure the layers of a Linen model: a ``Monitor`` whose ``monitor(params, *args)`` runs ``loss(params, *args)``.

    Attributes:
      rows: the layers, in the order of the forward pass.
    """

    def __init__(
        self, model: nn.Module, config: Any, loss: Callable[..., Array], *example_inputs: Any, **example_kwargs: Any
    ):
        """Find the linear layers and their recipes; nothing is computed.

        Args:
          model: the quantized Linen model that ``loss`` applies, or a float one, which nothing quantizes.
          config: what it was quantized with, anything that ``QuantConfig.from_any`` takes.
          loss: (params, ...) -> scalar. Quant state of a recipe that keeps it is one of the further arguments.
          example_inputs, example_kwargs: arguments of the model's ``__call__``; arrays may be ``jax.ShapeDtypeStruct``.

        Raises:
          TypeError: not a Linen module.
          ValueError: a model without a linear layer.
          TypeError, ValueError, NotImplementedError: the config, as ``QuantConfig.from_any``.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"HealthMonitor taps the layers of a Linen module, got {type(model).__name__}; "
                "function_health.FunctionHealth measures any function of jaxquant.quantize, NNX models' too"
            )
        face = quantized_with(model)
        is_float = face is None
        face = face or Face(QuantConfig.from_any(config))

        def run(params: Any, *args: Any) -> Array:
            if not is_float:
                return loss(params, *args)
            program = jax.make_jaxpr(loss)(params, *args)  # what it closes over is data, too

            def function(params: Any, consts: list[Any], *args: Any) -> Array:
                return eval_jaxpr(program.jaxpr, consts, *jax.tree.leaves((params, args)))[0]

            return face.engine.run(function, params, (program.consts, *args), {})

        super().__init__(face.engine, face.trace_example(model, *example_inputs, **example_kwargs).analysis, run)
        if not self.rows:
            raise ValueError(f"{type(model).__name__} has no linear layer, so there is no health to measure")


def _make_rows(sites: list[Contraction]) -> tuple[np.ndarray, tuple[HealthRow, ...]]:
    """Order the rows layer by layer where layers are stacked; also return each row's index in stacked order."""
    found, block, previous = [], -1, None
    for position, site in enumerate(sites):
        stack = contract.leading_axes(site)
        current = (site.path.split("/")[0], stack) if stack else None
        block += current is None or current != previous
        previous = current
        dtypes = {name: spec and spec.dtype for name, spec in _specs_of(_measured(site)).items()}
        found += [(block, index, position, HealthRow(site.path, index, dtypes)) for index in np.ndindex(stack)]
    order = sorted(range(len(found)), key=lambda i: found[i][:3])
    return np.array(order, int), tuple(found[i][3] for i in order)


def _measured(site: Contraction) -> Recipe | None:
    """Return the recipe whose quantization is measured, None where only magnitudes are."""
    return site.recipe if site.operation == "dot_general" and site.recipe is not _FLOAT else None


def _specs_of(recipe: Recipe | None) -> dict[str, TensorSpec | None]:
    """Return the spec of each tensor, None for a float one."""
    specs = {name: recipe.specs[operand] if recipe else None for name, (operand, _) in TENSORS.items()}
    return {name: spec if isinstance(spec, TensorSpec) else None for name, spec in specs.items()}


# -- taps --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Taps:
    """What an engine evaluates in place of the quantized program: the same with a tap behind every layer."""

    engine: Engine
    probes: Mapping[Key, Array]

    def __call__(self, analysis: Analysis, consts: Any, args: list[Array], quant_state: Mapping[str, Any]) -> list[Any]:
        plan = analysis.plan
        decisions = self.engine.decisions or Decisions({}, {})
        if self.engine.resolver is not None:
            decisions.apply(plan)
        for site in plan.contractions():
            if site.is_replaceable and site.recipe is None and site.key in self.probes:
                site.recipe = _FLOAT
        if absent := [site.path for site in plan.chosen if site.key not in self.probes]:
            raise ValueError(f"{layer_name(absent[0])} did not run when the health monitor's example was traced")
        states = decisions.read_states(plan, quant_state, self.engine.dialect)
        given = {key: {**state, PROBE: self.probes[key]} for key, state in states.items()}
        return Rewriter(functools.partial(_contract, self.engine.backend)).evaluate(plan, consts, args, given, None)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a layer's call is fixed while tracing."""

    recipe: Recipe | None
    dims: Dimensions


def _contract(
    backend: Backend,
    site: Contraction,
    eqn: Any,
    operands: list[Any],
    state: Mapping[str, Array],
    key: RandomKey | None,
    prepared: None,
) -> Array:
    """Compute a contraction as the quantized function does, or in float, and tap it."""
    own, recipe = {name: value for name, value in state.items() if name != PROBE}, _measured(site)
    if site.recipe is _FLOAT:
        out = eqn.primitive.bind(*operands, **eqn.params)
    else:
        out = contract.contract(backend, site, eqn, operands, own, key)
    assert site.side is not None
    activation, weight = operands[1 - site.side], operands[site.side]
    if site.operation != "dot_general":
        return _tap_one(
            _Static(None, Dimensions.of((((), ()), ((), ())), 0, 0)), out, state[PROBE], activation, weight, {}
        )
    contracted, batch = eqn.params["dimension_numbers"]
    if site.side == 0:
        contracted, batch = contracted[::-1], batch[::-1]
    dims = Dimensions.of((contracted, batch), activation.ndim, weight.ndim)
    groups, free = len(dims.lhs_batch), (len(dims.lhs_free), len(dims.rhs_free))
    is_one = recipe is not None and recipe.shares_experts
    static = _Static(recipe, dims if is_one else dims.of_element())

    def tap(lhs: Array, rhs: Array, _: None, out: Array, probe: Array, state: dict[str, Array]) -> Array:
        return _tap_one(static, out, probe, lhs, rhs, state)

    order = tuple(range(groups + sum(free)))
    if site.side == 0:  # the equation has the weight's axes first
        order = (*order[:groups], *order[groups + free[1] :], *order[groups : groups + free[1]])
    rest = None, jnp.transpose(out, order), state[PROBE], own
    out = tap(activation, weight, *rest) if is_one else each_element(tap, activation, weight, dims, *rest)
    return jnp.transpose(out, tuple(map(int, np.argsort(order))))


def _tap_one(static: _Static, out: Array, probe: Array, lhs: Array, rhs: Array, state: dict[str, Array]) -> Array:
    forward, backward = _observe_forward(static, jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), state)
    return _tap(static, out, probe, forward, backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(static: _Static, out: Array, probe: Array, forward: Array, backward: Any) -> Array:
    """Return ``out``. The cotangent of ``probe`` is the layer's three records."""
    return out


def _tap_fwd(static, out, probe, forward, backward):
    return out, (forward, backward)


def _tap_bwd(static, residuals, grad):
    forward, backward = residuals
    return grad, jnp.concatenate([forward, _observe_gradient(static, grad, *backward)]), None, None


_tap.defvjp(_tap_fwd, _tap_bwd)


# -- records -----------------------------------------------------------------------------------------------------------


def _observe_forward(static: _Static, lhs: Array, rhs: Array, state: dict[str, Array]):
    """Record input and kernel; also return what the output gradient's quantization reads."""
    specs = _specs_of(static.recipe)
    if (mask := fields_of(state, SPARSITY).get(MASK)) is not None:
        rhs = jnp.where(mask > 0, rhs, 0)
    q_lhs = _quantize(static, "input", lhs, (static.dims.lhs_contract, static.dims.lhs_batch), state)
    q_rhs = _quantize(static, "kernel", rhs, (static.dims.rhs_contract, static.dims.rhs_batch), state)
    records = jnp.concatenate([record(lhs, specs["input"], q_lhs), record(rhs, specs["kernel"], q_rhs)])
    reuses = static.recipe is not None and static.recipe.dlhs.rhs == FORWARD
    # The qvalues are kept for their scale; what is not read of them, XLA drops.
    return records, (q_rhs if reuses else None, {k: v for k, v in state.items() if k.startswith("output_grad")})


def _observe_gradient(static: _Static, grad: Array, kernel: QTensor | None, state: dict[str, Array]) -> Array:
    recipe, spec = static.recipe, _specs_of(static.recipe)["output_grad"]
    if recipe is None or spec is None:
        return record(grad, None, None)
    dims, _ = static.dims.for_dlhs()
    aligned = grad
    if kernel is not None:
        aligned, kept = align(grad, kernel, dims, recipe.fwd.rhs, is_delayed=spec.scaling == "delayed")
        if kept is not kernel and kept.scale.size == 1:  # of the product, not of its part above a power of two
            aligned = aligned * kept.scale.reshape(())
    tensor = _quantize(static, "output_grad", aligned, (dims.lhs_contract, dims.lhs_batch), state)
    return record(aligned, spec, tensor, original=grad)


def _quantize(
    static: _Static, name: str, x: Array, dims: tuple[tuple[int, ...], tuple[int, ...]], state: dict[str, Array]
) -> QTensor | None:
    """Quantize as the recipe says, with the delayed scale of this step where there is one.

    Args:
      static: of the layer's call.
      name: of the tensor.
      x: the tensor.
      dims: its contraction and batch axes.
      state: quant state of the layer.
    """
    recipe, spec = static.recipe, _specs_of(static.recipe)[name]
    if recipe is None or spec is None:
        return None
    own = None
    if spec.scaling == "delayed":
        own = {field: value for field, value in fields_of(state, name).items() if field in _READ}
    tensor, _ = quantize_operand(
        x,
        spec,
        dims[0],
        recipe=recipe,
        batch=dims[1],
        state=own,
        key=content_key(x) if spec.rounding == "stochastic" else None,
        floor=SMALLEST_GRADIENT_SCALE if name == "output_grad" else SMALLEST_SCALE,
    )
    return tensor
