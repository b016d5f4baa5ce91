"""Qwix as a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.backends import qwix, qwix_serving
from jaxquant.backends.base import LibraryBackend
from jaxquant.backends.qwix_config import HONOURS, ragged_lack, to_qwix
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.ops.arguments import QuantState
from jaxquant.ops.dimensions import Product

Array = jax.Array


class QwixBackend(LibraryBackend):
    """Qwix's rules on a whole model, and its op on converted kernels."""

    honours = HONOURS
    serving = qwix_serving

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

    def train(
        self, lhs: Array, rhs: Array, dimension_numbers: Any, *, recipe: Recipe, key: Array | None = None
    ) -> Array:
        """Compute Qwix's quantized ``dot_general``; see ``LibraryBackend.train``."""
        return qwix.dot_general(lhs, rhs, dimension_numbers, recipe=recipe, key=key)

    def lacks(self, operation: str, recipe: Recipe) -> str:
        """Explain why Qwix does not run an operation; see ``LibraryBackend.lacks``."""
        return ragged_lack(recipe) if operation == "ragged_dot_general" else super().lacks(operation, recipe)

    def ragged_dot(
        self,
        lhs: Array,
        rhs: Array | ConvertedKernel,
        group_sizes: Array,
        product: Product,
        *,
        recipe: Recipe,
        state: QuantState | None = None,
        key: Array | None = None,
    ) -> Array:
        """Compute Qwix's quantized ``ragged_dot``; see ``Backend.ragged_dot``."""
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        self._refuse_dropped(dtype, product)
        lhs = lhs.astype(dtype)
        if isinstance(rhs, ConvertedKernel):
            rhs = dataclasses.replace(rhs, dtype=dtype.name)
            return qwix_serving.ragged_dot(lhs, rhs, group_sizes, recipe=recipe)
        return qwix.ragged_dot(lhs, rhs.astype(dtype), group_sizes, recipe=recipe)

    def convert_groups(
        self, recipe: Recipe, rhs: Array, state: Mapping[str, Mapping[str, Array]]
    ) -> tuple[QTensor, Array | None]:
        """Quantize the weights of a ragged matmul; see ``Backend.convert_groups``."""
        return qwix_serving.convert_groups(recipe, rhs), None


BACKEND = QwixBackend("qwix")
