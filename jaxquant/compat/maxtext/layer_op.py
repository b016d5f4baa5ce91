"""Op that is passed to a layer: a contraction on any backend, with its quant state and its converted kernel.

Convert mode runs the training forward pass and writes the quantized kernel to the collection "aqt", at
``LAYER/OP/qrhs/frozen``. Serve mode reads the kernel from there. The layer still passes a float kernel, which may be
zeros, because only its shape and dtype are used. The collection and the names are the same as in AQT, so that a model
with these names in its ``nn.scan`` and its checkpoints runs on any backend.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxquant.backends import RANDOM_STREAM, Backend, load
from jaxquant.backends._weights import check_converted, uncalibrated_error
from jaxquant.backends.base import Setup
from jaxquant.compat.maxtext.stored import freeze, thaw
from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import QTensor
from jaxquant.core.quant_state import SPARSITY, LayerState
from jaxquant.core.recipe import Recipe
from jaxquant.inject.linen import missing_state
from jaxquant.ops import sparsity
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.dot_general import initial_state
from jaxquant.state import watch
from jaxquant.state.table import ENTRY, layers_of, make_state
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, refuse_trained

Array = jax.Array
COLLECTION, STORED = "aqt", "qrhs"


class LayerOp(nn.Module):
    """Contraction of an activation and a weight by a recipe; quant state is in ``_overwrite_with_gradient``.

    Attributes:
      quantization: ``Quantization`` handle with backend, mode and ``replicate_scale``.
      recipe: recipe of the layer.
      layer: path of the layer.
      mesh_axes: logical axis names of the kernel, which are also set on the stored kernel in serve mode.
    """

    quantization: Any
    recipe: Recipe
    layer: str
    mesh_axes: tuple[str | None, ...] = ()

    @property
    def backend(self) -> Backend:
        return load(self.quantization.backend)

    @nn.compact
    def __call__(
        self, lhs: Array, rhs: Array, dimension_numbers, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        """Compute ``jax.lax.dot_general`` of an activation and a weight."""
        dims, recipe = Dimensions.of(dimension_numbers, lhs.ndim, rhs.ndim), self.recipe
        mode = self.quantization.quant_mode.value
        weight: Any = rhs
        state: LayerState = {}
        if mode == "serve" and recipe.fwd.rhs is not None:
            weight = self._read(rhs, dims)
        else:
            state = self._quant_state(rhs, dims)
            if recipe.sparsity is not None:
                masks = self._guard_state((rhs,), state[SPARSITY])
                weight = sparsity.sparsify(recipe.sparsity, dims.rhs_contract, rhs, masks)
        # Without a random stream, the op derives the noise from the values that it rounds.
        key = self.make_rng(RANDOM_STREAM) if recipe.is_stochastic and self.has_rng(RANDOM_STREAM) else None
        amaxes = {tensor: fields for tensor, fields in state.items() if tensor != SPARSITY}
        setup = Setup(
            recipe,
            numbers=dims.numbers,
            precision=precision,
            dtype=preferred_element_type,
            state=self._guard_state((lhs, weight), amaxes),
            key=key,
            implementation=self.quantization.resolver.implementation,
        )
        out = self.backend.contract(lhs, weight, setup)
        if mode == "convert" and recipe.fwd.rhs is not None:
            self._write(rhs, dims, state)
        return out

    def _quant_state(self, rhs: Array, dims: Dimensions) -> LayerState:
        """Return the stored state, or create it during initialization; a state created later would never be updated."""
        recipe, initial = self.recipe, {**initial_state(self.recipe)}
        if recipe.sparsity is not None:
            initial[SPARSITY] = sparsity.initial_state(rhs, recipe.sparsity, dims.rhs_contract)
        if not initial:
            return {}
        is_there = self.has_variable(OVERWRITE_WITH_GRADIENT, ENTRY)
        if not is_there and not (self.is_initializing() and self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)):
            raise ValueError(
                f"{missing_state(recipe.name, self.layer, next(iter(initial)))}; if the layer is under nn.scan, pass "
                f"variable_axes={{'{OVERWRITE_WITH_GRADIENT}': 0}} to nn.scan"
            )
        state: Any = self.variable(OVERWRITE_WITH_GRADIENT, ENTRY, make_state, initial).value
        refuse_trained(state)
        return layers_of(state)[""]

    def _guard_state(self, operands: tuple[Array, ...], state: Any) -> Any:
        """Return the state; a gradient that does not include the state will raise an error."""
        return watch.LINEN(self.layer, operands, state) if state else state

    # -- converted kernels -------------------------------------------------------------------------------------------

    def _convert(self, kernel: Array, dims: Dimensions, state: Any) -> QTensor:
        axes, batch = dims.rhs_contract, dims.rhs_batch
        tensor = self.backend.quantize_weight("dot_general", self.recipe, kernel, axes, state, batch)
        return tensor.astype(kernel.dtype.name)

    def _write(self, kernel: Array, dims: Dimensions, state: Any) -> None:
        """Convert the kernel with the quant state of this call, and store it."""
        tensor = self._convert(kernel, dims, state)
        scale = tensor.input_scale
        # Under jit, the value of the scale is unknown; the served result is then NaN instead of an error.
        if scale is not None and not self.is_initializing() and not isinstance(scale, Tracer) and not scale.all():
            raise uncalibrated_error(self.layer, self.recipe)
        if not self.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{layer_name(self.layer)} is in convert mode, but the collection {COLLECTION!r} is not mutable; apply "
                f"the model with mutable=[{COLLECTION!r}]"
            )
        frozen, _ = freeze(self.backend.name, self.recipe, tensor, dims.rhs_contract, ())
        self.put_variable(COLLECTION, STORED, {"frozen": frozen})

    def _read(self, kernel: Array, dims: Dimensions) -> QTensor:
        """Return the stored kernel; during initialization, store zeros first."""
        axes, state = dims.rhs_contract, initial_state(self.recipe)
        wanted = jax.eval_shape(lambda k: self._convert(k, dims, {**state, "sparsity": {"mask": k}}), kernel)
        if self.is_initializing() and self.is_mutable_collection(COLLECTION):
            zeros = wanted.replace(lambda _, part: jnp.zeros(part.shape, part.dtype))
            frozen, names = freeze(self.backend.name, self.recipe, zeros, axes, self.mesh_axes)
            frozen = _set_axis_names(frozen, names, self.quantization.replicate_scale) if names else frozen
            self.put_variable(COLLECTION, STORED, {"frozen": frozen})
        stored: Any = nn.meta.unbox(self.get_variable(COLLECTION, STORED, {}))
        if "frozen" not in stored:
            raise ValueError(
                f"{layer_name(self.layer)} is in serve mode, but the collection {COLLECTION!r} has no converted kernel "
                "for this layer; first apply the model, created with "
                f"jaxquant.compat.maxtext.configure_quantization(config, 'convert'), with mutable=[{COLLECTION!r}]"
            )
        tensor = thaw(self.backend.name, stored["frozen"], kernel.ndim, axes).astype(kernel.dtype.name)
        check_converted(self.layer, _describe(tensor), repr(self.recipe.name), _describe(wanted))
        return tensor


def _describe(tensor: QTensor) -> str:
    return f"{tensor.description}{'' if tensor.input_scale is None else ', with an input_scale'}"


def _set_axis_names(tensor: Any, names: Any, replicate_scale: bool) -> Any:
    """Set the axis names of the float kernel on the stored kernel; an axis of size 1 of a scale gets no name."""

    def name(part: Array) -> nn.LogicallyPartitioned:
        is_scale = part is not tensor.qvalue
        sizes = zip(names, part.shape, strict=True)
        return nn.LogicallyPartitioned(
            part, tuple(None if is_scale and (replicate_scale or size == 1) else name for name, size in sizes)
        )

    return jax.tree.map(name, tensor)
