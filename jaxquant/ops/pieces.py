"""Pieces of a quantized matmul that ``ragged`` and ``conv`` share: types, shards and scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import Recipe, TensorSpec
from jaxquant.core.sharding import device_parts
from jaxquant.ops.operand import scale_dtype

Array = jax.Array


def eight_bits(qvalue: Array) -> Array:
    """Bring 4-bit qvalues into a type of eight that holds each of them; others stay.

    XLA has no ragged matmul and no convolution of 4-bit operands.
    """
    kind = ELEMENTS.get(qvalue.dtype.name)
    return qvalue.astype(kind.held_by) if kind is not None and kind.held_by else qvalue


def with_shards(recipe: Recipe, lhs: Array, axes: Sequence[int]) -> Recipe:
    """Return a recipe with its shard count of -1 replaced by the number of devices that share the batch.

    Args:
      recipe: all numbers.
      lhs: activation.
      axes: its free axes; the first one is cut.
    """
    if recipe.drhs.shards >= 0:
        return recipe
    count = device_parts(lhs, axes[0]) if axes else 1
    return dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=count))


def unsupported(recipe: Recipe) -> str:
    """Explain why a recipe's numbers make no sense without a plain matrix product, "" where they do."""
    specs = [spec for spec in recipe.specs.values() if isinstance(spec, TensorSpec)]
    forward = [spec for spec in (recipe.fwd.lhs, recipe.fwd.rhs) if isinstance(spec, TensorSpec)]
    backward = [spec for spec in (recipe.dlhs.rhs, recipe.drhs.lhs) if isinstance(spec, TensorSpec)]
    grad = recipe.spec_of("output_grad")
    is_delayed = grad is not None and grad.scaling == "delayed"
    reasons = {
        "an asymmetric range": any(not spec.calibration.is_symmetric for spec in specs),
        "static scales": any(spec.scaling == "static" for spec in specs),
        "shards outside the weight gradient": recipe.dlhs.shards > 1,
        "weight sparsity": recipe.sparsity is not None,
        "a history of a backward operand alone": any(spec.scaling == "delayed" for spec in backward),
        "a delayed gradient beside operands that are not per tensor": is_delayed
        and any(spec.granularity != "per_tensor" for spec in forward),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def scaled(recipe: Recipe, out_dtype: str, out: Array, left: Array, right: Array) -> Array:
    """Multiply a result by the scales of both operands, laid out as it is."""
    dtype = scale_dtype(recipe, out_dtype)
    if dtype == "float32" or out.dtype == jnp.int32:
        out = out.astype(jnp.float32)
    return out * left.astype(dtype) * right.astype(dtype)
