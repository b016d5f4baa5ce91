"""Delayed scaling: the scale of a tensor is computed from the largest amax of past steps, stored in an amax history.

The state of a tensor has ``scale`` (f32, shape (1,), starts at 1), ``amax_history`` (f32, shape (length,), zeros) and,
except in flax mode, ``amax_bins`` (f32, shape (1, 2079), zeros). In a step, let a be the largest entry of the history
*before* the step: the scale becomes ``a / max · 2**margin``, the tensor is quantized with this scale, the history rolls
by −1, and slot 0 stores the amax of this step. In ``warmup`` mode, a tensor without a history uses its own amax instead
of a (the stored ``scale`` does not change, because each use of the tensor has its own scale), and an amax that is not
finite is not recorded. ``flax`` mode starts at scale 1 and records every amax.

The backward pass returns observations as the "gradient" of the state. If a state is used more than once, automatic
differentiation *sums* these gradients, which would destroy an amax. Therefore an observation marks one of 2,048 bins of
magnitudes. The float32 exponent and the three highest mantissa bits of an amax select its bin, and the end of the bin
(at most 12.5 % above the amax) is recorded. In a sum or a mean of observations, the highest marked bin is still the bin
of the largest amax. The last bin marks each use, and 31 cells after the bins mark the bits of the scale, which all uses
of a step share. The ``amax_bins`` of a state are zeros, and no step reads them. Exception: between the micro-batches of
``optax.MultiSteps`` on an NNX model, the bins accumulate observations. Flax mode uses flax's protocol instead, which
supports one use per step: the "gradient" is the new state.

Marks and amaxes are never negative, in a state or an observation. An optimizer that updates the state like a weight
subtracts from the marked cells. After the optimizer's first step, the last bin (in flax mode: the history) is therefore
negative. The scale of such a state is NaN.

A *warm* state is known to have a history: the scale is computed only from the history, and no cast waits for the
tensor's own amax. The ``amax_bins`` of a warm state have an additional, unused column, so that the shape shows at trace
time whether the state is warm (``is_warm``). The results are bit for bit the same for a state that is not warm.

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
NON_FINITE_BIN = 2040  # bits of infinity; the bins above it are NaN patterns
# float32 has a sign, 8 exponent and 23 mantissa bits; without the low 20, exponent and three mantissa bits remain.
_LOW_BITS = 20
_USE_CELL = (..., 0, BINS - 1)
_SCALE_BITS = 31
CELLS = BINS + _SCALE_BITS

OBSERVE = "observe"
"""Name of ``observe`` in a jaxpr."""

TensorState = dict[str, jax.Array]
"""``scale``, ``amax_history`` and, except in flax mode, ``amax_bins``; leading axes are layers under ``nn.scan``."""


def initial_state(spec: DelayedSpec) -> TensorState:
    """Return the state of a tensor that has not been observed."""
    state = {"scale": jnp.ones((1,), jnp.float32), "amax_history": jnp.zeros((spec.amax_history_length,), jnp.float32)}
    return state if spec.amax_init == "flax" else state | {"amax_bins": empty_bins()}


def empty_bins() -> Float[Array, "1 bins"]:
    """Return the bins of a state without observations."""
    return jnp.zeros((1, CELLS), jnp.float32)


def widen_bins(bins: Float[Array, "*leading 1 cells"]) -> Float[Array, "*leading 1 width"]:
    """Return bins with the width of a warm tensor's bins; accumulated observations are kept."""
    return jnp.pad(bins, [(0, 0)] * (bins.ndim - 1) + [(0, 1)])


def is_warm(state: TensorState) -> bool:
    """Return whether a state is marked as having a history, by the shape of its bins."""
    return "amax_bins" in state and state["amax_bins"].shape[-1] == CELLS + 1


def has_history(state: TensorState) -> Bool[Array, "*leading"]:
    """Return whether a history contains a finite amax above zero."""
    history = state["amax_history"]
    return jnp.max(finite(history), axis=-1) > 0


