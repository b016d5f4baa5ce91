"""Delayed scaling: a tensor is scaled by the largest amax of past steps, kept in an amax history.

State of one tensor: ``scale`` (f32, shape (1,), starts at 1), ``amax_history`` (f32, shape (length,), zeros) and, but
in flax mode, ``amax_bins`` (f32, shape (3, 2048), zeros). At a step, with a the largest entry of the history *before*
the step: the scale becomes ``a / max · 2**margin``, the tensor is quantized with it, the history rolls by −1 and slot 0
takes this step's amax. In ``warmup`` mode a history without entries gives way to the tensor's own amax (``scale`` stays
what it is, since each use has its own), and an amax that is not finite is not recorded; ``flax`` mode starts at scale 1
and records everything.

What a backward pass saw leaves it as the "gradient" of the state. Where a state is used more than once, automatic
differentiation *sums* these gradients, which destroys a scale or an amax. ``amax_bins`` survives a sum, a mean and any
weights: the amax falls into one of 2048 bins (exponent and three mantissa bits, rounded up), and in its bin the three
rows count it, add up how far it reaches into the bin (t, in (0, 1]), and add up t². After any sum the highest bin that
is not empty holds the maximum; the moments say whether all amaxes there are one number, and which. Only where
different amaxes share that bin is the maximum rounded up to the end of the bin, by at most 12.5 %. The scale, which
all uses of a step share, goes the same way: its bits, in three integers so small that their mean rounds back to them,
lie in bins that no amax has. In a state ``amax_bins`` is zeros, which no step reads; but between the micro-batches of
``optax.MultiSteps`` on an NNX model it holds what they have seen so far. Flax mode has flax's protocol instead, for one
use: the "gradient" is the new state.

Source: flax.linen.fp8_ops (flax mode, bit for bit); TransformerEngine's delayed scaling recipe.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxquant.core.dtypes import Element
from jaxquant.core.recipe import DelayedSpec
from jaxquant.core.scales import SMALLEST_SCALE

BINS = 2048
NON_FINITE_BIN = 2040  # the bits of infinity; bins above it are patterns of NaN
# float32 bits are sign, 8 exponent, 23 mantissa: dropping the low 20 leaves exponent and three mantissa bits.
_DROPPED_BITS = 20
# Shifts of the pieces of a scale's 31 bits, each 11 bits wide, kept from bin 2041 on.
_PIECES = (22, 11, 0)
_PIECE_BINS = slice(NON_FINITE_BIN + 1, NON_FINITE_BIN + 1 + len(_PIECES))
# Variance of t below which the amaxes of a bin count as one number. Its float32 error is a few 2^-24 (three roundings
# of numbers up to 1); two amaxes that the test takes for one are closer than 2^-9 of the bin, a 4000th of their value.
_SAME = 2.0**-20

TensorState = dict[str, jax.Array]


def initial_state(spec: DelayedSpec) -> TensorState:
    """Make the state of a tensor that has not been seen."""
    state = {"scale": jnp.ones((1,), jnp.float32), "amax_history": jnp.zeros((spec.amax_history_length,), jnp.float32)}
    return state if spec.amax_init == "flax" else state | {"amax_bins": empty_bins()}


def empty_bins(leading: tuple[int, ...] = ()) -> jax.Array:
    """Make the bins of a state, zeros of shape (*leading, 3, 2048)."""
    return jnp.zeros((*leading, 3, BINS), jnp.float32)


def _bits(amax: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)


def bin_of(amax: jax.Array) -> jax.Array:
    """Find the bin of an amax: the float32 exponent and three mantissa bits, rounded up."""
    return (_bits(amax) + ((1 << _DROPPED_BITS) - 1)) >> _DROPPED_BITS


def bin_value(index: jax.Array, reach: jax.Array | float = 1.0) -> jax.Array:
    """Return the amax that reaches so far into a bin; 1 is its end, at most 12.5 % above any other amax of the bin."""
    into = jnp.round(jnp.asarray(reach, jnp.float32) * (1 << _DROPPED_BITS)).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(((index.astype(jnp.int32) - 1) << _DROPPED_BITS) + into, jnp.float32)


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


def without_bins(state: TensorState) -> TensorState:
    """Leave out what no step reads, so that it is not kept for the backward pass."""
    return {name: value for name, value in state.items() if name != "amax_bins"}


def observe(state: TensorState, scale: jax.Array, amax: jax.Array, spec: DelayedSpec) -> TensorState:
    """Return what leaves the backward pass of one use in place of the state's gradient.

    Beside the bins, which ``advance`` reads, it has the next scale and history, for loops that overwrite a state with
    its gradient, as flax's ``TrainState`` does: right after one use.

    Args:
      state: the state before the step, without its bins.
      scale: the scale that the use took, shape (1,).
      amax: the tensor's largest magnitude.
      spec: first-step behaviour.
    """
    if spec.amax_init == "flax":
        return {"scale": scale, "amax_history": record(state["amax_history"], amax)}
    history = jnp.where(jnp.isfinite(amax), record(state["amax_history"], amax), state["amax_history"])
    amax = jnp.where(jnp.isfinite(amax), amax.astype(jnp.float32), jnp.inf)
    index = bin_of(amax)
    reach = (_bits(amax) - ((index - 1) << _DROPPED_BITS)).astype(jnp.float32) * 2.0**-_DROPPED_BITS
    rows = jnp.stack([jnp.ones_like(reach), reach, jnp.square(reach)])
    bins = jnp.where(jnp.arange(BINS) == index, rows[:, None], 0.0)
    pieces = (_bits(scale) >> jnp.array(_PIECES)) & 2047
    return {
        "scale": scale,
        "amax_history": history,
        "amax_bins": bins.at[0, _PIECE_BINS].set(pieces.astype(jnp.float32)),
    }


def largest(seen: TensorState) -> jax.Array:
    """Read the largest finite amax out of a sum or mean of observations; −1 where there is none."""
    count, first, second = (seen["amax_bins"][..., row, :NON_FINITE_BIN] for row in range(3))
    highest = jnp.max(jnp.where(count > 0, jnp.arange(NON_FINITE_BIN), -1), axis=-1)
    at = jnp.maximum(highest, 0)[..., None]
    count, first, second = (jnp.take_along_axis(row, at, axis=-1)[..., 0] for row in (count, first, second))
    weight = jnp.where(count > 0, count, 1.0)
    mean = first / weight
    is_one = jnp.abs(second / weight - jnp.square(mean)) < _SAME
    return jnp.where(highest >= 0, bin_value(highest, jnp.where(is_one, mean, 1.0)), -1.0)


def _uses(seen: TensorState) -> jax.Array:
    """Sum the weights of all uses, those with an amax that is not finite included; 0 where there was none."""
    return jnp.sum(seen["amax_bins"][..., 0, : NON_FINITE_BIN + 1], axis=-1)


@jax.jit  # tensors of one shape share a lowered function
def advance(state: TensorState, seen: TensorState) -> TensorState:
    """Return the state after a step.

    Args:
      state: the state before the step. Leading axes, as of layers under ``nn.scan``, are carried along.
      seen: a sum or mean of what ``observe`` returned at each use of the tensor, all with this state.
    """
    amax = largest(seen)
    used = amax[..., None] >= 0
    history, counts = state["amax_history"], seen["amax_bins"][..., 0, :]
    total = _uses(seen)[..., None]
    pieces = jnp.round(counts[..., _PIECE_BINS] / jnp.where(total > 0, total, 1.0)).astype(jnp.int32)
    scale = jnp.sum(pieces << jnp.array(_PIECES), axis=-1, keepdims=True)
    # Without a history each use has a scale of its own, and the state none.
    had_scale = (total > 0) & (jnp.max(jnp.where(jnp.isfinite(history), history, 0.0), axis=-1, keepdims=True) > 0)
    return {
        "scale": jnp.where(had_scale, jax.lax.bitcast_convert_type(scale, jnp.float32), state["scale"]),
        "amax_history": jnp.where(used, record(history, amax), history),
        "amax_bins": jnp.zeros_like(state["amax_bins"]),
    }


@jax.jit
def larger(first: TensorState, second: TensorState) -> TensorState:
    """Choose, of what two passes saw, the one with the larger amax; the choice loses no bit, as a sum might.

    A pass that used the tensor goes before one that did not, whatever it saw: it holds the scale that was used.

    Leading axes are carried along. In flax mode, whose "gradients" are new states, every entry takes the larger one:
    both rolled the same history, and differ in slot 0.
    """
    if "amax_bins" not in first:
        return jax.tree.map(jnp.maximum, first, second)
    amaxes, uses = ([read(seen) for seen in (first, second)] for read in (largest, _uses))
    # Without a finite amax on either side the two are equal, one of them perhaps empty.
    keep = (amaxes[0] > amaxes[1]) | ((amaxes[0] == amaxes[1]) & ((uses[0] > 0) | (uses[1] == 0)))
    return jax.tree.map(
        lambda a, b: jnp.where(keep.reshape(keep.shape + (1,) * (a.ndim - keep.ndim)), a, b), first, second
    )
