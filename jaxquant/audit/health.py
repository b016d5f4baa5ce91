"""Health: what quantization does to the input, kernel and output gradient of every linear layer of a Linen model.

Data flow of one call of a health monitor:

    layer's input, kernel ── quantized by the layer's recipe ──► record ┐
    layer's output ── tap (the identity) ──► loss                       │
    its gradient ── quantized by the layer's recipe ──► record ─────────┴──► cotangent of the layer's probe

A probe is a zero vector among the parameters of the layer, for the length of the call alone: whatever cuts and stacks
parameters (``nn.scan``, ``nn.vmap``, remat) does the same to probes and their cotangents. No backend is asked. The
tensors are those of the running model, and their statistics come from ``core.quantize`` with the recipe's numbers and,
for delayed scaling, with the scale that the quant state gives in this step.
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
from flax.core import meta
from jaxtyping import Float

from jaxquant.audit.statistics import WIDTH, read, record
from jaxquant.backends._linen import layers_apart
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import HISTORY, MASK, SCALE, SPARSITY, TENSORS, fields_of
from jaxquant.core.recipe import FORWARD, Recipe, TensorSpec
from jaxquant.core.rounding import content_key
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE, SMALLEST_SCALE
from jaxquant.core.trees import subtree
from jaxquant.inject.layers import einsum_equation, kind_of, out_features, relative_path, trace_init
from jaxquant.inject.linen import DIALECT
from jaxquant.inject.linen_classes import as_float
from jaxquant.ops.dimensions import Dimensions, DotDimensionNumbers
from jaxquant.ops.einsum import plan_einsum
from jaxquant.ops.gradients import align
from jaxquant.ops.operand import quantize_operand
from jaxquant.state import OVERWRITE_WITH_GRADIENT, frozen

Array = jax.Array
PROBE = "quant_health"
"""The name of a layer's probe, beside its kernel."""
_READ = (SCALE, HISTORY)
"""The quant state of a tensor from which its scale is computed."""

# Part of the key of jit's caches: a function traced without taps is traced again with them.
_active_monitor = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, slots=True)
class HealthRow:
    """One linear layer, or one of those that ``nn.scan`` or ``nn.vmap`` stacks.

    Attributes:
      path: "/"-joined module path.
      index: position along the stacked axes, () where there are none.
      dtypes: element type by tensor (``input``, ``kernel``, ``output_grad``), None for one that stays float.
    """

    path: str
    index: tuple[int, ...]
    dtypes: dict[str, str | None]

    @property
    def name(self) -> str:
        return self.path + (f", layer {'.'.join(map(str, self.index))}" if self.index else "")


