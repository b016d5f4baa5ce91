"""einsum: a two-operand einsum with a quantized contraction; ``jnp.einsum`` parses the equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jaxtyping import Float

from jaxquant.core.qtensor import QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import RandomKey
from jaxquant.core.sharding import Sharding, to_named_sharding, untransposed
from jaxquant.ops.dimensions import Dimensions, DotDimensionNumbers
from jaxquant.ops.dot_general import QuantState, dot_general
from jaxquant.ops.pieces import evaluate_jaxpr

Array = jax.Array
Dot = Callable[[Any, Any, DotDimensionNumbers, NamedSharding | None], Array]


def contract_einsum(
    equation: str,
    operands: tuple[Any, Any],
    dot: Dot,
    *,
    weight: int = 1,
    is_converted: bool = False,
    out_sharding: Sharding = None,
    **options: Any,
) -> Array:
    """Compute ``jnp.einsum`` with its one ``dot_general`` replaced by ``dot``.

    Args:
      equation, operands, out_sharding, options: arguments of ``jnp.einsum``; the weight may be a converted kernel.
      dot: function of (activation, weight, dimension numbers, sharding of the result) that contracts the operands.
      weight: index of the weight operand, 0 or 1.
      is_converted: whether the weight is a converted kernel, or will be converted.

    Raises:
      TypeError, ValueError: an error of ``jnp.einsum``.
      NotImplementedError: the equation requires another operation on a converted kernel in addition to the contraction.
    """
    place = to_named_sharding(out_sharding, operands[1 - weight])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    jaxpr = jax.make_jaxpr(lambda *given: jnp.einsum(equation, *given, out_sharding=place, **options))(*shapes).jaxpr
    of_weight = [jaxpr.invars[weight]]

    def compute(eqn: JaxprEqn, values: list[Any]) -> Array:
        reads_weight = [atom in of_weight for atom in eqn.invars]
        if eqn.primitive.name == "dot_general":
            first, second = values
            dims = Dimensions.of(eqn.params["dimension_numbers"], first.ndim, second.ndim)
            order = tuple(range(dims.out_ndim))
            if reads_weight[0]:
                first, second, dims, order = second, first, dims.swap(), dims.order_of_swapped
            return dot(first, second, dims.numbers, untransposed(eqn.params["out_sharding"], order)).transpose(order)
        if any(reads_weight):
            if is_converted:
                raise NotImplementedError(
                    f"einsum {equation!r} applies {eqn.primitive.name} to its weight, but a converted weight "
                    "supports only the contraction; leave the layer in float with a rule"
                )
            of_weight.extend(eqn.outvars)
        return eqn.primitive.bind(*values, **eqn.params)

    return evaluate_jaxpr(jaxpr, operands, compute)


def einsum(
    equation: str,
    lhs: Float[Array, "*lhs"] | QTensor,
    rhs: Float[Array, "*rhs"] | QTensor,
    *,
    recipe: Recipe,
    state: QuantState | None = None,
    key: RandomKey | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    weight: int = 1,
    out_sharding: Sharding = None,
    implementation: str | None = None,
) -> Float[Array, "*out"]:
    """Contract an activation with a weight by an einsum equation, in the low precision of a recipe.

    Args:
      equation: equation of two operands, as in ``jnp.einsum``.
      lhs, rhs: operands in the equation's order; the weight may be a converted kernel.
      recipe, state, key, precision, preferred_element_type: arguments of ``dot_general``.
      weight: index of the weight operand, 0 or 1. The other operand is the activation.
      out_sharding: sharding of the result, as in ``dot_general``.
      implementation: implementation as in ``dot_general``.

    Raises:
      ValueError: weight is neither 0 nor 1.
      TypeError, ValueError, NotImplementedError: an error of ``jnp.einsum`` or ``dot_general``.
    """
    if weight not in (0, 1):
        raise ValueError(f"einsum argument weight must be 0 or 1, the position of the weight, got {weight!r}")
    arithmetic = {"precision": precision, "preferred_element_type": preferred_element_type}
    more: dict[str, Any] = {"recipe": recipe, "state": state, "key": key, "implementation": implementation}

    def dot(activation: Array, kernel: Any, numbers: DotDimensionNumbers, place: NamedSharding | None) -> Array:
        return dot_general(activation, kernel, numbers, out_sharding=place, **arithmetic, **more)

    is_converted = isinstance((lhs, rhs)[weight], QTensor)
    options = {"weight": weight, "is_converted": is_converted, "out_sharding": out_sharding, **arithmetic}
    return contract_einsum(equation, (lhs, rhs), dot, **options)
