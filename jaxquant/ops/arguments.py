"""Checks of arguments that all quantized ops share: float operands, the recipe's quant state, a precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.core import delayed
from jaxquant.core.quant_state import TENSORS
from jaxquant.core.recipe import DelayedSpec, Recipe

Array = jax.Array
QuantState = dict[str, delayed.TensorState]


def initial_state(recipe: Recipe) -> QuantState:
    """Make the quant state of one use of a recipe: a ``delayed.TensorState`` for each tensor with delayed scaling."""
    return {name: delayed.initial_state(recipe.delayed or DelayedSpec()) for name in _tensors_with_state(recipe)}


def _tensors_with_state(recipe: Recipe) -> list[str]:
    specs = {name: recipe.spec_of(name) for name in TENSORS}
    return [name for name, spec in specs.items() if spec is not None and spec.scaling == "delayed"]


def check_state(recipe: Recipe, state: Mapping[str, Any] | None, make: str = "initial_state(recipe)") -> None:
    """Check that a call has the quant state of its recipe.

    Args:
      recipe: all numbers.
      state: what was given.
      make: what makes it, for the error.

    Raises:
      ValueError: state is missing, or of other tensors.
    """
    wanted, given = _tensors_with_state(recipe), list(state or {})
    if sorted(given) != sorted(wanted):
        raise ValueError(
            f"recipe {recipe.name!r} takes state of {wanted or 'no tensor'}, got {given or 'none'}; make it with {make}"
        )


def check_float(op: str, **operands: Array) -> None:
    """Check that operands are of a float dtype.

    Args:
      op: name of the op, for the error.
      operands: by name.

    Raises:
      TypeError: one is not.
    """
    for name, operand in operands.items():
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise TypeError(f"{op} {name} has dtype {operand.dtype.name}; quantization takes float operands")


def hashable_precision(precision: Any) -> Any:
    """Bring ``lax.dot_general``'s spellings of a precision (one, or one for each operand) into one hashable form."""
    if isinstance(precision, (tuple, list)):
        return tuple(map(jax.lax.Precision, precision))
    return None if precision is None else jax.lax.Precision(precision)