class HealthMonitor:
    """Measure amax, scale, saturation, flushing and SQNR of every linear layer's tensors.

    ``monitor(params, *args)`` runs ``loss(params, *args)`` forward and backward once, without gradients of the
    parameters, and returns {statistic: float32 [rows, 3]}, columns in the order ``input``, ``kernel``, ``output_grad``;
    ``audit.statistics.read`` has the formulas. Jit it together with what prepares its arguments.

    ``input`` and ``kernel`` are what the forward matmul quantizes, ``output_grad`` what the matmul of the activation's
    gradient does: where the recipe multiplies the kernel's per-channel scale into the output gradient first, all but
    its amax are of the product. A recipe that rounds stochastically is measured with one draw of the noise, not that of
    the step. A layer used more than once counts all its uses together. Of a float layer only amax and nonfinite are
    known, and a layer that no gradient reaches has NaN.

    Attributes:
      rows: the layers, in the order of the forward pass.
    """

    def __init__(
        self, model: nn.Module, config: Any, loss: Callable[..., Array], *example_inputs: Any, **example_kwargs: Any
    ):
        """Find the linear layers and their recipes; nothing is computed.

        Args:
          model: the quantized Linen model that ``loss`` applies.
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
        self._resolver = QuantConfig.from_any(config).resolver()
        self._loss = loss
        self._recipes: dict[str, Recipe | None] = {}
        with _active_monitor(self), layers_apart(), nn.intercept_methods(self._intercept), as_float(model):
            params = meta.unbox(trace_init(model, *example_inputs, **example_kwargs)["params"])
        if not self._recipes:
            raise ValueError(f"{type(model).__name__} has no linear layer, so there is no health to measure")
        self._shapes: dict[str, tuple[int, ...]] = {path: _probe_of(params, path).shape for path in self._recipes}
        self._order, self.rows = self._make_rows()

    def __call__(self, params: Mapping[str, Any], *args: Any) -> dict[str, Float[Array, "rows 3"]]:
        """Return the statistics of every layer's tensors.

        Args:
          params: of the model, without quant state.
          args: further arguments of the loss.
        """

        def tapped(probes: dict[str, Array]) -> Array:
            with _active_monitor(self), layers_apart(), nn.intercept_methods(self._intercept):
                return self._loss(_with_probes(params, probes), *args)

        probes = {path: jnp.zeros(shape, jnp.float32) for path, shape in self._shapes.items()}
        with frozen():  # it measures, and records nothing
            cotangents = jax.grad(tapped)(probes)
        stacked = [_records_last(cotangents[path]).reshape(-1, len(TENSORS), WIDTH) for path in self._recipes]
        return read(jnp.concatenate(stacked)[self._order])

    @property
    def shards(self) -> int:
        """Blocks into which recipes cut a batch: a part of a batch must be a multiple of it."""
        return math.lcm(*(recipe.drhs.shards for recipe in self._recipes.values() if recipe))

    def _make_rows(self) -> tuple[np.ndarray, tuple[HealthRow, ...]]:
        """Order the rows layer by layer where layers are stacked; also return each row's index in stacked order."""
        found = []
        block = -1
        previous = None
        for position, (path, recipe) in enumerate(self._recipes.items()):
            stack = _stack_of(self._shapes[path])
            current = (path.split("/")[0], stack) if stack else None
            block += current is None or current != previous
            previous = current
            dtypes = {name: spec and spec.dtype for name, spec in specs_of(recipe).items()}
            found += [(block, index, position, HealthRow(path, index, dtypes)) for index in np.ndindex(stack)]
        order = sorted(range(len(found)), key=lambda i: found[i][:3])
        return np.array(order), tuple(found[i][3] for i in order)

    def _intercept(
        self, next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module = context.module
        # A model that is a linear layer itself has a wrapper around its own call, which makes no parameters.
        makes_parameters = hasattr(getattr(context.orig_method, "func", None), "compact")
        if kind_of(module) is None or context.method_name != "__call__" or not makes_parameters:
            return next_fun(*args, **kwargs)
        path = relative_path(module, ())
        if module.is_initializing():
            out = next_fun(*args, **kwargs)
            if path not in self._recipes:
                decision = self._resolver and self._resolver(path, out_features(module, args, kwargs))
                self._recipes[path] = decision.recipe if decision else None
            module.param(PROBE, nn.initializers.zeros_init(), (len(TENSORS) * WIDTH,), jnp.float32)
            return out
        variables = meta.unbox(module.variables)
        if PROBE not in variables["params"]:
            raise ValueError(f"{layer_name(path)} did not run when the health monitor's example was traced")
        inputs = args[0] if args else kwargs["inputs"]
        lhs, rhs, _ = module.promote_dtype(inputs, variables["params"]["kernel"], None, dtype=module.dtype)  # pyright: ignore
        lhs, rhs, dims, order = _contraction(module, lhs, rhs, args, kwargs)
        static = Static(self._recipes[path], dims, order)
        state = _find_state(variables.get(OVERWRITE_WITH_GRADIENT, {}))
        if absent := [name for name in _state_that_is_read(static.recipe) if name not in state]:
            assert static.recipe is not None
            raise ValueError(DIALECT.missing(static.recipe.name, path, absent[0]))
        forward, backward = observe_forward(static, jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), state)
        return tap(static, next_fun(*args, **kwargs), variables["params"][PROBE], forward, backward)


@dataclasses.dataclass(frozen=True)
class Static:
    """What of a layer's call is fixed while tracing; ``order`` brings the output into ``lax.dot_general``'s layout."""

    recipe: Recipe | None
    dims: Dimensions
    order: tuple[int, ...]


def specs_of(recipe: Recipe | None) -> dict[str, TensorSpec | None]:
    """Return the spec of each tensor, None for a float one."""
    specs = {name: recipe.specs[operand] if recipe else None for name, (operand, _) in TENSORS.items()}
    return {name: spec if isinstance(spec, TensorSpec) else None for name, spec in specs.items()}


def observe_forward(static: Static, lhs: Array, rhs: Array, state: dict[str, Array]):
    """Record input and kernel; also return what the output gradient's quantization reads."""
    specs = specs_of(static.recipe)
    if (mask := fields_of(state, SPARSITY).get(MASK)) is not None:
        rhs = jnp.where(mask > 0, rhs, 0)
    q_lhs = _quantize(static, "input", lhs, (static.dims.lhs_contract, static.dims.lhs_batch), state)
    q_rhs = _quantize(static, "kernel", rhs, (static.dims.rhs_contract, static.dims.rhs_batch), state)
    records = jnp.concatenate([record(lhs, specs["input"], q_lhs), record(rhs, specs["kernel"], q_rhs)])
    reuses = static.recipe is not None and static.recipe.dlhs.rhs == FORWARD
    # The qvalues are kept for their scale; what is not read of them, XLA drops.
    return records, (q_rhs if reuses else None, {k: v for k, v in state.items() if k.startswith("output_grad")})


