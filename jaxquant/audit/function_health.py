"""FunctionHealth: the tensors of every layer of a function of ``jaxquant.quantize``, whatever its framework.

As ``audit.health``, which taps the layers of Linen models: a probe beside the quant state of each layer has the layer's
records as its cotangent, so that whatever maps or scans over state does so with probes. An NNX model is a function of
its parameters: ``graph, params, rest = nnx.split(model, nnx.Param, ...)``, and
``lambda params, rest, x: nnx.merge(graph, params, rest)(x)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxquant.audit.health import HealthRow, Static, observe_forward, specs_of, tap
from jaxquant.audit.statistics import WIDTH, read
from jaxquant.backends import Backend
from jaxquant.core.quant_state import TENSORS
from jaxquant.ops.dimensions import Dimensions
from jaxquant.trace import contract
from jaxquant.trace.arguments import split_arrays
from jaxquant.trace.plan import Contraction, Key
from jaxquant.trace.quantize import QuantizedFunction
from jaxquant.trace.rewrite import Rewriter

Array = jax.Array
PROBE = "quant_health"


class FunctionHealth:
    """Measure amax, scale, saturation, flushing and SQNR of every quantized layer's tensors.

    ``monitor(params, quant_state, *args)`` runs the loss forward and backward once, without gradients of the
    parameters, and returns {statistic: float32 [rows, 3]}, columns in the order ``input``, ``kernel``, ``output_grad``,
    as ``HealthMonitor`` does. Of ragged matmuls and convolutions amax and nonfinite are known.

    Attributes:
      rows: the quantized layers in the order of the program, or each of those that a scan or a batch axis stacks.
    """

    def __init__(self, function: QuantizedFunction, loss: Callable[..., Array], params: Any, *args: Any):
        """Find the layers; nothing is computed.

        Args:
          function: made by ``jaxquant.quantize``.
          loss: (what the function returns, ...) -> scalar; it gets the further arguments of the function, too.
          params, args: arguments of the function; arrays may be ``jax.ShapeDtypeStruct``.

        Raises:
          TypeError: not a quantized function.
          ValueError: the config quantizes nothing of it.
        """
        if not isinstance(function, QuantizedFunction):
            raise TypeError(
                f"FunctionHealth measures a function of jaxquant.quantize, got {type(function).__name__}; "
                "HealthMonitor measures Linen models"
            )
        self._function, self._loss = function, loss
        engine = function.engine
        if engine.resolver is None:
            raise ValueError("quantization is off, so there is no health to measure")
        analysis = engine.trace(function.hashable, params, args).analysis
        decisions = engine.decide(analysis)
        sites: dict[Key, Contraction] = {}
        for site in analysis.plan.chosen:
            sites.setdefault(site.key, site)
        self._shapes = {key: _stack(site) for key, site in sites.items()}
        rows = []
        for key, site in sites.items():
            dtypes = {name: spec and spec.dtype for name, spec in specs_of(_measured(site)).items()}
            path = decisions.states.get(key, site.path)
            rows += [HealthRow(path, index, dtypes) for index in np.ndindex(self._shapes[key])]
        self.rows = tuple(rows)

    def __call__(self, params: Any, quant_state: Mapping[str, Any], *args: Any) -> dict[str, Float[Array, "rows 3"]]:
        """Return the statistics of every layer's tensors.

        Args:
          params, quant_state, args: as the quantized function takes them.
        """
        engine = self._function.engine
        analysis, closed, outputs = engine.trace(self._function.hashable, params, args)
        flat = [each for part in split_arrays(params, args)[1] for each in part]
        speech = engine.dialect
        states = engine.decide(analysis).read_states(analysis.plan, quant_state, speech.missing, speech.misfit)
        tapping = functools.partial(_contract, engine.backend)

        def tapped(probes: list[Array]) -> Array:
            given = {key: {**states[key], PROBE: probe} for key, probe in zip(self._shapes, probes, strict=True)}
            outs = Rewriter(tapping).evaluate(analysis.plan, closed.consts, flat, given, None)
            return self._loss(dataclasses.replace(outputs, arrays=outs).rebuild(), *args)

        probes = [jnp.zeros((*stack, len(TENSORS) * WIDTH)) for stack in self._shapes.values()]
        found = [each.reshape(-1, len(TENSORS), WIDTH) for each in jax.grad(tapped)(probes)]
        return read(jnp.concatenate(found))


def _measured(site: Contraction) -> Any:
    """Return the recipe whose quantization is measured, None where only magnitudes are."""
    return site.recipe if site.operation == "dot_general" else None


def _stack(site: Contraction) -> tuple[int, ...]:
    scans = tuple(length for _, length in site.stack)
    return contract.leading_axes(site) if site.operation == "dot_general" else scans


def _contract(
    backend: Backend,
    site: Contraction,
    eqn: Any,
    operands: list[Any],
    state: Mapping[str, Array],
    key: Array | None,
    prepared: None,
) -> Array:
    """Compute a contraction as the quantized function does, and tap it."""
    own = {name: value for name, value in state.items() if name != PROBE}
    out = contract.contract(backend, site, eqn, operands, own, key)
    assert site.side is not None
    activation, weight = operands[1 - site.side], operands[site.side]
    if site.operation != "dot_general":
        static = Static(None, Dimensions.of((((), ()), ((), ())), 0, 0), ())
        return _tap_one(static, out, state[PROBE], activation, weight, {})
    contracted, batch = eqn.params["dimension_numbers"]
    if site.side == 0:
        contracted, batch = contracted[::-1], batch[::-1]
    groups = len(batch[0])
    free = [x.ndim - groups - len(contracted[0]) for x in (activation, weight)]
    assert site.recipe is not None
    if site.recipe.shares_experts:
        dims = Dimensions.of((contracted, batch), activation.ndim, weight.ndim)
        tapped = functools.partial(_tap_one, Static(site.recipe, dims, tuple(range(groups + sum(free)))))
    else:
        (activation, over), (weight, by) = (
            _without_batch(x, axes, first)
            for x, axes, first in zip((activation, weight), contracted, batch, strict=True)
        )
        dims = Dimensions.of(((over, by), ((), ())), activation.ndim - groups, weight.ndim - groups)
        tapped = functools.partial(_tap_one, Static(site.recipe, dims, tuple(range(sum(free)))))
        for _ in range(groups):
            tapped = jax.vmap(tapped)
    order = tuple(range(groups + sum(free)))
    if site.side == 0:  # the equation has the weight's axes first
        order = (*order[:groups], *order[groups + free[1] :], *order[groups : groups + free[1]])
    out = tapped(jnp.transpose(out, order), state[PROBE], activation, weight, own)
    return jnp.transpose(out, tuple(map(int, np.argsort(order))))


def _tap_one(static: Static, out: Array, probe: Array, lhs: Array, rhs: Array, state: dict[str, Array]) -> Array:
    forward, backward = observe_forward(static, jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), state)
    return tap(static, out, probe, forward, backward)


def _without_batch(x: Array, contracted: tuple[int, ...], batch: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Move the batch axes of an operand to the front; also return its contraction axes as they are behind these."""
    rest = [axis for axis in range(x.ndim) if axis not in batch]
    return jnp.transpose(x, (*batch, *rest)), tuple(rest.index(axis) for axis in contracted)
