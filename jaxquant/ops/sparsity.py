"""N:M weight sparsity on a schedule: n of every m weights along the contraction axis are kept, the others are zero."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant.core.recipe import SparsitySpec
from jaxquant.core.sharding import explicit_sharding, placed_like

Array = jax.Array


def initial_state(weight: Array, spec: SparsitySpec, axes: Sequence[int]) -> dict[str, Array]:
    """Return the state of a weight: step count, mask of the next step (bfloat16, 1 for a kept weight), uses (0)."""
    zero = jnp.zeros((), jnp.float32)
    mask = (
        magnitude_mask(weight, spec, axes)
        if spec.start_step == 0
        else placed_like(jnp.ones(weight.shape, bool), weight)
    )
    return {"step": zero, "mask": mask.astype(jnp.bfloat16), "uses": zero}


def magnitude_mask(weight: Array, spec: SparsitySpec, axes: Sequence[int]) -> Array:
    """Keep the n largest magnitudes of every m neighbours along the contraction.

    Several contraction axes count as one, in the given order. Ties keep the earlier weight.

    Raises:
      ValueError: m does not divide the contraction.
    """
    dense, place = weight, explicit_sharding(weight)
    if place is not None:
        # If the contraction is sharded, groups cross devices: every device computes the mask from the whole weight.
        weight = jax.sharding.reshard(weight, NamedSharding(place.mesh, PartitionSpec()))
    rest = [axis for axis in range(weight.ndim) if axis not in axes]
    moved = weight.transpose(*rest, *axes)
    check_groups(spec, weight.shape, axes)
    groups = jnp.abs(moved.reshape(-1, spec.m))
    order = jnp.argsort(groups, axis=-1, descending=True, stable=True)
    rank = jnp.argsort(order, axis=-1)
    kept = (rank < spec.n).reshape(moved.shape)
    kept = kept.transpose([[*rest, *axes].index(axis) for axis in range(weight.ndim)])
    return placed_like(kept, dense)


def check_groups(spec: SparsitySpec, shape: Sequence[int], axes: Sequence[int]) -> None:
    """Check that the contracted size is a multiple of m, for n:m sparsity.

    Raises:
      ValueError: it is not.
    """
    size = math.prod(shape[axis] for axis in axes)
    if size % spec.m:
        raise ValueError(
            f"weight_sparsity_m {spec.m} does not divide the contraction size {size} of the weight {tuple(shape)}; use "
            f"a divisor of {size}, or leave the layer in float with a rule"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sparsify(spec: SparsitySpec, axes: tuple[int, ...], weight: Array, state: dict[str, Array]) -> Array:
    """Zero the weights that the state's mask excludes, in training and in evaluation.

    The mask is all ones before ``start_step``. At ``start_step``, and every ``update_step`` steps after it, a new mask
    is used; the previous step computes the new mask from its weights. The gradient reaches all weights, so that a
    masked weight can recover. The "gradient" of the state is the state after the step.

    Args:
      spec: n, m and the schedule.
      axes: contraction axes of the weight.
      weight: dense weight.
      state: state from ``initial_state``.

    Returns:
      The masked weights, or all NaN if ``uses`` is negative, which shows that an optimizer changed the state.
    """
    is_trained = state["uses"] < 0
    masked = jnp.where(is_trained, jnp.nan, 0.0).astype(weight.dtype)
    return jnp.where((state["mask"] > 0) & ~is_trained, weight, masked)


def _sparsify_fwd(spec, axes, weight, state):
    since = state["step"] + 1 - spec.start_step
    due = (since >= 0) & (jnp.mod(since, spec.update_step) == 0)
    mask = state["mask"]
    following = jax.lax.cond(
        due, lambda: placed_like(magnitude_mask(weight, spec, axes).astype(mask.dtype), mask), lambda: mask
    )
    return sparsify(spec, axes, weight, state), (following, state["step"])


def _sparsify_bwd(spec, axes, residuals, grad):
    mask, step = residuals
    return grad, {"step": step + 1, "mask": mask, "uses": jnp.ones((), jnp.float32)}


sparsify.defvjp(_sparsify_fwd, _sparsify_bwd)
