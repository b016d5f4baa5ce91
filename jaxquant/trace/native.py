"""native: the quantized op of one contraction of a traced function, and its state."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core.recipe import Recipe
from jaxquant.core.sharding import transposed
from jaxquant.ops import conv, ragged
from jaxquant.ops.conv import conv_general_dilated
from jaxquant.ops.dot_general import QuantState, dot_general, initial_state
from jaxquant.ops.ragged import ragged_dot
from jaxquant.trace.plan import Contraction

Array = jax.Array
_CONVOLUTION = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "precision",
)
_UNSUPPORTED = {"ragged_dot_general": ragged.unsupported, "conv_general_dilated": conv.unsupported}


def unsupported(operation: str, recipe: Recipe) -> str:
    """Explain why an operation does not run a recipe, "" where it does."""
    explain = _UNSUPPORTED.get(operation)
    return explain(recipe) if explain is not None else ""


def make_state(site: Contraction) -> dict[str, Array]:
    """Make the state of a contraction, {} for a recipe without, under flax's names.

    It has a leading axis for each scan over the weight, and then the weight's batch axes.
    """
    assert site.recipe is not None
    return {
        f"{tensor}_{field}": jnp.broadcast_to(value, (*_leading_axes(site), *value.shape))
        for tensor, fields in initial_state(site.recipe).items()
        for field, value in fields.items()
    }


def state_fields(site: Contraction) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the state of a contraction by name."""
    assert site.recipe is not None
    return {
        f"{tensor}_{field}": (*_leading_axes(site), *shape)
        for tensor, fields in _shapes(site.recipe).items()
        for field, shape in fields.items()
    }


def _leading_axes(site: Contraction) -> tuple[int, ...]:
    return (*(length for _, length in site.stack), *site.batch)


@functools.lru_cache
def _shapes(recipe: Recipe) -> dict[str, dict[str, tuple[int, ...]]]:
    return jax.tree.map(lambda value: value.shape, jax.eval_shape(lambda: initial_state(recipe)))


def _nested(recipe: Recipe, state: Mapping[str, Array]) -> QuantState:
    return {
        tensor: {field: state[f"{tensor}_{field}"] for field in fields} for tensor, fields in _shapes(recipe).items()
    }


def contract(site: Contraction, eqn: Any, operands: list[Any], state: Mapping[str, Array], key: Array | None) -> Array:
    """Compute an equation of one of ``CONTRACTIONS`` in the low precision of its recipe.

    Each element of the weight's batch axes is quantized by itself, as under ``jax.vmap``.

    Args:
      site: the contraction, with its recipe.
      eqn: its equation.
      operands: in the equation's order.
      state: of this contraction, without axes of scans.
      key: for stochastic rounding, or None.
    """
    recipe = site.recipe
    assert recipe is not None
    if site.operation == "ragged_dot_general":
        lhs, rhs, sizes = operands
        lhs = lhs.astype(rhs.dtype) if recipe.matches_flax else lhs
        out_dtype, given = eqn.outvars[0].aval.dtype, _nested(recipe, state)
        return ragged_dot(lhs, rhs, sizes, eqn.params["precision"], out_dtype, recipe=recipe, state=given, key=key)
    if site.operation == "conv_general_dilated":
        lhs, rhs = operands
        options = {name: eqn.params[name] for name in _CONVOLUTION}
        lhs = lhs.astype(rhs.dtype) if recipe.matches_flax else lhs
        options["preferred_element_type"] = eqn.outvars[0].aval.dtype
        return conv_general_dilated(lhs, rhs, **options, recipe=recipe, state=_nested(recipe, state), key=key)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    activation, weight = operands
    contracted, batch = (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)
    if site.side == 0:
        activation, weight, contracted, batch = weight, activation, contracted[::-1], batch[::-1]
    if recipe.matches_flax:  # flax's ops compute in the kernel's dtype
        activation = activation.astype(weight.dtype)
    # The result's axes are (batch, free of the activation, free of the weight); the equation has its lhs's first.
    groups, free = len(batch[0]), [x.ndim - len(batch[0]) - len(contracted[0]) for x in (activation, weight)]
    order = tuple(range(groups + sum(free)))
    if site.side == 0:
        order = (*order[:groups], *order[groups + free[0] :], *order[groups : groups + free[0]])
    place = transposed(eqn.params.get("out_sharding"), order)
    op = functools.partial(
        _dot,
        contracted=(_without_batch(contracted[0], batch[0]), _without_batch(contracted[1], batch[1])),
        precision=eqn.params["precision"],
        dtype=eqn.outvars[0].aval.dtype,
        recipe=recipe,
        place=place and NamedSharding(place.mesh, PartitionSpec(*place.spec[groups:])),
    )
    for _ in range(groups):
        op = jax.vmap(op)
    sizes = tuple(weight.shape[axis] for axis in batch[1])
    if key is not None and groups:
        key = jax.random.split(key, math.prod(sizes)).reshape(sizes)
    out = op(_batch_first(activation, batch[0]), _batch_first(weight, batch[1]), _nested(recipe, state), key)
    return out if site.side == 1 else jnp.transpose(out, order)


def _without_batch(axes: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """Renumber axes of an operand whose batch axes were mapped over."""
    return tuple(axis - sum(other < axis for other in batch) for axis in axes)


def _dot(
    activation: Array,
    weight: Array,
    state: QuantState,
    key: Array | None,
    *,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    precision: Any,
    dtype: Any,
    recipe: Recipe,
    place: NamedSharding | None,
) -> Array:
    return dot_general(
        activation,
        weight,
        (contracted, ((), ())),
        precision,
        dtype,
        recipe=recipe,
        state=state,
        key=key,
        out_sharding=place,
    )


def _batch_first(x: Array, batch: tuple[int, ...]) -> Array:
    if tuple(batch) == tuple(range(len(batch))):
        return x
    return jnp.transpose(x, (*batch, *(axis for axis in range(x.ndim) if axis not in batch)))
