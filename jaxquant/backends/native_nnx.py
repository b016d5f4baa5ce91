"""native on NNX: a recipe as NNX modules around ``ops.dot_general``, with its quant state as ``QuantState`` variables.

They take the place of a layer's ``dot_general`` or ``einsum_op``. Variables have the names that they have in Linen.
Stochastic rounding makes its own noise from the output gradient, so no layer needs an ``nnx.Rngs``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.backends.base import chosen
from jaxquant.backends.native import activation_as_read
from jaxquant.core.paths import layer_name
from jaxquant.core.recipe import Recipe
from jaxquant.ops import sparsity
from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.ops.einsum import einsum, plan_einsum
from jaxquant.state import watch
from jaxquant.state.nnx import QuantState

Array = jax.Array
_SPARSITY = "sparsity"


class QuantizedOp(nnx.Module):
    """Hold the quant state of one layer's contraction.

    Args:
      recipe: all numbers.
      path: of the layer, for errors and for the names in a traced program.
      kernel: the layer's kernel; layers that nnx.vmap made as one have leading axes, and so has their state.
      stacked: number of those axes.
      implementation: what computes the matmuls; None picks.
    """

    def __init__(
        self, recipe: Recipe, path: str, kernel: nnx.Variable, stacked: int, implementation: str | None = None
    ):
        self.recipe, self.path, self.implementation = recipe, path, implementation
        lead = kernel.shape[:stacked]
        tensors: dict[str, dict[str, Array]] = dict(initial_state(recipe))
        tensors = jax.tree.map(lambda value: jnp.broadcast_to(value, (*lead, *value.shape)), tensors)
        if recipe.sparsity is not None:
            make = self._initial_sparsity
            for _ in lead:
                make = jax.vmap(make)
            tensors[_SPARSITY] = make(kernel[...])
        self.fields = tuple((name, tuple(values)) for name, values in tensors.items())
        for name, values in tensors.items():
            for field, value in values.items():
                setattr(self, f"{name}_{field}", QuantState(value))

    def _initial_sparsity(self, kernel: Array) -> dict[str, Array]:
        raise NotImplementedError

    def _read(self, *operands: Array) -> dict[str, dict[str, Array]]:
        """Read the state, watched so that a gradient which leaves it out is an error."""
        if not self.fields:
            return {}
        state = self.state()
        for name, values in state.items():
            first, ndim = ("step", 0) if name == _SPARSITY else ("scale", 1)
            if values[first].ndim != ndim:
                raise ValueError(
                    f"{layer_name(self.path)} has quant state of {values[first].shape[0]} layers in the call of one: "
                    "nnx.scan and nnx.vmap must map jaxquant.state.QuantState along axis 0, as in "
                    "nnx.StateAxes({jaxquant.state.TRAINED: 0, ...: None})"
                )
        return watch.NNX(self.path, operands, state)

    def state(self) -> dict[str, dict[str, Array]]:
        """Return the quant state by tensor and field, as it is stored."""
        return {
            name: {field: getattr(self, f"{name}_{field}")[...] for field in fields} for name, fields in self.fields
        }

    def _sparsify(self, state: dict[str, Array] | None, weight: Array, axes: tuple[int, ...]) -> Array:
        if state is None:
            return weight
        assert self.recipe.sparsity is not None
        return sparsity.sparsify(self.recipe.sparsity, axes, weight, state)

    @contextlib.contextmanager
    def _reading(self, lhs: Array, rhs: Array) -> Iterator[tuple[Array, dict[str, Any], Callable[..., Array]]]:
        """Enter the layer's name scope; yield the activation, the amax state, and what makes the weight sparse."""
        with jax.named_scope(self.path):
            lhs = activation_as_read(self.recipe, lhs, rhs)
            state = self._read(lhs, rhs)
            yield lhs, state, functools.partial(self._sparsify, state.pop(_SPARSITY, None))


class DotGeneral(QuantizedOp):
    """``jax.lax.dot_general`` of an activation and a weight in the low precision of ``recipe``.

    Args:
      axes: contraction axes of the kernel.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: str,
        kernel: nnx.Variable,
        stacked: int,
        axes: tuple[int, ...],
        implementation: str | None = None,
    ):
        self.axes = axes
        super().__init__(recipe, path, kernel, stacked, implementation)

    def _initial_sparsity(self, kernel: Array) -> dict[str, Array]:
        assert self.recipe.sparsity is not None
        return sparsity.initial_state(kernel, self.recipe.sparsity, self.axes)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        with self._reading(lhs, rhs) as (lhs, state, sparsify):
            return dot_general(
                lhs,
                sparsify(rhs, self.axes),
                dimension_numbers,
                precision,
                preferred_element_type,
                recipe=self.recipe,
                state=state,
                out_sharding=out_sharding,
                **chosen(self.implementation),
            )


class Einsum(QuantizedOp):
    """A two-operand einsum in the low precision of ``recipe``, the weight second.

    Args:
      equation: of the layer.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: str,
        kernel: nnx.Variable,
        stacked: int,
        equation: str,
        implementation: str | None = None,
    ):
        self.equation = equation
        super().__init__(recipe, path, kernel, stacked, implementation)

    def _initial_sparsity(self, kernel: Array) -> dict[str, Array]:
        assert self.recipe.sparsity is not None
        plan = plan_einsum(self.equation, lhs_labels(self.equation), kernel.ndim)
        kernel = kernel.sum(axis=plan.rhs_sum) if plan.rhs_sum else kernel
        return sparsity.initial_state(kernel, self.recipe.sparsity, plan.dimension_numbers[0][1])

    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        with self._reading(lhs, rhs) as (lhs, state, sparsify):
            return einsum(
                equation,
                lhs,
                rhs,
                recipe=self.recipe,
                state=state,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
                transform=sparsify,
                **chosen(self.implementation),
            )


def lhs_labels(equation: str) -> int:
    """Count the named axes of an equation's first operand, the least rank that it can have."""
    return len(equation.replace(" ", "").partition(",")[0].replace("...", ""))
