"""AQT as a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxquant.backends import aqt, aqt_serving
from jaxquant.backends.aqt_config import HONOURS, to_aqt
from jaxquant.backends.base import Backend, Op, refuse_dropped
from jaxquant.config.backends import check_implementation
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.core.rounding import operands_key
from jaxquant.ops.arguments import QuantState

Array = jax.Array


class AqtBackend(Backend):
    """AQT's Linen modules, and its op on converted kernels."""

    honours = HONOURS
    op_names: ClassVar[Mapping[Op, str]] = {"dot_general": "AqtDotGeneral", "einsum": "AqtEinsum"}

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that AQT does not honour in full; see ``Backend.check``."""
        super().check(recipe)
        to_aqt(recipe)  # refuses what does not go together

    def forward_config(self, recipe: Recipe) -> Any:
        """Return AQT's own config of a recipe; see ``Backend.forward_config``."""
        return to_aqt(recipe)

    def linen_op(
        self,
        op: Op,
        recipe: Recipe,
        *,
        quant_mode: str = "train",
        mesh_axes: tuple[str | None, ...] = (),
        replicate_scale: bool = False,
        implementation: str | None = None,
    ) -> Callable[[], Any]:
        """Make a factory of Linen modules; see ``Backend.linen_op``."""
        check_implementation(self.name, implementation)
        make = aqt.dot_general_cls if op == "dot_general" else aqt.einsum_cls
        return make(recipe, mesh_axes=mesh_axes, quant_mode=quant_mode, replicate_scale=replicate_scale)

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
        """Compute AQT's ``dot_general``; see ``Backend.contract``."""
        check_implementation(self.name, implementation)
        refuse_dropped(self.row.title, lhs, rhs, precision, preferred_element_type, out_sharding)
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
        if isinstance(rhs, ConvertedKernel):
            rhs = dataclasses.replace(rhs, dtype=dtype.name)
            return aqt_serving.dot_general(lhs.astype(dtype), rhs, dimension_numbers, recipe=recipe)
        lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
        if key is None and recipe.is_stochastic:
            key = operands_key(lhs, rhs)
        return aqt.dot_general(lhs, rhs, dimension_numbers, recipe=recipe, key=key)

    def convert_kernel(
        self,
        recipe: Recipe,
        kernel: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize a layer's kernel; see ``Backend.convert_kernel``."""
        return aqt_serving.convert_kernel(recipe, kernel, axes, state)

    def dot_general(
        self,
        lhs: Array,
        rhs: Array | ConvertedKernel,
        dimension_numbers: Any,
        *args: Any,
        recipe: Recipe,
        implementation: str | None = None,
        **kwargs: Any,
    ) -> Array:
        """Compute ``dot_general`` on a converted kernel, or a float one with a ``key``; see ``Backend.dot_general``."""
        check_implementation(self.name, implementation)
        run = aqt_serving.dot_general if isinstance(rhs, ConvertedKernel) else aqt.dot_general
        return run(lhs, rhs, dimension_numbers, *args, recipe=recipe, **kwargs)  # pyright: ignore[reportArgumentType]

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
        return aqt_serving.einsum(equation, lhs, rhs, *args, recipe=recipe, **kwargs)


BACKEND = AqtBackend("aqt")
