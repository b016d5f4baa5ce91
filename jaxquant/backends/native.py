"""native: a recipe as Linen modules around ``ops.dot_general``, with its quant state.

Models that pass quantization to their layers by hand have two more modes. Convert mode runs the training forward and
writes the quantized kernel to the collection "aqt", at ``LAYER/OP/qrhs/frozen``, with the static scale of the
activation, where the recipe has one, at ``LAYER/OP/qrhs/input_scale``. Serve mode reads them and looks at shape and
dtype alone of the kernel that the layer hands over, which may be zeros. Collection and names are AQT's, so that a model
which lists them in its ``nn.scan`` and its checkpoints runs on either backend.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxquant.backends._weights import check_converted, never_seen
from jaxquant.backends.base import RANDOM_STREAM, TRAINING, Op, OpOptions, renamed
from jaxquant.core.paths import at_layer, join_path, layer_name
from jaxquant.core.qtensor import INPUT_SCALE, ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops import sparsity
from jaxquant.ops.dot_general import QuantState, dot_general, initial_state
from jaxquant.ops.einsum import einsum, plan_einsum
from jaxquant.ops.operand import input_scale, quantize_kernel
from jaxquant.state import OVERWRITE_WITH_GRADIENT, watch

Array = jax.Array
COLLECTION = "aqt"


class _Quantized(nn.Module):
    """Hold the quant state of one contraction in ``_overwrite_with_gradient``.

    Attributes:
      recipe: all numbers.
      options: how it is built.
    """

    recipe: Recipe
    options: OpOptions = OpOptions()

    def _variables(self, prefix: str, values: dict[str, Array]) -> dict[str, Array]:
        """Read the state, or make it while initializing; state that is made anew in each call would never advance."""
        names = [f"{prefix}_{name}" for name in values]
        missing = [name for name in names if not self.has_variable(OVERWRITE_WITH_GRADIENT, name)]
        if missing and not (self.is_initializing() and self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)):
            raise ValueError(
                f"recipe {self.recipe.name!r} at {at_layer(join_path(self.path[:-1]))} keeps state in the collection "
                f"'{OVERWRITE_WITH_GRADIENT}', and this call has no {missing[0]!r} there: pass the collection to apply "
                f"beside 'params', and where the layer is under nn.scan, give it "
                f"variable_axes={{'{OVERWRITE_WITH_GRADIENT}': 0}}; state that was stored, or of flax's "
                "own ops, goes through jaxquant.state.with_bins"
            )
        return {
            name: self.variable(OVERWRITE_WITH_GRADIENT, full, lambda value=value: value).value
            for full, (name, value) in zip(names, values.items(), strict=True)
        }

    def _quant_state(self, *operands: Array) -> QuantState:
        state = {name: self._variables(name, values) for name, values in initial_state(self.recipe).items()}
        return self._watched(operands, state)

    def _watched(self, operands: tuple[Array, ...], state: Any) -> Any:
        """Return state, watched so that a gradient which leaves it out is an error."""
        return watch.LINEN(join_path(self.path[:-1]), operands, state) if state else state

    def _sparsify(self, weight: Array, axes: tuple[int, ...]) -> Array:
        spec = self.recipe.sparsity
        if spec is None:
            return weight
        state = self._variables("sparsity", sparsity.initial_state(weight, spec, axes))
        return sparsity.sparsify(spec, axes, weight, self._watched((weight,), state))

    def _key(self) -> Array | None:
        """A key for stochastic rounding, where the caller passes a "quant" stream; else the op makes its own."""
        return self.make_rng(RANDOM_STREAM) if self.recipe.is_stochastic and self.has_rng(RANDOM_STREAM) else None

    def _stored(self, kernel: Array, axes: tuple[int, ...], batch: tuple[int, ...]) -> Array | ConvertedKernel:
        """Return the stored kernel in serve mode, else the float one, as where the recipe leaves kernels in float."""
        if self.options.quant_mode != "serve" or self.recipe.fwd.rhs is None:
            return kernel
        tensor, scale = jax.eval_shape(functools.partial(_shapes, self.recipe, axes=axes, batch=batch), kernel)
        wanted = {"frozen": tensor} | ({} if scale is None else {INPUT_SCALE: scale})

        def make() -> dict[str, Any]:
            values = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), wanted)
            if self.options.mesh_axes:
                values["frozen"] = _named(values["frozen"], self.options.mesh_axes, self.options.replicate_scale)
            return values

        stored = nn.meta.unbox(_Frozen(name="qrhs").read(make))
        check_converted(join_path(self.path[:-1]), _describe(stored), repr(self.recipe.name), _describe(wanted))
        return ConvertedKernel(stored["frozen"], kernel.dtype.name, stored.get(INPUT_SCALE))

    def _store(self, kernel: Array, axes: tuple[int, ...], batch: tuple[int, ...]) -> None:
        """Store the kernel in convert mode, with the quant state that the op has just made or read."""
        if self.options.quant_mode != "convert" or self.recipe.fwd.rhs is None:
            return
        state = {
            tensor: {field: self.get_variable(OVERWRITE_WITH_GRADIENT, f"{tensor}_{field}") for field in fields}
            for tensor, fields in _state_of_kernel(self.recipe, None).items()
        }
        converted, scale = convert_kernel(self.recipe, kernel, axes, state, batch)
        # Under jit there is no telling, and what is served is NaN.
        if scale is not None and not self.is_initializing() and not isinstance(scale, Tracer) and not scale.all():
            raise never_seen(join_path(self.path[:-1]), self.recipe)
        _Frozen(name="qrhs").write({"frozen": converted} | ({} if scale is None else {INPUT_SCALE: scale}))


def activation_as_read(recipe: Recipe, activation: Array, weight: Array | ConvertedKernel) -> Array:
    """Return an activation in the dtype in which the op reads it: flax's ops compute in the kernel's."""
    return activation.astype(weight.dtype) if recipe.matches_flax else activation


def convert_kernel(
    recipe: Recipe,
    kernel: Array,
    axes: Sequence[int],
    state: Mapping[str, Mapping[str, Array]],
    batch: Sequence[int] = (),
) -> tuple[QTensor, Array | None]:
    """Quantize a layer's kernel as its op does in training.

    Args:
      recipe: all numbers.
      kernel: in the dtype in which the op reads it.
      axes: its contraction axes.
      state: the layer's quant state by tensor ("input", "kernel", "sparsity") and field; {} for a recipe without.
      batch: its batch axes.

    Returns:
      The kernel and the static scale of the activation, shape (1,), None where that is scaled dynamically.
    """
    if recipe.sparsity is not None:
        kernel = jnp.where(state["sparsity"]["mask"] > 0, kernel, 0)
    return quantize_kernel(kernel, axes, recipe=recipe, state=state, batch=batch), input_scale(recipe, state)


class DotGeneral(_Quantized):
    """``jax.lax.dot_general`` of an activation and a weight in the low precision of ``recipe``."""

    @nn.compact
    def __call__(
        self, lhs: Array, rhs: Array, dimension_numbers, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        axes, batch = (tuple(axis % rhs.ndim for axis in each[1]) for each in dimension_numbers)
        weight, state = self._stored(rhs, axes, batch), None
        lhs = activation_as_read(self.recipe, lhs, weight)
        if not isinstance(weight, ConvertedKernel):
            weight, state = self._sparsify(weight, axes), self._quant_state(lhs, weight)
        out = dot_general(
            lhs,
            weight,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            state=state,
            key=self._key(),
            implementation=self.options.implementation,
        )
        self._store(rhs, axes, batch)
        return out


class Einsum(_Quantized):
    """A two-operand einsum of an activation and a weight in the low precision of ``recipe``."""

    @nn.compact
    def __call__(
        self, equation: str, lhs: Array, rhs: Array, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        axes, batch = (), ()
        if self.options.quant_mode != "train":
            plan = plan_einsum(equation.replace(" ", ""), lhs.ndim, rhs.ndim)
            axes, batch = plan.kernel_axes(f"einsum {equation!r}"), tuple(plan.dimension_numbers[1][1])
        weight = self._stored(rhs, axes, batch)
        lhs = activation_as_read(self.recipe, lhs, weight)
        out = einsum(
            equation,
            lhs,
            weight,
            recipe=self.recipe,
            state=None if isinstance(weight, ConvertedKernel) else self._quant_state(lhs, weight),
            key=self._key(),
            precision=precision,
            preferred_element_type=preferred_element_type,
            transform=self._sparsify,
            implementation=self.options.implementation,
        )
        self._store(rhs, axes, batch)
        return out


def op_name(op: Op, recipe: Recipe) -> str:
    """Return the name of an op's module: flax's for delayed scaling, so that checkpoints of its ops load."""
    if recipe.delayed is None:
        return "DotGeneral" if op == "dot_general" else "Einsum"
    if op == "einsum":
        return "Fp8Einsum"
    is_fnuz = isinstance(recipe.fwd.rhs, TensorSpec) and recipe.fwd.rhs.dtype.endswith("fnuz")
    return "NANOOFp8DotGeneralOp" if is_fnuz else "Fp8DirectDotGeneralOp"


def linen_op(op: Op, recipe: Recipe, options: OpOptions = TRAINING) -> functools.partial[Any]:
    """Make a factory of an op's modules; see ``Backend.linen_op``."""
    kind = renamed(DotGeneral if op == "dot_general" else Einsum, op_name(op, recipe))
    return functools.partial(kind, recipe=recipe, options=options)


