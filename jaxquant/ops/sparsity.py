"""N:M weight sparsity on a schedule: n of every m weights along the contraction axis, mask fixed between updates."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxquant.core.recipe import SparsitySpec

Array = jax.Array


def initial_state(shape: tuple[int, ...]) -> dict[str, Array]:
    """Make the state of a weight: steps taken, mask (1 keeps, bfloat16), uses in a step (zero in a state)."""
    zero = jnp.zeros((), jnp.float32)
    return {"step": zero, "mask": jnp.ones(shape, jnp.bfloat16), "uses": zero}


def magnitude_mask(weight: Array, spec: SparsitySpec, axes: Sequence[int]) -> Array:
    """Keep the n largest magnitudes of every m neighbours along the contraction.

    Several contraction axes count as one, in the order in which they are given. Ties keep the earlier weight.

    Raises:
      ValueError: m does not divide the contraction.
    """
    rest = [axis for axis in range(weight.ndim) if axis not in axes]
    moved = weight.transpose(*rest, *axes)
    size = moved[(0,) * len(rest)].size if rest else moved.size
    if size % spec.m:
        raise ValueError(f"weight_sparsity_m {spec.m} does not divide the contraction of size {size} {weight.shape}")
    groups = jnp.abs(moved.reshape(-1, spec.m))
    order = jnp.argsort(groups, axis=-1, descending=True, stable=True)
    rank = jnp.argsort(order, axis=-1)
    kept = (rank < spec.n).reshape(moved.shape)
    return kept.transpose([[*rest, *axes].index(axis) for axis in range(weight.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sparsify(spec: SparsitySpec, axes: tuple[int, ...], weight: Array, state: dict[str, Array]) -> Array:
    """Zero the masked weights of this step.

    Before ``start_step`` the weight stays dense; at it, and every ``update_step`` steps after it, the mask is made anew
    from the weights. The gradient reaches all weights, so that a masked one can come back; the "gradient" of the state
    is the state after the step.

    Args:
      spec: n, m and the schedule.
      axes: contraction axes of the weight.
      weight: the dense weight.
      state: from ``initial_state``.
    """
    return _masked(spec, axes, weight, state)[0]


def _masked(spec: SparsitySpec, axes: tuple[int, ...], weight: Array, state: dict[str, Array]):
    since = state["step"] - spec.start_step
    due = (since >= 0) & (jnp.mod(since, spec.update_step) == 0)
    mask = jax.lax.cond(
        due,
        lambda: magnitude_mask(weight, spec, axes).astype(state["mask"].dtype),
        lambda: state["mask"],
    )
    return jnp.where((since < 0) | (mask > 0), weight, 0), mask


def _sparsify_fwd(spec, axes, weight, state):
    out, mask = _masked(spec, axes, weight, state)
    return out, (mask, state["step"])


def _sparsify_bwd(spec, axes, residuals, grad):
    mask, step = residuals
    return grad, {"step": step + 1, "mask": mask, "uses": jnp.ones((), jnp.float32)}


sparsify.defvjp(_sparsify_fwd, _sparsify_bwd)
