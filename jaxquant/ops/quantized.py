"""quantized: the forward and backward pass that all quantized contractions share.

Data flow of a call, for the operands of ``recipe``:

    lhs, rhs ── prepare ──► qvalues ── product ──► y
        └── residuals: one byte an element and the scales (``prepared.py``)
    grad ── fold the residual's per-channel scale in ── quantize ── gradient ──► dlhs, drhs
    quant state ── observations (``delayed.observe``) ──► returned as the "gradient" of the state

``dot_general``, ``ragged_dot`` and ``conv_general_dilated`` are each an ``Operation``, which quantizes operands and
computes three products. This file does the rest: noise keys, the shared output gradient, observations, clipping and the
sharding of each gradient.

A contraction is one nested jit: a model with many equal layers traces, differentiates and lowers that jit once.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxquant.core import delayed
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, operand_dtype
from jaxquant.core.recipe import Matmul, Operand, Recipe, Side, TensorSpec
from jaxquant.core.rounding import RandomKey, content_key, gradient_keys, key_of
from jaxquant.core.scales import SMALLEST_GRADIENT_SCALE
from jaxquant.core.sharding import Placement, device_key, fit_varying, varying_axes
from jaxquant.ops.converted import check_input_scale, with_input_gradient
from jaxquant.ops.dimensions import Axes
from jaxquant.ops.gradients import RESULT_NAME, first_order
from jaxquant.ops.groups import Groups
from jaxquant.ops.operand import Observation, forward_key, quantize_operand
from jaxquant.ops.pieces import QuantState, hashable_precision
from jaxquant.ops.prepared import QuantizedOperand, Residual, reads_clip

Array = jax.Array
Gradient = Literal["dlhs", "drhs"]


@dataclasses.dataclass(frozen=True)
class Primal:
    """Shape, dtype and sharding of an operand and of its gradient."""

    shape: tuple[int, ...]
    dtype: str
    place: Placement


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """The static parameters of a quantized contraction, and its products.

    Attributes:
      recipe: recipe of the contraction.
      lhs, rhs: types of the operands.
      out_dtype: dtype of the result.
      precision: precision of the matmuls, or None for their default.
      implementation: implementation of casts and matmuls, or None to select one.
    """

    recipe: Recipe
    lhs: Primal
    rhs: Primal
    out_dtype: str
    precision: Any
    implementation: str | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def of(
        cls, lhs: Array, rhs: Array | QTensor, precision: Any, out_dtype: Any, *, recipe: Recipe, **fields: Any
    ) -> Any:
        """Return the operation of two operands; ``fields`` are the fields that the subclass adds."""
        arrays = (lhs, rhs.qvalue if isinstance(rhs, QTensor) else rhs)
        left = Primal(lhs.shape, lhs.dtype.name, Placement.of(*arrays))
        right = Primal(rhs.shape, operand_dtype(rhs), Placement.of(*arrays[::-1]))
        out = jnp.dtype(out_dtype or jnp.promote_types(left.dtype, right.dtype)).name
        return cls(recipe, left, right, out, hashable_precision(precision), **fields)

    def for_matmul(self, matmul: Matmul) -> Operation:
        """Return the operation with the arithmetic of one of its matmuls."""
        own = self.recipe.for_matmul(matmul)
        return self if own is self.recipe else dataclasses.replace(self, recipe=own)

    @abc.abstractmethod
    def prepare(self, side: Side, x: Array, groups: Any, state: Any, key: RandomKey | None) -> QuantizedOperand:
        """Quantize an operand for the forward product, and choose its residual."""

    def axes(self, side: Side) -> tuple[Axes, Axes]:
        """Return the contraction and the batch axes of an operand."""
        raise NotImplementedError

    def quantize_activation(self, x: Array, static_scale: Array | None, groups: Any, key: RandomKey | None) -> Any:
        """Quantize the activation of a converted kernel, with its own scale or the kernel's ``input_scale``."""
        spec = self.recipe.fwd.lhs
        assert isinstance(spec, TensorSpec)
        axes, batch = self.axes("lhs")
        return quantize_operand(
            x,
            spec,
            axes,
            recipe=self.recipe,
            batch=batch,
            static_scale=None if spec.scaling == "dynamic" else static_scale,
            key=forward_key(x, spec, key),
            implementation=self.implementation,
        )[0]

    @abc.abstractmethod
    def input_gradient(self, grad: Array, kernel: QTensor, groups: Any) -> Array:
        """Compute the gradient of the activation with a dequantized kernel."""

    @abc.abstractmethod
    def product(self, lhs: Any, rhs: Any, groups: Any) -> Array:
        """Multiply the prepared operands."""

    @abc.abstractmethod
    def gradient(
        self, name: Gradient, grad: Array, shared: Any, residual: Any, groups: Any, key: RandomKey | None
    ) -> Array:
        """Multiply the output gradient by the residual of one operand; the result has the layout of the other operand.

        Args:
          name: name of the gradient.
          grad: output gradient.
          shared: output gradient quantized for both gradients, or None if each gradient quantizes it.
          residual: residual of the operand.
          groups: row groups of a ragged matmul.
          key: random key for stochastic rounding.
        """

    @property
    def shares_gradient(self) -> bool:
        """Whether both gradients read one quantized output gradient, even without delayed scaling."""
        return False

    def quantize_gradient(
        self, grad: Array, groups: Any, state: Any, key: RandomKey | None
    ) -> tuple[Any, Any, Observation | None]:
        """Quantize the output gradient for each of the two gradients."""
        spec = self.recipe.spec_of("output_grad")
        assert spec is not None
        return self.cast_gradient(grad, spec, (), (), key, state=state)

    def cast_gradient(
        self, grad: Array, spec: TensorSpec, axes: Axes, batch: Axes, key: RandomKey | None, **more: Any
    ) -> tuple[QTensor, QTensor, Observation | None]:
        """Quantize an output gradient for the gradient that contracts ``axes``, and for the other gradient.

        Layers whose outputs have the same shape share the lowered function.
        """
        return _cast_gradient(grad, key, spec, axes, batch, self.recipe, self.implementation, **more)

    def noise_seed(self, lhs: QuantizedOperand, rhs: QuantizedOperand, state: QuantState) -> Array | None:
        """Return a noise seed for this call, or None to derive it from the output gradient."""
        return None

    def cast_gradients(self, grad: Array, others: Any) -> tuple[Any, Any]:
        """Quantize the output gradient for each gradient in one read, or return (None, None) if that is not possible.

        Args:
          grad: output gradient.
          others: arrays of the same program.
        """
        return None, None

    def observe(
        self, old: delayed.TensorState, scale: Array, amax: Array, groups: Any
    ) -> dict[str, Array] | delayed.TensorState:
        """Return the observation that the backward pass returns as the gradient of a tensor's state."""
        assert self.recipe.delayed is not None
        return delayed.observe(old, scale, amax, self.recipe.delayed)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6), static_argnames=("shards", "is_stored"))
