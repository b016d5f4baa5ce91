"""native: a recipe as Linen modules around ``ops.dot_general``, with its quant state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.errors import ScopeCollectionNotFound

from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops import sparsity
from jaxquant.ops.dot_general import QuantState, dot_general, initial_state
from jaxquant.ops.einsum import einsum
from jaxquant.state import OVERWRITE_WITH_GRADIENT

Array = jax.Array
RANDOM_STREAM = "quant"


class _Quantized(nn.Module):
    """Hold the quant state of one contraction in ``_overwrite_with_gradient``.

    Attributes:
      recipe: all numbers.
    """

    recipe: Recipe

    def _variables(self, prefix: str, values: dict[str, Array]) -> dict[str, Array]:
        try:
            return {
                name: self.variable(OVERWRITE_WITH_GRADIENT, f"{prefix}_{name}", lambda value=value: value).value
                for name, value in values.items()
            }
        except ScopeCollectionNotFound:
            raise ValueError(
                f"recipe {self.recipe.name!r} at {'/'.join(self.path[:-1])!r} keeps state in the collection "
                f"'{OVERWRITE_WITH_GRADIENT}', which this call does not carry: pass it to apply beside 'params', and "
                f"where the layer is under nn.scan, give it variable_axes={{'{OVERWRITE_WITH_GRADIENT}': 0}}"
            ) from None

    def _quant_state(self) -> QuantState:
        return {name: self._variables(name, values) for name, values in initial_state(self.recipe).items()}

    def _sparsify(self, weight: Array, axes: tuple[int, ...]) -> Array:
        spec = self.recipe.sparsity
        if spec is None:
            return weight
        return sparsity.sparsify(spec, axes, weight, self._variables("sparsity", sparsity.initial_state(weight.shape)))

    def _key(self) -> Array | None:
        """A key for stochastic rounding, where the caller passes a "quant" stream; else the op makes its own."""
        is_random = any(isinstance(s, TensorSpec) and s.rounding == "stochastic" for s in self.recipe.specs.values())
        return self.make_rng(RANDOM_STREAM) if is_random and self.has_rng(RANDOM_STREAM) else None

    def _operands(self, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        # flax's op computes in the kernel's dtype, whatever the input has.
        is_flax = self.recipe.delayed is not None and self.recipe.delayed.amax_init == "flax"
        return (lhs.astype(rhs.dtype) if is_flax else lhs), rhs


class DotGeneral(_Quantized):
    """``jax.lax.dot_general`` of an activation and a weight in the low precision of ``recipe``."""

    @nn.compact
    def __call__(
        self, lhs: Array, rhs: Array, dimension_numbers, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        lhs, rhs = self._operands(lhs, rhs)
        axes = tuple(axis % rhs.ndim for axis in dimension_numbers[0][1])
        return dot_general(
            lhs,
            self._sparsify(rhs, axes),
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            state=self._quant_state(),
            key=self._key(),
        )


class Einsum(_Quantized):
    """A two-operand einsum in the low precision of ``recipe``.

    Attributes:
      weight: which operand is the weight (0 or 1).
    """

    weight: int = 1

    @nn.compact
    def __call__(
        self, equation: str, lhs: Array, rhs: Array, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        if self.weight == 1:
            lhs, rhs = self._operands(lhs, rhs)
        else:
            rhs, lhs = self._operands(rhs, lhs)
        return einsum(
            equation,
            lhs,
            rhs,
            recipe=self.recipe,
            state=self._quant_state(),
            key=self._key(),
            precision=precision,
            preferred_element_type=preferred_element_type,
            weight=self.weight,
            transform=self._sparsify,
        )


def _flax_name(recipe: Recipe, flax_op: str) -> str | None:
    """The submodule name under which flax keeps the same state, so that its checkpoints load."""
    if recipe.delayed is None:
        return None
    spec = recipe.fwd.rhs
    is_nanoo = isinstance(spec, TensorSpec) and spec.dtype.endswith("fnuz")
    return "NANOOFp8DotGeneralOp_0" if is_nanoo else flax_op


def dot_general_cls(recipe: Recipe) -> Callable[[], nn.Module]:
    """Make what flax layers take as ``dot_general_cls``."""
    return functools.partial(DotGeneral, recipe=recipe, name=_flax_name(recipe, "Fp8DirectDotGeneralOp_0"))


def einsum_cls(recipe: Recipe, weight: int = 1) -> Callable[[], nn.Module]:
    """Make a factory of ``Einsum`` modules."""
    return functools.partial(Einsum, recipe=recipe, weight=weight, name=_flax_name(recipe, "Fp8Einsum_0"))
