"""Delayed scaling: a tensor is scaled by the largest amax of past steps, kept in an amax history.

State of one tensor: ``scale`` (f32, shape (1,), starts at 1), ``amax_history`` (f32, shape (length,), zeros) and,
except in flax mode, ``amax_bins`` (f32, shape (1, 2079), zeros). At a step, with a the largest entry of the history
*before* the step: the scale becomes ``a / max · 2**margin``, the tensor is quantized with it, the history rolls by −1
and slot 0 takes this step's amax. In ``warmup`` mode a history without entries gives way to the tensor's own amax
(``scale`` stays what it is, since each use has its own), and an amax that is not finite is not recorded; ``flax`` mode
starts at scale 1 and records everything.

What a backward pass observed leaves it as the "gradient" of the state. Where a state is used more than once, automatic
differentiation *sums* these gradients, which destroys an amax. So an amax is recorded as one of 2,048 bins of
magnitudes, its float32 exponent and three highest mantissa bits, rounded up to the end of the bin (less than 12.5 %),
and what is observed is a mark in that bin: the highest bin above zero holds the maximum, under a sum, a mean and any
positive weights. The last bin marks each use, and 31 cells behind the bins mark the bits of the scale, which all uses
of a step share. In a state ``amax_bins`` are zeros, and no step reads them. Exception: between the micro-batches
of ``optax.MultiSteps`` on an NNX model they hold the observations so far. Flax mode has flax's
protocol instead, for one use: the "gradient" is the new state.

Marks and amaxes are never negative, in a state or an observation. An optimizer that takes the state for a weight
subtracts from the marked cells, so that the last bin (of flax mode: the history) is negative after its first step. No
scale is made of such a state: it is NaN.

A state is *warm* where its ``amax_bins`` have a column more, which holds nothing: its history has entries, so that the
scale comes from the history alone and no cast waits for the tensor's own amax. The shape says it, so it is decided
while tracing, tensor by tensor (``is_warm``). The bits are the same either way.

Source: flax.linen.fp8_ops (flax mode, bit for bit); TransformerEngine's delayed scaling recipe.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxquant.core.dtypes import Element
from jaxquant.core.recipe import DelayedSpec
from jaxquant.core.scales import SMALLEST_SCALE, bits_of, floor_scale

BINS = 2048
NON_FINITE_BIN = 2040  # the bits of infinity; bins above it are patterns of NaN
# float32 bits are sign, 8 exponent, 23 mantissa: dropping the low 20 leaves exponent and three mantissa bits.
_LOW_BITS = 20
_USE_CELL = (..., 0, BINS - 1)
_SCALE_BITS = 31
CELLS = BINS + _SCALE_BITS

OBSERVE = "observe"
"""Name of ``observe`` in a traced program."""

TensorState = dict[str, jax.Array]
"""``scale``, ``amax_history`` and, except in flax mode, ``amax_bins``; leading axes are layers under ``nn.scan``."""


def initial_state(spec: DelayedSpec) -> TensorState:
    """Make the state of a tensor that has not been observed."""
    state = {"scale": jnp.ones((1,), jnp.float32), "amax_history": jnp.zeros((spec.amax_history_length,), jnp.float32)}
    return state if spec.amax_init == "flax" else state | {"amax_bins": empty_bins()}


def empty_bins() -> Float[Array, "1 bins"]:
    """Make the bins of a state without observations."""
    return jnp.zeros((1, CELLS), jnp.float32)


def widen_bins(bins: Float[Array, "*leading 1 cells"]) -> Float[Array, "*leading 1 width"]:
    """Return bins as wide as a warm tensor's; what waits in them stays."""
    return jnp.pad(bins, [(0, 0)] * (bins.ndim - 1) + [(0, 1)])


def is_warm(state: TensorState) -> bool:
    """Check whether a state says that its history has entries, by the shape of its bins."""
    return "amax_bins" in state and state["amax_bins"].shape[-1] == CELLS + 1


def has_history(state: TensorState) -> Bool[Array, "*leading"]:
    """Return whether there is a finite amax above zero in a history."""
    history = state["amax_history"]
    return jnp.max(finite(history), axis=-1) > 0