def _cast_gradient(grad, key, spec, axes, batch, recipe, implementation, state=None, shards=1, is_stored=False):
    more = {"batch": batch, "state": state, "key": key, "shards": shards, "floor": SMALLEST_GRADIENT_SCALE}
    more |= {"implementation": implementation, "is_stored": is_stored}
    return quantize_operand(grad, spec, axes, recipe=recipe, **more)


@functools.partial(jax.jit, static_argnums=0)
def quantized(
    op: Operation,
    lhs: Array,
    rhs: Array,
    sizes: Array | None,
    state: QuantState,
    key: RandomKey | None,
    prepared: QuantizedOperand | None = None,
) -> Array:
    """Compute a quantized contraction with its backward pass.

    Args:
      op: operation.
      lhs, rhs: activation and weight.
      sizes: rows of each group of a ragged matmul, otherwise None.
      state: amax state of a recipe with delayed scaling, otherwise {}.
      key: random key for stochastic rounding, or None to derive it from the bits of the operands or the gradient.
      prepared: lhs quantized for several contractions, or None to quantize it here.
    """
    return _quantized(op, lhs, rhs, sizes, state, key, prepared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(op, lhs, rhs, sizes, state, key, prepared):
    return _forward(op, lhs, rhs, sizes, state, key, prepared)[0]


def _forward(op: Operation, lhs, rhs, sizes: Array | None, state: QuantState, key, prepared: QuantizedOperand | None):
    groups = _groups(op, sizes)
    left = op.prepare("lhs", lhs, groups, state.get("input"), key) if prepared is None else prepared
    right = op.prepare("rhs", rhs, groups, state.get("kernel"), key)
    out = op.product(left.forward, right.forward, groups)
    seed = op.noise_seed(left, right, state) if key is None else None
    out = checkpoint_name(out, RESULT_NAME)
    saved_state = {name: delayed.without_bins(tensor) for name, tensor in state.items()}
    name, inputs = op.recipe.name, (lhs, rhs) if op.recipe.has_opaque_gradient else ()
    # Residuals have no tangent. ``mark`` has one, so that a derivative of the gradients raises an error.
    mark = first_order(name, (jnp.zeros(()),), inputs) if inputs else ()
    return first_order(name, (out,), inputs)[0], ((left.residual, right.residual, sizes, saved_state, key, seed), mark)


def _backward(op: Operation, saved: Any, grad: Array):
    (left, right, sizes, state, key, seed), mark = saved
    recipe, groups, output_grad = op.recipe, _groups(op, sizes), grad
    keys, own = (None, None), None
    if groups is not None and recipe.is_stochastic:
        grad = groups.zero_ungrouped(grad)  # the bits of grad seed the noise
    if recipe.is_stochastic:
        if key is None and seed is None:
            key = content_key(grad)
        else:
            key = device_key(key_of(seed) if key is None else key, grad)
        keys, own = gradient_keys(key), key
    shared, other, observation = None, None, None
    spec, operands = recipe.spec_of("output_grad"), (recipe.dlhs.lhs, recipe.drhs.rhs)
    if "output_grad" in state or op.shares_gradient:
        own = None if "output_grad" in state else own
        of = op.for_matmul("dlhs" if spec == operands[0] else "drhs")
        shared, other, observation = of.quantize_gradient(grad, groups, state.get("output_grad"), own)
    first, second = (made if operand == spec else None for made, operand in zip((shared, other), operands, strict=True))
    if shared is None:
        first, second = op.cast_gradients(grad, (left.tensor, right.tensor))
    with jax.named_scope("dlhs"):
        dlhs = op.for_matmul("dlhs").gradient("dlhs", grad, first, right.tensor, groups, keys[0])
    with jax.named_scope("drhs"):
        drhs = op.for_matmul("drhs").gradient("drhs", grad, second, left.tensor, groups, keys[1])
    dlhs, drhs = _mask_and_cast(dlhs, left, recipe.fwd.lhs, op.lhs), _mask_and_cast(drhs, right, recipe.fwd.rhs, op.rhs)
    uses = {"input": (left.tensor, left.observation), "kernel": (right.tensor, right.observation)}
    uses["output_grad"] = shared, observation
    observed = {}
    for name, old in state.items():
        tensor, observation = uses[name]
        scale = tensor.scale.reshape(1) if observation.scale is None else observation.scale
        new = op.observe(old, scale, observation.amax, groups)
        observed[name] = {field: fit_varying(x, varying_axes(old["scale"])) for field, x in new.items()}
    gradients = first_order(recipe.name, (dlhs, drhs), (output_grad, *mark) if mark else ())
    return *gradients, None, observed, None, None


_quantized.defvjp(_forward, _backward)


def _groups(op: Operation, sizes: Array | None) -> Groups | None:
    return None if sizes is None else Groups.of(sizes, op.lhs.shape[0])


def _mask_and_cast(gradient: Array, residual: Residual, operand: Operand, primal: Primal) -> Array:
    """Cast a gradient to its operand's dtype and varying axes, and zero it where the forward pass clipped."""
    if residual.mask is not None:
        gradient = jnp.where(jnp.unpackbits(residual.mask, axis=-1, count=gradient.shape[-1]).astype(bool), 0, gradient)
    elif reads_clip(operand) and isinstance(residual.tensor, QTensor):
        assert isinstance(operand, TensorSpec)
        clipped = jnp.abs(residual.tensor.qvalue.astype(jnp.float32)) >= element(operand.dtype).max
        gradient = jnp.where(clipped, 0, gradient)
    return fit_varying(gradient.astype(primal.dtype), primal.place.varying)


# -- converted kernels -------------------------------------------------------------------------------------------------


def contract_converted(op: Operation, lhs: Array, weight: QTensor, sizes: Array | None, key: RandomKey | None) -> Array:
    """Compute the forward product with a converted kernel. The gradient is computed from the dequantized kernel.

    Args:
      op: operation.
      lhs, sizes, key: arguments of ``quantized``.
      weight: converted kernel.

    Raises:
      ValueError: the recipe needs a static scale for the activation, but the kernel has none.
    """
    check_input_scale(op.recipe, weight)
    return with_input_gradient(
        functools.partial(_served, op), functools.partial(_served_gradient, op), lhs, weight, sizes, key
    )


@functools.partial(jax.jit, static_argnums=0)
def _served(op: Operation, lhs: Array, weight: QTensor, sizes: Array | None, key: RandomKey | None) -> Array:
    spec, groups = op.recipe.fwd.lhs, _groups(op, sizes)
    left = op.quantize_activation(lhs, weight.input_scale, groups, key) if isinstance(spec, TensorSpec) else lhs
    return op.product(left, weight.operand, groups)


@functools.partial(jax.jit, static_argnums=0)
def _served_gradient(op: Operation, grad: Array, weight: QTensor, sizes: Array | None, key: RandomKey | None) -> Array:
    return fit_varying(op.input_gradient(grad, weight.operand, _groups(op, sizes)), op.lhs.place.varying)