# -- stored kernels ----------------------------------------------------------------------------------------------------


class _Frozen(nn.Module):
    """Hold a converted kernel in the collection."""

    @nn.compact
    def write(self, values: dict[str, Any]) -> None:
        """Store what was converted."""
        if not self.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{_layer(self)} converts and the collection {COLLECTION!r} cannot be written; apply the model "
                f"with mutable=[{COLLECTION!r}]"
            )
        for name, value in values.items():
            self.variable(COLLECTION, name, lambda value=value: value).value = value

    @nn.compact
    def read(self, make: Any) -> dict[str, Any]:
        """Return what is stored; while initializing, ``make()`` it."""
        if self.is_initializing() and self.is_mutable_collection(COLLECTION):
            return {name: self.variable(COLLECTION, name, lambda v=value: v).value for name, value in make().items()}
        if not self.has_variable(COLLECTION, "frozen"):
            raise ValueError(
                f"{_layer(self)} serves and the collection {COLLECTION!r} has no converted kernel "
                f"for it; convert first: apply the model of configure_quantization(config, 'convert') with "
                f"mutable=[{COLLECTION!r}]"
            )
        names = [name for name in ("frozen", INPUT_SCALE) if self.has_variable(COLLECTION, name)]
        return {name: self.get_variable(COLLECTION, name) for name in names}


