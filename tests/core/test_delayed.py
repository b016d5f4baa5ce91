"""Delayed scaling against a plain Python loop."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.core import delayed
from jaxquant.core.dtypes import ELEMENTS
from jaxquant.core.recipe import DelayedSpec

LENGTH = 4
E4M3 = ELEMENTS["float8_e4m3fn"]
AMAXES = [0.0, 3.0, 0.5, 0.25, math.inf, 7.0, 0.0, math.nan, 1.0, 1.0, 1.0, 1.0, 2.0, 1e-9, 1e5, 2.0]


def loop(mode: str, margin: int = 0):
    """The rule in Python: yields (scale, history) for each step."""
    scale, history = np.float32(1), [np.float32(0)] * LENGTH
    for amax in map(np.float32, AMAXES):
        if mode == "flax":
            past = max(history, key=lambda v: (math.isnan(v), v))
            if math.isfinite(past) and past > 0:
                scale = np.float32(1) / (np.float32(448) / past / np.float32(2.0**margin))
            recorded = True
        else:
            past = max(history) or amax
            if math.isfinite(past) and past > 0:
                scale = past * np.float32(2.0**margin / 448)
            recorded = math.isfinite(amax)
        if recorded:
            history = [amax, *history[2:], history[0]]
        yield scale, list(history)


@pytest.mark.parametrize("mode", ["warmup", "flax"])
@pytest.mark.parametrize("margin", [0, 2])
def test_sixteen_steps_are_those_of_a_python_loop(mode, margin):
    spec = DelayedSpec(LENGTH, margin, mode)
    state = delayed.initial_state(spec)

    @jax.jit
    def step(state, amax):
        scale = delayed.current_scale(state, amax, E4M3, spec)
        return delayed.next_state(state, scale, amax, spec)

    for amax, (scale, history) in zip(AMAXES, loop(mode, margin), strict=True):
        state = step(state, jnp.float32(amax))
        np.testing.assert_allclose(state["scale"][0], scale, rtol=2e-7)
        np.testing.assert_array_equal(state["amax_history"], np.asarray(history, np.float32))


def test_a_history_with_inf_from_a_flax_checkpoint_heals():
    spec = DelayedSpec(LENGTH)
    state = delayed.initial_state(spec) | {"amax_history": jnp.array([jnp.inf, 2.0, jnp.nan, 1.0])}
    scale = delayed.current_scale(state, jnp.float32(5.0), E4M3, spec)
    assert float(scale[0]) == pytest.approx(2 / 448)


@pytest.mark.parametrize("amax", [1e-30, 1e-7, 0.3, 1.0, 1.0625, 448.0, 3e38])
def test_bins_round_up_by_at_most_an_eighth(amax):
    value = float(delayed.bin_value(delayed.bin_of(jnp.float32(amax))))
    assert np.float32(amax) <= value <= np.float32(amax) * 1.125


def test_bins_are_one_hot_and_empty_for_a_non_finite_amax():
    spec = DelayedSpec(LENGTH)
    state = delayed.initial_state(spec)
    for amax, count in ((0.0, 1), (3.5, 1), (math.inf, 0), (math.nan, 0)):
        new = delayed.next_state(state, state["scale"], jnp.float32(amax), spec)
        assert float(new["amax_bins"].sum()) == count