def _observe_gradient(static: Static, grad: Array, kernel: QTensor | None, state: dict[str, Array]) -> Array:
    recipe, spec = static.recipe, specs_of(static.recipe)["output_grad"]
    if recipe is None or spec is None:
        return record(grad, None, None)
    grad = grad.transpose(static.order)
    dims, _ = static.dims.for_dlhs()
    aligned = grad
    if kernel is not None:
        aligned, kept = align(grad, kernel, dims, recipe.fwd.rhs, is_delayed=spec.scaling == "delayed")
        if kept is not kernel and kept.scale.size == 1:  # of the product, not of its part above a power of two
            aligned = aligned * kept.scale.reshape(())
    tensor = _quantize(static, "output_grad", aligned, (dims.lhs_contract, dims.lhs_batch), state)
    return record(aligned, spec, tensor, original=grad)


def _quantize(
    static: Static, name: str, x: Array, dims: tuple[tuple[int, ...], tuple[int, ...]], state: dict[str, Array]
) -> QTensor | None:
    """Quantize as the recipe says, with the delayed scale of this step where there is one.

    Args:
      static: of the layer's call.
      name: of the tensor.
      x: the tensor.
      dims: its contraction and batch axes.
      state: quant state of the layer.
    """
    recipe, spec = static.recipe, specs_of(static.recipe)[name]
    if recipe is None or spec is None:
        return None
    own = None
    if spec.scaling == "delayed":
        own = {field: value for field, value in fields_of(state, name).items() if field in _READ}
    is_gradient = name == "output_grad"
    tensor, _ = quantize_operand(
        x,
        spec,
        dims[0],
        recipe=recipe,
        batch=dims[1],
        state=own,
        key=content_key(x) if spec.rounding == "stochastic" else None,
        floor=SMALLEST_GRADIENT_SCALE if is_gradient else SMALLEST_SCALE,
    )
    return tensor


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tap(static: Static, out: Array, probe: Array, forward: Array, backward: Any) -> Array:
    """Return ``out``. The cotangent of ``probe`` is the layer's three records."""
    return out


def _tap_fwd(static, out, probe, forward, backward):
    return out, (forward, backward)


def _tap_bwd(static, residuals, grad):
    forward, backward = residuals
    return grad, jnp.concatenate([forward, _observe_gradient(static, grad, *backward)]), None, None


tap.defvjp(_tap_fwd, _tap_bwd)


def _contraction(
    module: nn.Module, lhs: Array, rhs: Array, args: Any, kwargs: Any
) -> tuple[Array, Array, Dimensions, tuple[int, ...]]:
    """Convert a linear layer to ``lax.dot_general``'s form: operands, dimensions, transposition of the output."""
    numbers: DotDimensionNumbers
    if isinstance(module, nn.Einsum):
        plan = plan_einsum(einsum_equation(module, args, kwargs), lhs.ndim, rhs.ndim)
        lhs = lhs.sum(axis=plan.lhs_sum) if plan.lhs_sum else lhs
        rhs = rhs.sum(axis=plan.rhs_sum) if plan.rhs_sum else rhs
        order = tuple(int(axis) for axis in np.argsort(plan.permutation))
        return lhs, rhs, Dimensions.of(plan.dimension_numbers, lhs.ndim, rhs.ndim), order
    if isinstance(module, nn.DenseGeneral):
        # flax sorts both, and so lays out the kernel.
        axes, batch = (
            sorted(axis % lhs.ndim for axis in _as_tuple(given)) for given in (module.axis, module.batch_dims)
        )
        first = len(batch)
        numbers = ((axes, tuple(range(first, first + len(axes)))), (batch, tuple(range(first))))
    else:
        numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    dims = Dimensions.of(numbers, lhs.ndim, rhs.ndim)
    return lhs, rhs, dims, tuple(range(dims.out_ndim))


def _as_tuple(axes: Any) -> tuple[int, ...]:
    return tuple(axes) if isinstance(axes, (tuple, list)) else (int(axes),)


def _state_that_is_read(recipe: Recipe | None) -> list[str]:
    delayed = [name for name, spec in specs_of(recipe).items() if spec and spec.scaling == "delayed"]
    return [f"{name}_{field}" for name in delayed for field in _READ]


def _find_state(variables: Mapping[str, Any]) -> dict[str, Array]:
    """Return the quant state of the one op below a layer, by flax's names."""
    found: dict[str, Array] = {}
    for name, value in variables.items():
        found |= _find_state(value) if isinstance(value, Mapping) else {name: value}
    return found


def _probe_of(params: Mapping[str, Any], path: str) -> Any:
    return subtree(params, path)[PROBE]


def _with_probes(params: Mapping[str, Any], probes: Mapping[str, Array]) -> dict[str, Any]:
    """Copy a tree of parameters with a probe beside each kernel; the arrays are shared."""
    new: dict[str, Any] = {
        name: _with_probes(value, {}) if isinstance(value, Mapping) else value for name, value in params.items()
    }
    for path, probe in probes.items():
        subtree(new, path)[PROBE] = probe
    return new


def _stack_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stacked axes of a probe; where they lie is the model's choice."""
    rest = list(shape)
    rest.remove(len(TENSORS) * WIDTH)
    return tuple(rest)


def _records_last(probe: Array) -> Array:
    return jnp.moveaxis(probe, probe.shape.index(len(TENSORS) * WIDTH), -1)
