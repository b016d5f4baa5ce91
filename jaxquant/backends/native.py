"""native: the ops of ``jaxquant.ops`` as a backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxquant import ops
from jaxquant.backends.base import Backend, Setup, Weight
from jaxquant.backends.honours import refuse
from jaxquant.core.qtensor import QTensor, operand_dtype
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.ops import conv, ragged
from jaxquant.ops.operand import input_scale, quantize_kernel
from jaxquant.ops.prepared import can_share

Array = jax.Array
_UNSUPPORTED = {"ragged_dot_general": ragged.unsupported, "conv_general_dilated": conv.unsupported}


def op_name(op: Literal["dot_general", "einsum"], recipe: Recipe | None) -> str:
    """Return the name of a layer's op. With delayed scaling, it is flax's name, so that flax's checkpoints load."""
    if recipe is None or recipe.delayed is None:
        return {"dot_general": "DotGeneral", "einsum": "Einsum"}[op]
    if op == "einsum":
        return "Fp8Einsum"
    is_fnuz = isinstance(recipe.fwd.rhs, TensorSpec) and recipe.fwd.rhs.dtype.endswith("fnuz")
    return "NANOOFp8DotGeneralOp" if is_fnuz else "Fp8DirectDotGeneralOp"


class NativeBackend(Backend):
    """The ops of ``jaxquant.ops``."""

    def check(self, recipe: Recipe) -> None:
        """Raise if the recipe has shards outside the weight gradient, which the ops ignore; see ``Backend.check``."""
        for name in ("fwd", "dlhs"):
            if getattr(recipe, name).shards != 1:
                raise refuse(
                    self.row.title, recipe, f"{name}_lhs", "shards outside the weight gradient", "use tile_size"
                )

    def unsupported(self, operation: str, recipe: Recipe, dtype: str, is_split: bool = False) -> str:
        """Return the reason why an operation cannot run a recipe; see ``Backend.unsupported``."""
        explain = _UNSUPPORTED.get(operation)
        why = "" if explain is None else explain(recipe)
        return why and f"{operation} does not support recipe {recipe.name!r} ({why}); use another recipe"

    def contract(self, lhs: Array, rhs: Weight, setup: Setup, group_sizes: Array | None = None) -> Array:
        """Run the op of ``jaxquant.ops`` for a contraction; see ``Backend.contract``."""
        recipe, dtypes = setup.recipe, (setup.precision, setup.dtype)
        lhs = lhs.astype(operand_dtype(rhs)) if recipe.matches_flax else lhs  # flax's ops compute in the kernel's dtype
        more: dict[str, Any] = {"recipe": recipe, "state": setup.state, "key": setup.key}
        if group_sizes is not None:
            return ops.ragged_dot(lhs, rhs, group_sizes, *dtypes, **more, implementation=setup.implementation)
        if setup.operation == "conv_general_dilated":
            options = dict(setup.window, precision=setup.precision, preferred_element_type=setup.dtype)
            return ops.conv_general_dilated(lhs, rhs, **options, **more)
        more |= {name: getattr(setup, name) for name in ("out_sharding", "implementation", "prepared", "stored")}
        return ops.dot_general(lhs, rhs, setup.numbers, *dtypes, **more)

    def can_share(self, recipe: Recipe) -> bool:
        """Check whether contractions can share a quantized activation; see ``Backend.can_share``."""
        return can_share(recipe)

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
        if operation == "ragged_dot_general":
            return ragged.convert_kernel(recipe, weight, {tensor: dict(fields) for tensor, fields in state.items()})
        if recipe.sparsity is not None:
            weight = jnp.where(state["sparsity"]["mask"] > 0, weight, 0)
        tensor = quantize_kernel(weight, axes, recipe=recipe, state=state, batch=batch)
        scale = input_scale(recipe, state)
        return tensor if scale is None else dataclasses.replace(tensor, input_scale=scale.reshape((1,) * weight.ndim))


BACKEND = NativeBackend("native")
