"""The forward contraction on a converted kernel: the numbers of ``dot_general``, without its float weight.

Data flow:

    float kernel, quant state ── quantize_weight ──► QTensor        input_scale ──► static scale of the activation
    lhs ── quantize ──► qvalues ─┐
    Weight (QTensor, scale) ─────┴─ contract ──► y, bit for bit what the training op computes
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxquant.core import delayed
from jaxquant.core.dtypes import element
from jaxquant.core.qtensor import QTensor, Weight
from jaxquant.core.quantize import absolute, quantize, quantize_with_scale
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.rounding import content_key
from jaxquant.ops.contract import contract
from jaxquant.ops.dimensions import Dimensions

Array = jax.Array


def quantize_weight(
    kernel: Array, axes: Sequence[int], *, recipe: Recipe, state: Mapping[str, delayed.TensorState] | None = None
) -> QTensor:
    """Quantize a kernel as the forward pass of ``dot_general`` does.

    Args:
      kernel: the float kernel, in the dtype in which the op reads it; where the recipe has sparsity, with its mask
        applied.
      axes: its contraction axes.
      recipe: all numbers; the recipe must quantize weights.
      state: for a recipe with delayed scaling, the quant state of the layer.
    """
    spec = recipe.fwd.rhs
    assert isinstance(spec, TensorSpec)
    if spec.scaling != "delayed":
        return quantize(kernel, spec, axes, key=content_key(kernel) if spec.rounding == "stochastic" else None)
    assert state is not None
    assert recipe.delayed is not None
    amax = jnp.max(absolute(kernel))  # counts where the kernel was all zero whenever it was seen, as in training
    scale = delayed.current_scale(state["kernel"], amax, element(spec.dtype), recipe.delayed)
    return quantize_with_scale(
        kernel, spec, scale.reshape((1,) * kernel.ndim), compute_dtype=_compute_dtype(recipe, kernel.dtype.name)
    )


def input_scale(recipe: Recipe, state: Mapping[str, delayed.TensorState]) -> Array | None:
    """Give the static scale of the activation, shape (1,), or None where the recipe scales it dynamically.

    0 where the activation was never seen: training scales it by its own amax then, and that is no static scale.
    """
    spec = recipe.fwd.lhs
    if not (isinstance(spec, TensorSpec) and spec.scaling == "delayed"):
        return None
    assert recipe.delayed is not None
    scale = delayed.current_scale(state["input"], jnp.zeros(()), element(spec.dtype), recipe.delayed)
    if recipe.is_flax:
        return scale
    history = state["input"]["amax_history"]
    return jnp.where(jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), keepdims=True) > 0, scale, 0.0)


def dot_general(
    lhs: Array,
    weight: Weight,
    dims: Dimensions,
    precision: Any,
    preferred_element_type: Any,
    *,
    recipe: Recipe,
    key: Array | None = None,
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract an activation with a converted kernel; see ``ops.dot_general``, which calls it.

    Raises:
      ValueError: the kernel has no static scale for the activation, and the recipe asks for one.
    """
    spec = recipe.fwd.lhs
    if isinstance(spec, TensorSpec) and spec.scaling == "delayed" and weight.input_scale is None:
        raise ValueError(
            f"recipe {recipe.name!r} scales activations by a static scale and the converted kernel of shape "
            f"{weight.shape} has no input_scale beside it; convert the model with this recipe"
        )
    out_dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, weight.dtype)).name
    return _contract(lhs, weight, key, dims, recipe, out_dtype, precision, out_sharding)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _contract(
    lhs: Array,
    weight: Weight,
    key: Array | None,
    dims: Dimensions,
    recipe: Recipe,
    out_dtype: str,
    precision: Any,
    out_sharding: NamedSharding | None,
) -> Array:
    spec = recipe.fwd.lhs
    left: QTensor | Array = lhs
    if isinstance(spec, TensorSpec) and spec.scaling == "delayed":
        assert weight.input_scale is not None
        scale = weight.input_scale.reshape((1,) * lhs.ndim)
        left = quantize_with_scale(lhs, spec, scale, compute_dtype=_compute_dtype(recipe, lhs.dtype.name))
    elif isinstance(spec, TensorSpec):
        left = quantize(lhs, spec, dims.lhs_contract, key=key)
    return contract(
        left,
        weight.tensor,
        dims,
        out_dtype=out_dtype,
        accumulator=recipe.fwd.accumulator,
        precision=precision,
        default_precision=jax.lax.Precision.DEFAULT,
        scale_dtype=out_dtype if recipe.is_flax else "float32",
        out_sharding=out_sharding,
    )


def _compute_dtype(recipe: Recipe, dtype: str) -> str:
    """flax divides and multiplies by scales in the operand's dtype, we in float32."""
    return dtype if recipe.is_flax else "float32"