def _layer(frozen: _Frozen) -> str:
    return layer_name(join_path(frozen.path[:-2]))


def _describe(values: dict[str, Any]) -> str:
    tensor = values["frozen"]
    scale = ", with an input_scale" if INPUT_SCALE in values else ""
    return f"{tensor.description}{scale}"


def _state_of_kernel(recipe: Recipe, mask: Any) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {tensor: dict(fields) for tensor, fields in initial_state(recipe).items()}
    return state if recipe.sparsity is None else state | {"sparsity": {"mask": mask}}


def _shapes(
    recipe: Recipe, kernel: Array, *, axes: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[QTensor, Array | None]:
    return convert_kernel(recipe, kernel, axes, _state_of_kernel(recipe, kernel), batch)


def _named(tensor: QTensor, mesh_axes: tuple[str | None, ...], replicate_scale: bool) -> Any:
    """Label the axes of a stored kernel as those of the float one; a scale has no name where it is shared."""

    def names(part: str, array: Array) -> tuple[str | None, ...]:
        if part == "qvalue":
            return mesh_axes
        sizes = zip(mesh_axes, array.shape, strict=True)
        return tuple(None if replicate_scale or size == 1 else name for name, size in sizes)

    return tensor.replace(lambda part, array: nn.LogicallyPartitioned(array, names(part, array)))
