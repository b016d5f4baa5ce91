"""Qwix on converted kernels: what its training forward computes, from a QTensor. Imports Qwix, as ``qwix.py`` does."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends import _weights
from jaxquant.backends import qwix as training
from jaxquant.core.qtensor import ConvertedKernel, QTensor, dequantize
from jaxquant.core.recipe import Recipe, Side, TensorSpec
from jaxquant.ops.converted import straight_through

qwix = training.qwix
Array = jax.Array


def convert_kernel(
    recipe: Recipe, kernel: Array, axes: Sequence[int], state: Mapping[str, Any]
) -> tuple[QTensor, Array | None]:
    """Quantize a layer's kernel as Qwix's training forward does; see ``native.convert_kernel``."""
    training.to_qwix(recipe)
    spec = recipe.fwd.rhs
    assert isinstance(spec, TensorSpec)
    tensor = _quantize(kernel, spec, axes)
    return QTensor(tensor.qvalue, tensor.scale.astype(jnp.float32), tensor.zero_point), None


def _quantize(x: Array, spec: TensorSpec, axes: Sequence[int]) -> Any:
    others = [] if spec.granularity == "per_tensor" else [axis for axis in range(x.ndim) if axis not in axes]
    return qwix.quantize(x, getattr(jnp, spec.dtype), channelwise_axes=others, calibration_method=str(spec.calibration))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _dot(recipe: Recipe, lhs: Array, weight: ConvertedKernel, dimension_numbers: Any) -> Array:
    spec = recipe.fwd.lhs
    activation = _quantize(lhs, spec, dimension_numbers[0][0]) if isinstance(spec, TensorSpec) else lhs
    return qwix.dot_general(activation, _qarray(weight), dimension_numbers)


def dot_general(lhs: Array, rhs: ConvertedKernel, dimension_numbers: Any, *, recipe: Recipe) -> Array:
    """Compute ``jax.lax.dot_general`` of an activation and a converted kernel.

    Args:
      lhs, rhs, dimension_numbers: as for ``jax.lax.dot_general``.
      recipe: all numbers.
    """
    return _weights.with_input_gradient(_dot, recipe, lhs, rhs, dimension_numbers)


def convert_groups(recipe: Recipe, rhs: Array) -> QTensor:
    """Quantize the weights of a ragged matmul as Qwix's training forward does: one scale a column, of all groups."""
    tensor = _quantize(rhs, _spec(recipe, "rhs"), (0, 1))
    return QTensor(tensor.qvalue, tensor.scale.astype(jnp.float32))


def ragged_dot(lhs: Array, rhs: ConvertedKernel, group_sizes: Array, *, recipe: Recipe) -> Array:
    """Compute ``jax.lax.ragged_dot`` of an activation and the converted weights of its groups.

    Args:
      lhs, rhs, group_sizes: as for ``jax.lax.ragged_dot``.
      recipe: all numbers.
    """
    run = functools.partial(_ragged_dot, recipe)
    return straight_through(run, _ragged_gradient, lhs, rhs, group_sizes)


@functools.partial(jax.jit, static_argnums=0)
def _ragged_dot(recipe: Recipe, lhs: Array, weight: ConvertedKernel, sizes: Array) -> Array:
    return qwix.ragged_dot(_quantize(lhs, _spec(recipe, "lhs"), (1,)), _qarray(weight), sizes)


@jax.jit
def _ragged_gradient(grad: Array, weight: ConvertedKernel, sizes: Array) -> Array:
    kernel = dequantize(weight.tensor, grad.dtype.name).swapaxes(1, 2)
    out = jax.lax.ragged_dot(grad, kernel, sizes, precision="highest")
    return jnp.where(jnp.arange(len(grad))[:, None] < sizes.sum(), out, 0)


def _spec(recipe: Recipe, side: Side) -> TensorSpec:
    spec = recipe.resolve("fwd", side)
    assert isinstance(spec, TensorSpec)
    return spec


def _qarray(weight: ConvertedKernel) -> Any:
    tensor = weight.tensor
    return qwix.QArray(tensor.qvalue, tensor.scale.astype(weight.dtype), tensor.zero_point, tensor.qvalue.dtype)