def _float(bits: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def bin_of(amax: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the bin of an amax: its float32 exponent and three mantissa bits, rounded down."""
    return bits_of(amax) >> _LOW_BITS


def bin_value(index: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the end of a bin, below 1.125 times its start; 0 for the first bin, whose amaxes are almost zero."""
    end = _float((index << _LOW_BITS) | ((1 << _LOW_BITS) - 1))
    return jax.lax.select(index > 0, end, jnp.zeros_like(end))


def current_scale(
    state: TensorState, amax: Float[Array, ""], element: Element, spec: DelayedSpec, *, floor: float = SMALLEST_SCALE
) -> Float[Array, " 1"]:
    """Compute the float32 scale for this step: ``max(history) · 2**margin / element.max``.

    Args:
      state: state before this step.
      amax: largest magnitude of this tensor; only the warm-up reads it.
      element: element type to quantize to.
      spec: margin and first-step behaviour.
      floor: smallest scale. A tensor with a smaller scale is almost zero, and its scale becomes 1. Output gradients use
        the smallest normal float32, so that tiny gradients do not become zero. Flax mode has no floor.

    Returns:
      The scale; NaN if an optimizer has changed the state. (A checkpoint's state without bins does not show a change.)

    Raises:
      TypeError: the history is not float32 (except in flax mode), so that amaxes would be rounded down.
      ValueError: the length of the history differs from the specification.
    """
    history, old = state["amax_history"], state["scale"]
    if history.shape[-1] != spec.amax_history_length:
        raise ValueError(
            f"amax_history of the quant state has {history.shape[-1]} entries, but amax_history_length is "
            f"{spec.amax_history_length}; set amax_history_length to {history.shape[-1]}, or start with new quant state"
        )
    if spec.amax_init == "flax":
        # flax stores the reciprocal and inverts it twice; the last bit of the scale depends on these inversions.
        past = jnp.max(history, axis=0)
        inverse = jnp.where(past > 0, (jnp.float32(element.max) / past) / (2.0**spec.margin), 1.0 / old)
        inverse = jnp.where(jnp.isfinite(past), inverse, 1.0 / old)
        # NaN is selected inside the reciprocal, so that XLA cancels this reciprocal with the cast's, as in flax.
        return 1.0 / jnp.where(jnp.min(history, axis=0) < 0, jnp.nan, inverse)
    if history.dtype != jnp.float32:
        raise TypeError(
            f"amax_history of the quant state must be float32, got {history.dtype.name}; cast only the parameters, not "
            "the quant state"
        )
    bins = state.get("amax_bins")
    bins = None if bins is None or not bins.size else bins
    return _scale(history, old, None if is_warm(state) else amax, bins, 2.0**spec.margin / element.max, floor)


# Jitted, so that a program contains it once for each element type. No array constants: a scan would store them.
@functools.partial(jax.jit, static_argnums=(4, 5))
def _scale(
    history: Float[Array, " length"],
    old: Float[Array, " 1"],
    amax: Float[Array, ""] | None,
    bins: Float[Array, "1 bins"] | None,
    factor: float,
    floor: float,
) -> Float[Array, " 1"]:
    """Return ``max(history) · factor``, or 1 below the floor. Without a history, use ``amax``, or else the old scale.

    The result is NaN if an optimizer has made the last cell of the bins negative.
    """
    past = jnp.max(finite(history))
    if amax is not None:
        past = jax.lax.select(past > 0, past, amax.astype(jnp.float32))
    is_valid = jnp.isfinite(past / past)  # neither 0 nor infinite nor NaN
    # The old scale is 0 if flax's TrainState overwrote the state with the gradient of a layer that did not run.
    scale = floor_scale(jax.lax.select(is_valid, past * factor, old.reshape(())), floor)
    if bins is not None:
        scale = jax.lax.select(bins[_USE_CELL] < 0, jnp.float32(jnp.nan), scale)
    return scale.reshape(old.shape)


def poison_scale(scale: Float[Array, "*shape"], amax: Float[Array, "*shape"], kind: Element) -> Float[Array, "*shape"]:
    """Return the scales that multiply qvalues: NaN for integers that represent NaN or infinity.

    The dynamic scale of such a tensor is not finite anyway. Float elements can represent NaN, and saturate infinities.

    Args:
      scale: scale by which the tensor was divided.
      amax: largest magnitude of the tensor, with a shape that broadcasts to the scale's shape.
      kind: element type.
    """
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan) if kind.kind == "int" else scale


@jax.jit
def finite(amaxes: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replace amaxes that are not finite by 0; the history of a flax checkpoint can contain them."""
    return _float(bits_of(amaxes) * jnp.isfinite(amaxes).astype(jnp.int32))


def merge_states(states: Sequence[TensorState]) -> TensorState:
    """Return one state for a tensor that several layers read: the elementwise largest scales and amaxes.

    The states are normally equal. If they differ (one layer was frozen, or its state was edited), the widest range
    is used, and a layer without a history uses the history of the others.

    Args:
      states: states of the layers' inputs, not in flax mode; leading axes do not change.
    """
    merged = dict(next(filter(is_warm, states), states[0]))
    parts = [(state["scale"], state["amax_history"]) for state in states]
    merged["scale"], merged["amax_history"] = functools.reduce(_wider, parts)
    return merged


@jax.jit  # so that a program contains it once
def _wider(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, ...]:
    (scale, history), (other, others) = first, second
    return jnp.maximum(scale, other), jnp.maximum(finite(history), finite(others))


def record(history: Float[Array, "*leading length"], amax: Float[Array, "*leading"]) -> Float[Array, "*leading length"]:
    """Return the history after a step: rolled by −1 along its last axis, with the step's amax in slot 0.

    Args:
      history: amaxes of past steps; leading axes do not change.
      amax: amax of this step.
    """
    first = amax[..., None].astype(history.dtype)
    return jnp.concatenate([first, history[..., 2:], history[..., : min(1, history.shape[-1] - 1)]], axis=-1)


def without_bins(state: TensorState) -> TensorState:
    """Remove the bins, which no step reads, before a state is saved; their shape shows whether the state is warm."""
    width = CELLS + 1 if is_warm(state) else 0
    return {name: value[..., :0, :width] if name == "amax_bins" else value for name, value in state.items()}


# Jitted, so that a program contains it once; the backward pass of every contraction calls it for each of its tensors.
@functools.partial(jax.jit, static_argnames="spec")
def observe(state: TensorState, scale: Float[Array, " 1"], amax: Float[Array, ""], spec: DelayedSpec) -> TensorState:
    """Return the observation of one use, which replaces the state's gradient in the backward pass.

    In addition to the bins, which ``advance`` reads, the observation contains the next scale and history, for loops
    that overwrite a state with its gradient, like flax's ``TrainState``. These are correct after exactly one use.

    Args:
      state: state before the step, without its bins.
      scale: scale of this use.
      amax: largest magnitude of the tensor.
      spec: parameters of delayed scaling, of which ``amax_init`` is read.
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


def largest_amax(observation: TensorState) -> Float[Array, "*leading"]:
    """Return the largest finite amax in a sum or mean of observations, rounded up to its bin, or −1."""
    count = observation["amax_bins"][..., 0, :NON_FINITE_BIN]
    highest = jnp.max(jnp.where(count > 0, jnp.arange(NON_FINITE_BIN, dtype=jnp.int32), -1), axis=-1)
    return jnp.where(highest >= 0, bin_value(highest), -1.0)


@jax.jit  # tensors of one shape share a lowered function
def advance(state: TensorState, observation: TensorState) -> TensorState:
    """Return the state after a step.

    Args:
      state: state before the step; leading axes, such as layers under ``nn.scan``, are kept.
      observation: sum or mean of the results of ``observe`` for all uses of the tensor with this state.
    """
    amax, history = largest_amax(observation), state["amax_history"]
    cells = observation["amax_bins"]
    values = jnp.left_shift(jnp.int32(1), jnp.arange(_SCALE_BITS, dtype=jnp.int32))
    scale = _float(jnp.sum(jnp.where(cells[..., 0, BINS:CELLS] > 0, values, 0), axis=-1, dtype=jnp.int32))
    # Without a history each use has its own scale, and the state does not record one.
    has_scale = has_history(state) & (cells[_USE_CELL] > 0)
    return {
        "scale": jnp.where(has_scale[..., None], scale[..., None], state["scale"]),
        "amax_history": jnp.where(amax[..., None] >= 0, record(history, amax), history),
        "amax_bins": jnp.zeros_like(state["amax_bins"]),
    }
