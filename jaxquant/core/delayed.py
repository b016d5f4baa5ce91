"""Delayed scaling: a tensor is scaled by the largest amax of past steps, kept in an amax history.

State of one tensor: ``scale`` (f32, shape (1,), starts at 1), ``amax_history`` (f32, shape (length,), zeros) and, but
in flax mode, ``amax_bins`` (f32, shape (2048,), zeros). At a step, with a the largest entry of the history *before* the
step: the scale becomes ``a / max · 2**margin``, the tensor is quantized with it, the history rolls by −1 and slot 0
takes this step's amax. In ``warmup`` mode a history without entries is replaced by the tensor's own amax, and an amax
that is not finite is not recorded; ``flax`` mode starts at scale 1 and records everything.

The new state leaves the backward pass as the "gradient" of the old one. Where a state is used more than once, automatic
differentiation *sums* these gradients, which destroys a scale or an amax. ``amax_bins`` survives a sum: its gradient is
the one-hot count of the amax among 2048 bins (exponent and three mantissa bits, rounded up), so after any sum or mean
the highest bin that is not empty is the maximum. The last bin, which no amax has, holds the square of the amax: where
it is the square of what the history's slot 0 says, one amax was recorded and not the mean of several.
``jaxquant.state.update`` reads all that; in a state ``amax_bins`` is only ever zeros.

Source: flax.linen.fp8_ops (flax mode, bit for bit); TransformerEngine's delayed scaling recipe.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import Element
from jaxquant.core.quantize import SMALLEST_SCALE
from jaxquant.core.recipe import DelayedSpec

BINS = 2048
NON_FINITE_BIN = 2040  # the bits of infinity; bins above it are patterns of NaN
SQUARE_BIN = BINS - 1
# float32 bits are sign, 8 exponent, 23 mantissa: dropping the low 20 leaves exponent and three mantissa bits.
_DROPPED_BITS = 20

TensorState = dict[str, jax.Array]


def initial_state(spec: DelayedSpec) -> TensorState:
    """Make the state of a tensor that has not been seen."""
    state = {"scale": jnp.ones((1,), jnp.float32), "amax_history": jnp.zeros((spec.amax_history_length,), jnp.float32)}
    return state if spec.amax_init == "flax" else state | {"amax_bins": jnp.zeros((BINS,), jnp.float32)}


def bin_of(amax: jax.Array) -> jax.Array:
    """Find the bin of an amax: the float32 exponent and three mantissa bits, rounded up."""
    bits = jax.lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.uint32)
    return (bits + ((1 << _DROPPED_BITS) - 1)) >> _DROPPED_BITS


def bin_value(index: jax.Array) -> jax.Array:
    """Return the largest amax of a bin, at most 12.5 % above any other amax of it."""
    return jax.lax.bitcast_convert_type(index.astype(jnp.uint32) << _DROPPED_BITS, jnp.float32)


def current_scale(state: TensorState, amax: jax.Array, element: Element, spec: DelayedSpec) -> jax.Array:
    """Compute the scale to quantize with at this step, shape (1,).

    Args:
      state: the state before this step.
      amax: this tensor's largest magnitude; read by the warm-up alone.
      element: element type to quantize to.
      spec: margin and first-step behaviour.
    """
    history, old = state["amax_history"], state["scale"]
    if spec.amax_init == "flax":
        # flax keeps the reciprocal and inverts it twice; the last bit depends on it.
        past = jnp.max(history, axis=0)
        inverse = jnp.where(past > 0, (jnp.float32(element.max) / past) / (2.0**spec.margin), 1.0 / old)
        return 1.0 / jnp.where(jnp.isfinite(past), inverse, 1.0 / old)
    # A history loaded from a flax checkpoint may hold a non-finite amax.
    past = jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), keepdims=True)
    past = jnp.where(past > 0, past, amax.astype(jnp.float32))
    scale = past * (2.0**spec.margin / element.max)
    return jnp.where((past > 0) & jnp.isfinite(past), jnp.where(scale < SMALLEST_SCALE, 1.0, scale), old)


def record(history: jax.Array, amax: jax.Array) -> jax.Array:
    """Roll a history by −1 along its last axis and put an amax in slot 0; leading axes are carried along."""
    return jnp.roll(history, -1, axis=-1).at[..., 0].set(amax.astype(history.dtype))


def needed_for_update(state: TensorState) -> TensorState:
    """Leave out what ``next_state`` does not read, so that it is not kept for the backward pass."""
    return {name: value for name, value in state.items() if name != "amax_bins"}


def next_state(state: TensorState, scale: jax.Array, amax: jax.Array, spec: DelayedSpec) -> TensorState:
    """Return the state after a step, as it leaves the backward pass in place of a gradient.

    Args:
      state: the state before the step.
      scale: the scale that the step used.
      amax: the tensor's largest magnitude in the step.
      spec: first-step behaviour.
    """
    recorded = record(state["amax_history"], amax)
    if spec.amax_init == "flax":
        return {"scale": scale, "amax_history": recorded}
    amax = jnp.where(jnp.isnan(amax), jnp.inf, amax.astype(jnp.float32))
    index = jnp.arange(BINS, dtype=jnp.uint32)
    bins = jnp.where(index == SQUARE_BIN, jnp.square(amax), (bin_of(amax) == index).astype(jnp.float32))
    # An infinite square would turn the zeros of a mean or a mask into NaN.
    bins = jnp.where(jnp.isfinite(bins), bins, 0.0)
    history = jnp.where(jnp.isfinite(amax), recorded, state["amax_history"])
    return {"scale": scale, "amax_history": history, "amax_bins": bins}


def combine(state: TensorState, seen: TensorState) -> TensorState:
    """Read the state after a step out of a sum or mean of what ``next_state`` wrote at each use of the tensor.

    Args:
      state: the state before the step. Leading axes, as of layers under ``nn.scan``, are carried along.
      seen: the sum or mean.
    """
    counts = seen["amax_bins"][..., : NON_FINITE_BIN + 1]
    total = jnp.sum(counts, axis=-1, keepdims=True)
    highest = jnp.max(jnp.where(counts[..., :NON_FINITE_BIN] > 0, jnp.arange(NON_FINITE_BIN), -1), axis=-1)
    newest, square = seen["amax_history"][..., 0], seen["amax_bins"][..., SQUARE_BIN]
    exact = (total[..., 0] == 1) & (jnp.square(newest) == square) & (bin_of(newest) == highest)
    amax = jnp.where(exact, newest, bin_value(jnp.maximum(highest, 0)))
    recorded = record(state["amax_history"], amax)
    used = highest[..., None] >= 0
    return {
        "scale": jnp.where(used, seen["scale"] / jnp.where(used, total, 1.0), state["scale"]),
        "amax_history": jnp.where(used, recorded, state["amax_history"]),
        "amax_bins": jnp.zeros_like(seen["amax_bins"]),
    }
