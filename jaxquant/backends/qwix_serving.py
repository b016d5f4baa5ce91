"""Qwix on converted kernels: what its training forward computes, from a QTensor. Imports Qwix, as ``qwix.py`` does."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends import _weights
from jaxquant.backends import qwix as training
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe, TensorSpec

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
    spec, tensor = recipe.fwd.lhs, weight.tensor
    kernel = qwix.QArray(tensor.qvalue, tensor.scale.astype(weight.dtype), tensor.zero_point, tensor.qvalue.dtype)
    activation = _quantize(lhs, spec, dimension_numbers[0][0]) if isinstance(spec, TensorSpec) else lhs
    return qwix.dot_general(activation, kernel, dimension_numbers)


def _refuse_options(*options: Any) -> None:
    """Refuse the options of a matmul that Qwix would drop."""
    if any(option is not None for option in options):
        names = ("precision", "preferred_element_type", "out_sharding")
        given = ", ".join(f"{name} {value}" for name, value in zip(names, options, strict=True) if value is not None)
        raise NotImplementedError(f"{given} of a converted layer is dropped by Qwix; use quant_backend 'native'")


def dot_general(
    lhs: Array,
    rhs: ConvertedKernel,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe,
) -> Array:
    """Compute ``jax.lax.dot_general`` of an activation and a converted kernel.

    Args:
      lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding: as for ``jax.lax.dot_general``.
      recipe: all numbers.

    Raises:
      NotImplementedError: an option that Qwix would drop.
    """
    _refuse_options(precision, preferred_element_type, out_sharding)
    return _weights.with_input_gradient(_dot, recipe, lhs, rhs, _weights.hashable(dimension_numbers))
