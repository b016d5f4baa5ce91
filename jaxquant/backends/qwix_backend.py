"""Qwix as a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends import qwix, qwix_serving
from jaxquant.backends.base import Backend, refuse_dropped
from jaxquant.backends.qwix_config import HONOURS, to_qwix
from jaxquant.config.backends import check_implementation
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.ops.arguments import QuantState

Array = jax.Array


class QwixBackend(Backend):
    """Qwix's rules on a whole model, and its op on converted kernels."""

    honours = HONOURS
    drops = ("precision", "preferred_element_type")
    knows_weights_by_shape = True

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that Qwix does not honour in full; see ``Backend.check``."""
        super().check(recipe)
        to_qwix(recipe)  # refuses what does not go together

    def make_rules(self, entries: Sequence[tuple[str, Recipe | None]]) -> list[Any]:
        """Make Qwix's rules of regexes and recipes, for ``qwix.quantize_model``; None is float.

        Raises:
          NotImplementedError: Qwix does not honour a recipe.
        """
        for _, recipe in entries:
            if recipe is not None:
                self.check(recipe)
        return qwix.make_rules(entries)

    def make_provider(self, rules: Sequence[Any]) -> Any:
        """Make Qwix's provider of its rules."""
        return qwix.make_provider(rules)

    def contract(
        self,
        lhs: Array,
        rhs: Array | ConvertedKernel,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        recipe: Recipe,
        state: QuantState | None = None,
        key: Array | None = None,
        out_sharding: Any = None,
        implementation: str | None = None,
    ) -> Array:
        """Compute Qwix's quantized ``dot_general``; see ``Backend.contract``."""
        check_implementation(self.name, implementation)
        refuse_dropped(self.row.title, lhs, rhs, precision, preferred_element_type, out_sharding)
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        if isinstance(rhs, ConvertedKernel):
            rhs = dataclasses.replace(rhs, dtype=dtype.name)
            return qwix_serving.dot_general(lhs.astype(dtype), rhs, dimension_numbers, recipe=recipe)
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        return qwix.dot_general(lhs, rhs, dimension_numbers, recipe=recipe, key=key)

    def convert_kernel(
        self,
        recipe: Recipe,
        kernel: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize a layer's kernel; see ``Backend.convert_kernel``."""
        return qwix_serving.convert_kernel(recipe, kernel, axes, state)

    def dot_general(
        self,
        lhs: Array,
        rhs: ConvertedKernel,
        dimension_numbers: Any,
        *args: Any,
        recipe: Recipe,
        implementation: str | None = None,
        **kwargs: Any,
    ) -> Array:
        """Compute ``dot_general`` on a converted kernel; see ``Backend.dot_general``."""
        check_implementation(self.name, implementation)
        return qwix_serving.dot_general(lhs, rhs, dimension_numbers, *args, recipe=recipe, **kwargs)

    def einsum(
        self,
        equation: str,
        lhs: Array,
        rhs: ConvertedKernel,
        *args: Any,
        recipe: Recipe,
        implementation: str | None = None,
        **kwargs: Any,
    ) -> Array:
        """Compute an einsum on a converted kernel; see ``Backend.einsum``."""
        check_implementation(self.name, implementation)
        return qwix_serving.einsum(equation, lhs, rhs, *args, recipe=recipe, **kwargs)


BACKEND = QwixBackend("qwix")
