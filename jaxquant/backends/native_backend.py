"""native as a backend: the ops of ``jaxquant.ops``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from jaxquant import ops
from jaxquant.backends import native
from jaxquant.backends.base import TRAINING, Backend, Given, Op, OpOptions
from jaxquant.backends.honours import refuse
from jaxquant.core.qtensor import ConvertedKernel, QTensor
from jaxquant.core.recipe import Recipe
from jaxquant.ops import conv, ragged
from jaxquant.ops.arguments import QuantState
from jaxquant.ops.dimensions import Product
from jaxquant.ops.prepared import Prepared, can_share, share

Array = jax.Array
_UNSUPPORTED = {"ragged_dot_general": ragged.unsupported, "conv_general_dilated": conv.unsupported}


class NativeBackend(Backend):
    """The ops of ``jaxquant.ops``."""

    op_names: ClassVar[Mapping[Op, str]] = {"dot_general": "DotGeneral", "einsum": "Einsum"}

    def check(self, recipe: Recipe) -> None:
        """Refuse the one field that the ops do not read; see ``Backend.check``."""
        for name in ("fwd", "dlhs"):
            if getattr(recipe, name).shards != 1:
                raise refuse(
                    self.row.title, recipe, f"{name}_lhs", "shards outside the weight gradient", "use tile_size"
                )

    def linen_op(self, op: Op, recipe: Recipe, options: OpOptions = TRAINING) -> Callable[[], Any]:
        """Make a factory of Linen modules; see ``Backend.linen_op``."""
        return native.linen_op(op, recipe, options)

    def op_name(self, op: Op, recipe: Recipe | None) -> str:
        """Return the name of an op's Linen module; see ``Backend.op_name``."""
        return super().op_name(op, recipe) if recipe is None else native.op_name(op, recipe)

    def unsupported(self, operation: str, recipe: Recipe) -> str:
        """Explain why an operation does not run a recipe; see ``Backend.unsupported``."""
        explain = _UNSUPPORTED.get(operation)
        why = "" if explain is None else explain(recipe)
        return why and f"recipe {recipe.name!r} has {why}, which {operation} does not run"

    def contract(
        self, lhs: Array, rhs: Array | ConvertedKernel, product: Product, given: Given, group_sizes: Array | None = None
    ) -> Array:
        """Compute the op of ``jaxquant.ops`` for a contraction; see ``Backend.contract``."""
        recipe, how, dtypes = given.recipe, given.how, (product.precision, product.dtype)
        lhs = native.activation_as_read(recipe, lhs, rhs)
        more: dict[str, Any] = {"recipe": recipe, "state": given.state, "key": given.key}
        if group_sizes is not None:
            return ops.ragged_dot(lhs, rhs, group_sizes, *dtypes, **more)
        if product.operation == "conv_general_dilated":
            options = dict(product.window, precision=product.precision, preferred_element_type=product.dtype)
            return ops.conv_general_dilated(lhs, rhs, **options, **more)
        more |= {"out_sharding": how.out_sharding, "implementation": how.implementation, "prepared": given.prepared}
        return ops.dot_general(lhs, rhs, product.numbers, *dtypes, **more)

    def can_share(self, recipe: Recipe) -> bool:
        """Check whether a quantized activation depends on nothing of a contraction; see ``Backend.can_share``."""
        return can_share(recipe)

    def share(
        self,
        x: Array,
        states: Sequence[QuantState],
        *,
        recipe: Recipe,
        axes: tuple[int, ...],
        implementation: str | None = None,
    ) -> Prepared:
        """Quantize an activation once for several contractions; see ``Backend.share``."""
        of_input = [state["input"] for state in states if "input" in state]
        return share(x, of_input, recipe=recipe, axes=axes, implementation=implementation)

    def quantize_weight(
        self,
        operation: str,
        recipe: Recipe,
        weight: Array,
        axes: Sequence[int],
        state: Mapping[str, Mapping[str, Array]],
        batch: Sequence[int] = (),
    ) -> tuple[QTensor, Array | None]:
        """Quantize the weight of a contraction; see ``Backend.quantize_weight``."""
        if operation == "ragged_dot_general":
            return ragged.convert_kernel(recipe, weight, {tensor: dict(fields) for tensor, fields in state.items()})
        return native.convert_kernel(recipe, weight, axes, state, batch)


BACKEND = NativeBackend("native")
