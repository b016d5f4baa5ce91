"""Delayed scaling, compared with a Python loop."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core import delayed
from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import DelayedSpec
from tests.states import recorded

LENGTH = 4
E4M3 = ELEMENTS["float8_e4m3fn"]
AMAXES = [0.0, 3.0, 0.5, 0.25, math.inf, 7.0, 0.0, math.nan, 1.0, 1.0, 1.0, 1.0, 2.0, 1e-9, 1e5, 2.0]


def loop(mode: str, margin: int):
    """Compute delayed scaling in Python; yield (scale, history) for each step."""
    scale, history = 1.0, [0.0] * LENGTH
    for amax in AMAXES:
        past = max(history, key=lambda v: (math.isnan(v), v))
        if math.isfinite(past) and past > 0:
            scale = past / 448 * 2.0**margin
        if mode == "flax" or math.isfinite(amax):
            history = [amax if mode == "flax" else float(recorded(amax)), *history[2:], history[0]]
        yield scale, list(history)


@pytest.mark.parametrize("mode", ["warmup", "flax"])
@pytest.mark.parametrize("margin", [0, 2])
def test_sixteen_steps_are_those_of_a_python_loop(mode, margin):
    spec = DelayedSpec(LENGTH, margin, mode)
    state = delayed.initial_state(spec)

    @jax.jit
    def step(state, amax):
        scale = delayed.current_scale(state, amax, E4M3, spec)
        seen = delayed.observe(state, scale, amax, spec)
        return seen if mode == "flax" else delayed.advance(state, seen)

    for amax, (scale, history) in zip(AMAXES, loop(mode, margin), strict=True):
        state = step(state, jnp.float32(amax))
        np.testing.assert_allclose(state["scale"][0], scale, rtol=2e-7)
        np.testing.assert_array_equal(state["amax_history"], np.asarray(history, np.float32))


def emitted(amax, history=0.0):
    spec = DelayedSpec(LENGTH)
    state = delayed.initial_state(spec) | {"amax_history": jnp.full((LENGTH,), history)}
    scale = delayed.current_scale(state, jnp.float32(amax), E4M3, spec)
    return state, delayed.observe(state, scale, jnp.float32(amax), spec)


def combined(amaxes, weights):
    """Return the largest amax of a weighted sum of observations; uses are padded to one number, to compile once."""
    amaxes, weights = (np.pad(np.float32(values), (0, 64 - len(values))) for values in (amaxes, weights))
    return float(_combined(amaxes, weights))


@jax.jit
def _combined(amaxes, weights):
    spec = DelayedSpec(LENGTH)
    state = delayed.without_bins(delayed.initial_state(spec))
    each = jax.vmap(lambda amax: delayed.observe(state, jnp.full((1,), 0.1), amax, spec))(amaxes)
    return delayed.largest_amax(jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), each))


AMAX = st.one_of(
    st.floats(0, float(np.finfo(np.float32).max), width=32),
    st.floats(1.0, 1.125, width=32),
    st.integers(0, 64).map(lambda ulps: float(np.float32(1.06) + np.float32(ulps * 2.0**-23))),
)
WEIGHT = st.floats(1e-6, 1e6)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(st.lists(st.tuples(AMAX, WEIGHT), min_size=1, max_size=64))
def test_what_is_recorded_is_the_end_of_the_maximums_bin_under_any_weights(uses):
    amaxes, weights = zip(*uses, strict=True)
    assert combined(amaxes, weights) == recorded(max(amaxes))


@pytest.mark.parametrize(
    ("amaxes", "weights", "newest"),
    [
        ([1.01, 1.12, 9.3, 9.3, 9.3], [0.5, 0.5, 0.01, 0.01, 0.01], recorded(9.3)),
        ([2.0, math.inf], [1, 1], recorded(2.0)),
        ([2.0, math.nan], [0.5, 0.5], recorded(2.0)),
        ([0.0, 0.0], [1, 1], 0.0),
        ([math.inf], [1], 7.0),  # not recorded: the history is unchanged
        ([5.0], [0], 7.0),  # not used
    ],
)
def test_combined_uses_record_the_maximum(amaxes, weights, newest):
    states, each = zip(*(emitted(amax, history=7.0) for amax in amaxes), strict=True)
    seen = jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *each)
    new = delayed.advance(states[0], seen)
    np.testing.assert_array_equal(new["amax_history"], np.float32([newest, 7.0, 7.0, 7.0]))
    expected = 7.0 / 448 if sum(weights) else 1.0  # an unused state keeps its scale, which was 1
    np.testing.assert_allclose(new["scale"], expected, rtol=2e-7)
    assert not new["amax_bins"].any()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_non_finite_micro_batch_leaves_the_scale_of_the_big_batch_in_any_order(order):
    state, seen = emitted(math.nan, history=7.0)  # the scale is 1 before the step
    nothing, finite = jax.tree.map(jnp.zeros_like, seen), emitted(2.0, history=7.0)[1]
    for other, wanted in ((nothing, seen), (finite, finite)):
        total = jax.tree.map(jnp.add, *((other, seen)[place] for place in order))
        jax.tree.map(np.testing.assert_array_equal, delayed.advance(state, total), delayed.advance(state, wanted))


@pytest.mark.parametrize("amax", [1e-36, 0.0])
def test_a_scale_never_flushes_to_zero(amax):
    state, seen = emitted(amax, history=amax)
    assert float(delayed.advance(state, seen)["scale"][0]) == 1.0


def test_a_state_overwritten_with_the_gradient_of_no_use_has_a_scale():
    state = jax.tree.map(jnp.zeros_like, delayed.initial_state(DelayedSpec(LENGTH)))
    scales = [delayed.current_scale(state, jnp.float32(amax), E4M3, DelayedSpec(LENGTH)) for amax in (0, 448)]
    assert [float(scale[0]) for scale in scales] == [1.0, 1.0]


def test_a_state_that_would_round_amaxes_or_has_another_length_is_refused():
    state = delayed.initial_state(DelayedSpec(LENGTH))
    with pytest.raises(ValueError, match=r"amax_history_length is 16; set amax_history_length to 4, or start with new"):
        delayed.current_scale(state, jnp.float32(1), E4M3, DelayedSpec(16))
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    with pytest.raises(TypeError, match=r"must be float32, got bfloat16; cast only the parameters, not the quant"):
        delayed.current_scale(state, jnp.float32(1), E4M3, DelayedSpec(LENGTH))


def test_a_history_with_nan_forgets_it_in_time():
    spec = DelayedSpec(LENGTH)
    state = delayed.initial_state(spec) | {"amax_history": jnp.array([jnp.nan, 2.0, jnp.inf, 1.0])}
    for amax in (3.0, 4.0, 5.0, 6.0):
        scale = delayed.current_scale(state, jnp.float32(amax), E4M3, spec)
        state = delayed.advance(state, delayed.observe(state, scale, jnp.float32(amax), spec))
        assert np.isfinite(state["scale"]).all()
    np.testing.assert_array_equal(state["amax_history"], [recorded(amax) for amax in (6.0, 3.0, 4.0, 5.0)])
