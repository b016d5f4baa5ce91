"""What ops on converted kernels share: an einsum of a kernel that is no array, and errors about such kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxquant.core.paths import layer_name
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.recipe import Recipe
from jaxquant.ops import converted
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array


def einsum(
    run: Callable[..., Any],
    equation: str,
    lhs: Array,
    weight: ConvertedKernel,
    dot: Callable[[Array, Any, bool], Array],
) -> Array:
    """Run an einsum whose ``dot`` has the converted kernel already.

    A stand-in of the kernel's shape takes its place; nothing is computed from it.

    Args:
      run: (equation, lhs, rhs, a function in place of ``lax.dot_general``) -> the result.
      equation: activation first, kernel second.
      lhs: the activation.
      weight: the converted kernel.
      dot: (activation, dimension numbers, whether the kernel is on the left) -> the contraction.

    Raises:
      NotImplementedError: as ``is_swapped``.
    """
    standin = jnp.zeros(weight.shape, weight.dtype)
    with jax.disable_jit():
        swapped = is_swapped(lambda a, b: run(equation, a, b, jax.lax.dot_general), equation, lhs, standin)

        def with_weight(a: Array, b: Array, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Array:
            return dot(b if swapped else a, hashable(dimension_numbers), swapped)

        return run(equation, lhs, standin, with_weight)


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


def with_input_gradient(
    run: Callable[[Any, Array, ConvertedKernel, Any, bool], Array],
    recipe: Recipe,
    lhs: Array,
    weight: ConvertedKernel,
    dimension_numbers: Any,
    is_swapped: bool,
) -> Array:
    """Run a backend's contraction with a converted kernel, whose input gradient is that of the dequantized kernel.

    Args:
      run: (recipe, activation, kernel, dimension numbers, whether the kernel is on the left) -> the contraction.
      recipe: all numbers.
      lhs: the activation.
      weight: the converted kernel.
      dimension_numbers: as for ``jax.lax.dot_general``, hashable.
      is_swapped: whether the kernel is on the left.
    """
    ranks = (weight.ndim, lhs.ndim) if is_swapped else (lhs.ndim, weight.ndim)
    return converted.with_input_gradient(
        lambda lhs, weight: run(recipe, lhs, weight, dimension_numbers, is_swapped),
        Dimensions.of(dimension_numbers, *ranks),
        lhs,
        weight,
        side="rhs" if is_swapped else "lhs",
    )
