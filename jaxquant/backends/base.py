"""Interface of a backend; native, AQT and Qwix implement it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxquant.backends.honours import NATIVE_INSTEAD, Honours
from jaxquant.config.backends import BACKENDS, BackendName, BackendRow, check_library_implementation
from jaxquant.core.qtensor import QTensor, dequantize, operand_dtype
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import RandomKey
from jaxquant.core.sharding import Placement, fit_varying, untransposed
from jaxquant.ops.contract import contract
from jaxquant.ops.converted import with_input_gradient
from jaxquant.ops.dimensions import Dimensions
from jaxquant.ops.gradients import first_order_call
from jaxquant.ops.pieces import QuantState, with_shards
from jaxquant.ops.prepared import share

Array = jax.Array
Weight = Array | QTensor
RANDOM_STREAM = "quant"
"""Name of the RNG stream for stochastic rounding in a Linen model."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A contraction of a traced function, in ``jax.lax``'s terms, without its operands.

    Attributes:
      recipe: recipe of the contraction.
      numbers: dimension numbers of a ``dot_general``, the activation first.
      precision: precision as in ``jax.lax``.
      dtype: dtype of the result (``preferred_element_type``), or None for the promoted dtype of the operands.
      operation: primitive, "dot_general", "ragged_dot_general" or "conv_general_dilated".
      window: keyword arguments of ``jax.lax.conv_general_dilated``, for a convolution.
      state: amax state of a recipe with delayed scaling, for each group if there are groups.
      key: random key for stochastic rounding, or None to derive it from the bits of the operands or the gradient.
      prepared: result of ``Backend.share`` for this activation, or None if no other contraction shares it.
      implementation: implementation of casts and matmuls, or None to select one; see ``ops.implementation``.
      out_sharding: sharding of the result, as in ``jax.lax.dot_general``.
      stored: whether each operand is stored in memory; see ``ops.dot_general``.
    """

    recipe: Recipe
    numbers: Any = None
    precision: Any = None
    dtype: Any = None
    operation: str = "dot_general"
    window: tuple[tuple[str, Any], ...] = ()
    state: QuantState | None = None
    key: RandomKey | None = None
    prepared: Any = None
    implementation: str | None = None
    out_sharding: Any = None
    stored: tuple[bool, bool, bool] = (False, False, False)


class Backend:
    """A backend; ``jaxquant.backends.load`` imports it by name.

    Each backend implements ``check``, which rejects recipes, ``contract``, which traced functions run, and
    ``quantize_weight``, which converts weights. By default, ``unsupported`` allows only ``dot_general``.

    Attributes:
      name: key of ``BACKENDS``.
      row: properties of the backend that are known without its library.
    """

    def __init__(self, name: BackendName) -> None:
        self.name: BackendName = name
        self.row: BackendRow = BACKENDS[name]

    def check(self, recipe: Recipe) -> None:
        """Raise if the backend cannot run every field of the recipe.

        Args:
          recipe: recipe to check.

        Raises:
          NotImplementedError: the backend does not support a field; the error names an alternative.
        """
        raise NotImplementedError

    def unsupported(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> str:
        """Return the reason why a contraction of a traced function cannot run a recipe, or "" if it can.

        Args:
          operation: primitive of the contraction, such as "dot_general".
          recipe: recipe of the contraction.
          dtype: dtype name of both operands, or "" if they differ.
          is_split: whether a ``jax.shard_map`` splits the experts of the contraction over devices.
        """
        if is_split:
            return f"{self.row.title} does not support experts that jax.shard_map splits; {NATIVE_INSTEAD}"
        return "" if operation == "dot_general" else f"{self.row.title} does not support {operation}; {NATIVE_INSTEAD}"

    def runner(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> Backend:
        """Return the backend that computes a contraction: this one, or native if only native supports the contraction.

        Args:
          operation, recipe, dtype, is_split: arguments of ``unsupported``.
        """
        return self

    def contract(self, lhs: Array, rhs: Weight, setup: Setup, group_sizes: Array | None = None) -> Array:
        """Contract an activation with a float weight (training) or a converted weight (serving).

        Args:
          lhs, rhs: activation and weight.
          setup: parameters of the contraction.
          group_sizes: number of rows of each group of a ragged matmul, as in ``jax.lax.ragged_dot``; None for other
            operations.

        Raises:
          NotImplementedError: the backend would ignore an option.
        """
        raise NotImplementedError

    def can_share(self, recipe: Recipe) -> bool:
        """Check whether contractions of one recipe can share an activation that is quantized once."""
        return False

    def share(
        self,
        x: Array,
        states: Sequence[QuantState],
        *,
        recipe: Recipe,
        axes: tuple[int, ...],
        implementation: str | None = None,
        is_stored: bool = False,
    ) -> Any:
        """Quantize an activation once for several contractions.

        Args:
          x: activation.
          states: amax state of each contraction.
          recipe: recipe of all contractions, for which ``can_share`` is True.
          axes: contraction axes of the activation.
          implementation: implementation of the cast, or None to select one.
          is_stored: whether the activation is stored in memory.
        """
        of_input = [state["input"] for state in states if "input" in state]
        return share(x, of_input, recipe=recipe, axes=axes, implementation=implementation, is_stored=is_stored)

    def quantize_weight(
        self,
        operation: str,
        recipe: Recipe,
        weight: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> QTensor:
        """Quantize the weight of a contraction as the op does in training.

        Args:
          operation: primitive of the contraction.
          recipe: recipe of the contraction.
          weight: weight in the dtype that the op reads; of shape (groups, contracting, free) for a ragged matmul.
          axes: contraction axes of the weight.
          state: quant state of the layer by tensor and field; {} for a recipe without state.
          batch: batch axes of the weight, which no block of scales crosses.

        Returns:
          The quantized weight. Its ``input_scale`` is the static scale of the activation, or None if that scale is
          dynamic. The scale has the rank of the weight and one element, or one for each group of a ragged matmul.
        """
        raise NotImplementedError


class LibraryBackend(Backend):
    """A backend that uses another library's numerics. Options that the library would ignore are rejected.

    Attributes:
      honours: supported fields of a recipe, with a rule for each.
      dtype_faults: mapping from the name of an unsupported operand dtype to the reason.
      translate: function that returns the library's config for a recipe, and raises for unsupported fields.
      contract_float: function of (recipe, activation, weight, dimension numbers, random key or None).
      contract_converted: function of (recipe, activation, converted kernel, dimension numbers).
      convert_weight: function of (recipe, weight, contraction axes) that quantizes a weight.
    """

    honours: ClassVar[Honours]
    dtype_faults: ClassVar[Mapping[str, str]]
    translate: ClassVar[Any]
    contract_float: ClassVar[Any]
    contract_converted: ClassVar[Any]
    convert_weight: ClassVar[Any]
    _native: Backend | None = None

    def check(self, recipe: Recipe) -> None:
        """Raise if the library cannot run every field of the recipe; see ``Backend.check``."""
        self.translate(recipe)

    def completed_by(self, native: Backend) -> LibraryBackend:
        """Return a copy of this backend in which native computes the operations that the library does not support."""
        completed = copy.copy(self)
        completed._native = native
        return completed

    def runner(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> Backend:
        """Return the backend that computes a contraction; see ``Backend.runner``."""
        is_own = not self.missing_in_library(operation, recipe, dtype, is_split)
        return self if self._native is None or is_own else self._native

    def unsupported(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> str:
        """Return the reason why an operation cannot run a recipe; see ``Backend.unsupported``."""
        runner = self.runner(operation, recipe, dtype, is_split)
        explain = self.missing_in_library if runner is self else runner.unsupported
        return explain(operation, recipe, dtype, is_split)

    def missing_in_library(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> str:
        """Return the reason why the library itself cannot run an operation with a recipe, or "" if it can."""
        if dtype in self.dtype_faults:
            return f"{self.row.title} {self.dtype_faults[dtype]}; {NATIVE_INSTEAD}, or cast to bfloat16"
        return super().unsupported(operation, recipe, dtype, is_split)

    def contract(self, lhs: Array, rhs: Weight, setup: Setup, group_sizes: Array | None = None) -> Array:
        """Compute the library's contraction; see ``Backend.contract``."""
        check_library_implementation(self.name, setup.implementation)
        dtype = jnp.promote_types(lhs.dtype, operand_dtype(rhs))
        self._reject_ignored(dtype, setup)
        if why := self.missing_in_library(setup.operation, setup.recipe, dtype.name):
            raise NotImplementedError(f"recipe {setup.recipe.name!r}: {why}")
        dims = Dimensions.of(setup.numbers, lhs.ndim, rhs.ndim)
        recipe = with_shards(setup.recipe, lhs, dims.lhs_free if self.row.shards_batch else dims.lhs_free[::-1])
        lhs = lhs.astype(dtype)
        rhs = rhs.astype(dtype.name)
        if 0 in (*lhs.shape, *rhs.shape):  # nothing to quantize, and the libraries divide by sizes
            rhs = dequantize(rhs, dtype.name) if isinstance(rhs, QTensor) else rhs
            return jax.lax.dot_general(lhs, rhs, setup.numbers)
        if isinstance(rhs, QTensor):
            run_converted = functools.partial(self.contract_converted, recipe, numbers=dims.numbers)
            return with_input_gradient(run_converted, self._input_gradient(lhs, rhs, dims), lhs, rhs)
        run = lambda lhs, rhs, key: self.contract_float(recipe, lhs, rhs, dims.numbers, key)  # noqa: E731
        return first_order_call(recipe.name, run, lhs, rhs, (setup.key,))

    def quantize_weight(
        self,
        operation: str,
        recipe: Recipe,
        weight: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> QTensor:
        """Quantize the weight of a contraction; see ``Backend.quantize_weight``."""
        return self.convert_weight(recipe, weight, axes)

    def _input_gradient(self, lhs: Array, rhs: QTensor, dims: Dimensions) -> Any:
        """Return the function that computes the activation's gradient with the dequantized kernel."""
        place = Placement.of(lhs, rhs.qvalue)
        backward, order = dims.for_dlhs()
        options = {"precision": jax.lax.Precision.HIGHEST, "out_sharding": untransposed(place.sharding, order)}

        def gradient(grad: Array, weight: QTensor) -> Array:
            out = contract(grad, weight.operand, backward, out_dtype=grad.dtype.name, **options)
            return fit_varying(out.transpose(order).astype(lhs.dtype), place.varying)

        return gradient

    def _reject_ignored(self, dtype: Any, setup: Setup) -> None:
        """Raise if a traced contraction sets an option that the library ignores, unless the option has no effect."""
        precisions = setup.precision if isinstance(setup.precision, tuple) else (setup.precision,)
        is_other = setup.dtype is not None and jnp.dtype(setup.dtype) != dtype
        options = {
            "precision": next((each for each in precisions if each not in (None, jax.lax.Precision.DEFAULT)), None),
            "preferred_element_type": jnp.dtype(setup.dtype).name if is_other else None,
            "out_sharding": setup.out_sharding,
        }
        for name, value in options.items():
            if value is not None:
                raise NotImplementedError(f"{self.row.title} ignores {name} {value} of this matmul; {NATIVE_INSTEAD}")
