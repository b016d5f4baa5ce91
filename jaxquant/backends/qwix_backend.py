"""Qwix as a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxquant.backends import qwix, qwix_serving
from jaxquant.backends.base import Backend
from jaxquant.backends.qwix_config import HONOURS, to_qwix
from jaxquant.config.backends import check_implementation
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe

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

    def quantize_linen(
        self, model: Any, recipes: Mapping[str, Recipe], methods: Sequence[str], layers: Sequence[str]
    ) -> Any:
        """Return a Linen model whose layers run quantized; see ``Backend.quantize_linen``."""
        return qwix.quantize_linen(model, recipes, methods, layers)

    def quantize_nnx(self, model: Any, recipes: Mapping[str, Recipe], methods: Sequence[str]) -> Any:
        """Return an NNX model whose layers run quantized; see ``Backend.quantize_nnx``."""
        return qwix.quantize_nnx(model, recipes, methods)

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
