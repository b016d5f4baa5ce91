"""Shared by ops on converted kernels: dimension numbers, the input gradient, and errors about such kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.recipe import Recipe
from jaxquant.core.sharding import Placement, fit_varying
from jaxquant.ops.contract import contract
from jaxquant.ops.converted import straight_through
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array


def hashable(dimension_numbers: Any) -> Any:
    """Return dimension numbers as nested tuples, for a static argument."""
    return tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)


def is_swapped(run: Callable[[Array, Array], Any], equation: str, lhs: Array, rhs: Array) -> bool:
    """Return whether an einsum's matmul has our rhs on its left.

    Raises:
      NotImplementedError: the einsum is not one matmul of the two operands.
    """
    jaxpr = jax.make_jaxpr(run)(lhs, rhs).jaxpr
    origin = {variable: index for index, variable in enumerate(jaxpr.invars)}
    order: list[list[int | None]] = []
    for eqn in jaxpr.eqns:
        sources = [None if isinstance(atom, Literal) else origin.get(atom) for atom in eqn.invars]
        if eqn.primitive is jax.lax.dot_general_p:
            order.append(sources)
        elif len(sources) == 1 and sources[0] is not None:
            origin.update(dict.fromkeys(eqn.outvars, sources[0]))
    if order not in ([[0, 1]], [[1, 0]]):
        raise NotImplementedError(f"einsum {equation!r} is not one matmul of its operands; use quant_backend 'native'")
    return order == [[1, 0]]


def check_converted(path: str, has: str, taker: str, wanted: str) -> None:
    """Refuse a kernel that another recipe converted.

    Args:
      path: of the layer.
      has: what its converted kernel is, such as "int8".
      taker: who reads it, such as a recipe's name in quotes.
      wanted: what that takes, in the words of ``has``.

    Raises:
      ValueError: the two differ.
    """
    if has != wanted:
        raise ValueError(
            f"{layer_name(path)} has a converted kernel of {has}, and {taker} takes {wanted}; serve with the recipe "
            "that it was converted with"
        )


def never_seen(path: str, recipe: Recipe) -> ValueError:
    """Make the error of a layer that needs the static scale of an activation that was never seen.

    Args:
      path: of the layer.
      recipe: of the layer.
    """
    return ValueError(
        f"{layer_name(path)} has no amax history of its input, so {recipe.name!r} has no static scale for it; train "
        "the model, or calibrate it with jaxquant.calibrate"
    )


def settle_input_scale(path: str, recipe: Recipe, scale: Any) -> Any:
    """Return the static scale of the activations that meet a kernel, that of experts without rows filled in.

    An expert that never got a row has seen no activation. Its scale becomes the largest of its layer's other experts,
    which read the same activations, and a warning names it. Under jit it is filled in without a warning.

    Args:
      path: of the layer.
      recipe: of the layer.
      scale: of the kernel's rank, with an axis for each stack of layers or experts; None where it is dynamic; 0 where
        nothing was seen.

    Raises:
      ValueError: none of them has seen anything.
    """
    if scale is None:
        return None
    axes = [axis for axis, size in enumerate(scale.shape) if size > 1]
    filled = scale
    for axis in reversed(axes):  # the experts of one layer first
        filled = jnp.where(filled > 0, filled, filled.max(axis, keepdims=True))
    if isinstance(scale, Tracer):
        return filled
    if not (np.asarray(filled) > 0).all():
        raise never_seen(path, recipe)
    absent = [tuple(int(index[axis]) for axis in axes) for index in np.argwhere(np.asarray(scale) == 0)]
    if absent:
        names = ", ".join(str(index[0] if len(index) == 1 else index) for index in absent)
        warnings.warn(
            f"kernels {names} of {layer_name(path)} have no amax history of their input, as those of experts without "
            f"rows; their static scale of {recipe.name!r} is the largest of the others'",
            stacklevel=3,
        )
    return filled if isinstance(scale, jax.Array) else np.asarray(filled)


def with_input_gradient(
    run: Callable[[Any, Array, ConvertedKernel, Any], Array],
    recipe: Recipe,
    lhs: Array,
    weight: ConvertedKernel,
    dimension_numbers: Any,
) -> Array:
    """Run a backend's contraction with a converted kernel, whose input gradient is that of the dequantized kernel.

    Args:
      run: (recipe, activation, kernel, dimension numbers) -> the contraction.
      recipe: all numbers.
      lhs: the activation.
      weight: the converted kernel.
      dimension_numbers: as for ``jax.lax.dot_general``.
    """
    numbers = hashable(dimension_numbers)
    place = Placement.of(lhs, weight.tensor.qvalue)
    dims, order = Dimensions.of(numbers, lhs.ndim, weight.ndim).for_dlhs()
    options = {"precision": jax.lax.Precision.HIGHEST, "out_sharding": place.sharding_before(order)}

    def gradient(grad: Array, weight: ConvertedKernel) -> Array:
        out = contract(grad, weight.tensor, dims, out_dtype=grad.dtype.name, **options)
        return fit_varying(out.transpose(order).astype(lhs.dtype), place.varying)

    return straight_through(lambda lhs, weight: run(recipe, lhs, weight, numbers), gradient, lhs, weight)
