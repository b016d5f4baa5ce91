"""Qwix as a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxquant.backends import qwix, qwix_serving
from jaxquant.backends.base import Given, LibraryBackend
from jaxquant.backends.honours import NATIVE_INSTEAD, refuse
from jaxquant.backends.qwix_config import HONOURS, ragged_lack, to_qwix
from jaxquant.core.qtensor import ConvertedKernel
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.sharding import device_kind_of, platform_of
from jaxquant.ops.dimensions import Product

Array = jax.Array


class QwixBackend(LibraryBackend):
    """Qwix's rules on a whole model, and its op on converted kernels."""

    honours = HONOURS
    training, serving = qwix, qwix_serving

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

    def lacks(self, operation: str, recipe: Recipe) -> str:
        """Explain why Qwix does not run an operation; see ``LibraryBackend.lacks``."""
        return ragged_lack(recipe) if operation == "ragged_dot_general" else super().lacks(operation, recipe)

    def contract(
        self, lhs: Array, rhs: Array | ConvertedKernel, product: Product, given: Given, group_sizes: Array | None = None
    ) -> Array:
        """Compute Qwix's contraction, but not what a GPU's compiler fails on; see ``Backend.contract``."""
        specs = [spec for spec in given.recipe.specs.values() if isinstance(spec, TensorSpec)]
        if platform_of(lhs) == "gpu" and any(spec.dtype == "float4_e2m1fn" for spec in specs):
            what = f"matmul of 4-bit floats that compiles for {device_kind_of(lhs)}"
            raise refuse("Qwix", given.recipe, "", what, f"{NATIVE_INSTEAD}, which multiplies them as e4m3")
        return super().contract(lhs, rhs, product, given, group_sizes)


BACKEND = QwixBackend("qwix")