def _float(bits: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def bin_of(amax: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the bin of an amax: its float32 exponent and three mantissa bits, rounded down."""
    return bits_of(amax) >> _LOW_BITS


def bin_value(index: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the end of a bin, below 1.125 times its beginning; 0 for the first, whose amaxes are all but zero."""
    end = _float((index << _LOW_BITS) | ((1 << _LOW_BITS) - 1))
    return jax.lax.select(index > 0, end, jnp.zeros_like(end))


def current_scale(
    state: TensorState, amax: Float[Array, ""], element: Element, spec: DelayedSpec, *, floor: float = SMALLEST_SCALE
) -> Float[Array, " 1"]:
    """Compute the scale to quantize with at this step, in float32: ``max(history) · 2**margin / element.max``.

    Args:
      state: the state before this step.
      amax: this tensor's largest magnitude; read by the warm-up alone.
      element: element type to quantize to.
      spec: margin and first-step behaviour.
      floor: a scale below it becomes 1, and the tensor all but zero. Output gradients take the smallest normal number
        of float32, so that tiny ones survive. Flax mode has no floor.

    Returns:
      The scale; NaN where an optimizer has changed the state, unless it comes without bins, as from a checkpoint.

    Raises:
      TypeError: a history that is not float32, outside flax mode: it would round an amax down.
      ValueError: a history of another length than the specification's.
    """
    history, old = state["amax_history"], state["scale"]
    if history.shape[-1] != spec.amax_history_length:
        raise ValueError(
            f"quant state amax_history has {history.shape[-1]} entries and amax_history_length is "
            f"{spec.amax_history_length}; set it to {history.shape[-1]}, or begin with the state of a new model.init"
        )
    if spec.amax_init == "flax":
        # flax keeps the reciprocal and inverts it twice; the last bit depends on it.
        past = jnp.max(history, axis=0)
        inverse = jnp.where(past > 0, (jnp.float32(element.max) / past) / (2.0**spec.margin), 1.0 / old)
        inverse = jnp.where(jnp.isfinite(past), inverse, 1.0 / old)
        # Inside the reciprocal, which XLA then cancels with the cast's as it does for flax.
        return 1.0 / jnp.where(jnp.min(history, axis=0) < 0, jnp.nan, inverse)
    if history.dtype != jnp.float32:
        raise TypeError(
            f"quant state amax_history is {history.dtype.name} and must be float32, or amaxes would be rounded; cast "
            "parameters alone"
        )
    bins = state.get("amax_bins")
    bins = None if bins is None or not bins.size else bins
    return _scale(history, old, None if is_warm(state) else amax, bins, 2.0**spec.margin / element.max, floor)


# A program holds it once for each element, and in it no array that depends on no argument: a scan would keep that.
@functools.partial(jax.jit, static_argnums=(4, 5))
def _scale(
    history: Float[Array, " length"],
    old: Float[Array, " 1"],
    amax: Float[Array, ""] | None,
    bins: Float[Array, "1 bins"] | None,
    factor: float,
    floor: float,
) -> Float[Array, " 1"]:
    """Return ``max(history) · factor``, 1 below the floor; without history that of an amax, or else the old one.

    NaN where an optimizer has made the last cell of the bins negative.
    """
    past = jnp.max(finite(history))
    if amax is not None:
        past = jax.lax.select(past > 0, past, amax.astype(jnp.float32))
    is_sound = jnp.isfinite(past / past)  # neither 0 nor infinite nor NaN
    # The old one is 0 where flax's TrainState wrote the gradient of a layer that did not run over the state.
    scale = floor_scale(jax.lax.select(is_sound, past * factor, old.reshape(())), floor)
    if bins is not None:
        scale = jax.lax.select(bins[_USE_CELL] < 0, jnp.float32(jnp.nan), scale)
    return scale.reshape(old.shape)


def poison_lost(scale: Float[Array, "*shape"], amax: Float[Array, "*shape"], kind: Element) -> Float[Array, "*shape"]:
    """Return the scales that multiply qvalues: NaN where these are integers and stand for NaN or infinity.

    A dynamic scale is not finite then by itself. Floats keep NaN, and saturate infinities.

    Args:
      scale: that the tensor was divided by.
      amax: the tensor's own largest magnitude, of a shape that broadcasts to the scale's.
      kind: the element type.
    """
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan) if kind.kind == "int" else scale


@jax.jit
def finite(amaxes: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return amaxes with 0 in place of those that are not finite, which a history of a flax checkpoint may hold."""
    return _float(bits_of(amaxes) * jnp.isfinite(amaxes).astype(jnp.int32))


def merge_states(states: Sequence[TensorState]) -> TensorState:
    """Return the state by which a tensor is scaled that several layers read and observe: its largest amaxes.

    That is the state of each, where they have observed the same ones. Where they have not (one of them was frozen, or
    its state was edited), the widest range counts, and a layer without history takes that of the others.

    Args:
      states: of the layers' inputs, not in flax mode; leading axes are carried along.
    """
    found = dict(next(filter(is_warm, states), states[0]))
    parts = [(state["scale"], state["amax_history"]) for state in states]
    found["scale"], found["amax_history"] = functools.reduce(_wider, parts)
    return found


@jax.jit  # a program holds it once
def _wider(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, ...]:
    (scale, history), (other, others) = first, second
    return jnp.maximum(scale, other), jnp.maximum(finite(history), finite(others))


def record(history: Float[Array, "*leading length"], amax: Float[Array, "*leading"]) -> Float[Array, "*leading length"]:
    """Return the history after a step, rolled by −1 along its last axis, with the step's amax in slot 0.

    Args:
      history: amaxes of past steps. Leading axes are carried along.
      amax: this step's.
    """
    first = amax[..., None].astype(history.dtype)
    return jnp.concatenate([first, history[..., 2:], history[..., : min(1, history.shape[-1] - 1)]], axis=-1)


def without_bins(state: TensorState) -> TensorState:
    """Cut the bins, which no step reads, down to what says whether a state is warm, for the backward pass to keep."""
    width = CELLS + 1 if is_warm(state) else 0
    return {name: value[..., :0, :width] if name == "amax_bins" else value for name, value in state.items()}


# The backward pass of every contraction calls it for each of its tensors: a program holds it once.
@functools.partial(jax.jit, static_argnames="spec")
def observe(state: TensorState, scale: Float[Array, " 1"], amax: Float[Array, ""], spec: DelayedSpec) -> TensorState:
    """Return what leaves the backward pass of one use in place of the state's gradient.

    Beside the bins, which ``advance`` reads, it has the next scale and history, for loops that overwrite a state with
    its gradient, as flax's ``TrainState`` does: right after one use.

    Args:
      state: the state before the step, without its bins.
      scale: the scale that the use took.
      amax: the tensor's largest magnitude.
      spec: first-step behaviour.
    """
    if spec.amax_init == "flax":
        return {"scale": scale, "amax_history": record(state["amax_history"], amax)}
    is_finite = jnp.isfinite(amax)
    index = jax.lax.select(is_finite, bin_of(amax), np.int32(NON_FINITE_BIN))
    history = jax.lax.select(is_finite, record(state["amax_history"], bin_value(index)), state["amax_history"])
    cells = jnp.arange(BINS, dtype=jnp.int32)[None]
    marks = (cells == index) | (cells == BINS - 1)
    bits = (bits_of(scale)[None] >> jnp.arange(_SCALE_BITS, dtype=jnp.int32)[None]) & 1
    bins = jnp.concatenate([marks.astype(jnp.float32), bits.astype(jnp.float32)], axis=-1)
    if is_warm(state):
        bins = jnp.pad(bins, ((0, 0), (0, 1)))
    return {"scale": scale, "amax_history": history, "amax_bins": bins}


def largest(observation: TensorState) -> Float[Array, "*leading"]:
    """Return the largest finite amax in a sum or mean of observations, rounded up to its bin; −1 for none."""
    count = observation["amax_bins"][..., 0, :NON_FINITE_BIN]
    highest = jnp.max(jnp.where(count > 0, jnp.arange(NON_FINITE_BIN, dtype=jnp.int32), -1), axis=-1)
    return jnp.where(highest >= 0, bin_value(highest), -1.0)


@jax.jit  # tensors of one shape share a lowered function
def advance(state: TensorState, observation: TensorState) -> TensorState:
    """Return the state after a step.

    Args:
      state: the state before the step. Leading axes, as of layers under ``nn.scan``, are carried along.
      observation: a sum or mean of what ``observe`` returned at each use of the tensor, all with this state.
    """
    amax, history = largest(observation), state["amax_history"]
    cells = observation["amax_bins"]
    values = jnp.left_shift(jnp.int32(1), jnp.arange(_SCALE_BITS, dtype=jnp.int32))
    scale = _float(jnp.sum(jnp.where(cells[..., 0, BINS:CELLS] > 0, values, 0), axis=-1, dtype=jnp.int32))
    # Without a history each use has a scale of its own, and the state none.
    has_scale = has_history(state) & (cells[_USE_CELL] > 0)
    return {
        "scale": jnp.where(has_scale[..., None], scale[..., None], state["scale"]),
        "amax_history": jnp.where(amax[..., None] >= 0, record(history, amax), history),
        "amax_bins": jnp.zeros_like(state["amax_bins"]),
    }
