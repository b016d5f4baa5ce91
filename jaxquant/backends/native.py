"""native: a recipe as Linen modules around ``ops.dot_general``, with its quant state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxquant.backends.base import RANDOM_STREAM, chosen
from jaxquant.core.paths import at_layer, join_path
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops import sparsity
from jaxquant.ops.dot_general import QuantState, dot_general, initial_state
from jaxquant.ops.einsum import einsum
from jaxquant.ops.operand import input_scale, quantize_kernel
from jaxquant.state import OVERWRITE_WITH_GRADIENT, watch

Array = jax.Array


class _Quantized(nn.Module):
    """Hold the quant state of one contraction in ``_overwrite_with_gradient``.

    Attributes:
      recipe: all numbers.
      implementation: what computes the matmuls; None picks.
    """

    recipe: Recipe
    implementation: str | None = None

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
        lhs = activation_as_read(self.recipe, lhs, rhs)
        if isinstance(rhs, ConvertedKernel):
            return dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                key=self._key(),
                **chosen(self.implementation),
            )
        axes = tuple(axis % rhs.ndim for axis in dimension_numbers[0][1])
        return dot_general(
            lhs,
            self._sparsify(rhs, axes),
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            state=self._quant_state(lhs, rhs),
            key=self._key(),
            **chosen(self.implementation),
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
            lhs = activation_as_read(self.recipe, lhs, rhs)
        else:
            rhs = activation_as_read(self.recipe, rhs, lhs)
        is_converted = isinstance((lhs, rhs)[self.weight], ConvertedKernel)
        return einsum(
            equation,
            lhs,
            rhs,
            recipe=self.recipe,
            state=None if is_converted else self._quant_state((lhs, rhs)[1 - self.weight], (lhs, rhs)[self.weight]),
            key=self._key(),
            precision=precision,
            preferred_element_type=preferred_element_type,
            weight=self.weight,
            transform=self._sparsify,
            **chosen(self.implementation),
        )


# Linen names a module after its class. With flax's names for the delayed-scaling ops its checkpoints load.
class Fp8DirectDotGeneralOp(DotGeneral):
    """``DotGeneral`` with delayed scaling."""


class NANOOFp8DotGeneralOp(DotGeneral):
    """``DotGeneral`` with delayed scaling in the fnuz types."""


class Fp8Einsum(Einsum):
    """``Einsum`` with delayed scaling."""


def _is_nanoo(recipe: Recipe) -> bool:
    return isinstance(recipe.fwd.rhs, TensorSpec) and recipe.fwd.rhs.dtype.endswith("fnuz")


def dot_general_cls(recipe: Recipe, implementation: str | None = None) -> functools.partial[DotGeneral]:
    """Make what flax layers take as ``dot_general_cls``.

    Args:
      recipe, implementation: as in ``DotGeneral``.
    """
    kind = DotGeneral
    if recipe.delayed is not None:
        kind = NANOOFp8DotGeneralOp if _is_nanoo(recipe) else Fp8DirectDotGeneralOp
    return functools.partial(kind, recipe=recipe, **chosen(implementation))


def einsum_cls(recipe: Recipe, weight: int = 1, implementation: str | None = None) -> functools.partial[Einsum]:
    """Make a factory of ``Einsum`` modules.

    Args:
      recipe, weight, implementation: as in ``Einsum``.
    """
    kind = Einsum if recipe.delayed is None else Fp8Einsum
    return functools.partial(kind, recipe=recipe, weight=weight, **chosen(implementation))
