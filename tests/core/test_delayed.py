"""Delayed scaling against a plain Python loop."""

from __future__ import annotations

import functools
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
            past = max(history)
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
        seen = delayed.observe(state, scale, amax, spec)
        return seen if mode == "flax" else delayed.advance(state, seen)

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


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-30, 0.3, 1.0, 1.0625, 1.1249999, 448.0, 3e38])
def test_one_observation_is_read_back_exactly(amax):
    _, seen = emitted(amax)
    assert float(delayed.largest(seen)) == np.float32(amax)


def emitted(amax, history=0.0):
    spec = DelayedSpec(LENGTH)
    state = delayed.initial_state(spec) | {"amax_history": jnp.full((LENGTH,), history)}
    scale = delayed.current_scale(state, jnp.float32(amax), E4M3, spec)
    return state, delayed.observe(state, scale, jnp.float32(amax), spec)


def test_bins_are_one_hot_and_finite():
    for amax in (0.0, 3.5, 1e-30, 1e30, math.inf, math.nan):
        _, new = emitted(amax)
        amaxes = new["amax_bins"][:, : delayed.NON_FINITE_BIN + 1]
        assert float(amaxes[0].sum()) == 1
        assert ((amaxes > 0).sum(axis=1) == 1).all()
        assert jnp.isfinite(new["amax_bins"]).all()


@pytest.mark.parametrize(
    ("amaxes", "weights", "low", "high"),
    [
        ([3.5], [1], 3.5, 3.5),
        ([3.5, 3.5], [0.5, 0.5], 3.5, 3.5),
        ([1.01, 1.12], [0.5, 0.5], 1.12, 1.125),  # one bin
        ([1.01, 1.12], [1, 1], 1.12, 1.125),
        ([1.01, 1.12, 9.3, 9.3, 9.3], [0.5, 0.5, 0.1, 0.3, 0.9], 9.3, 9.3),
        ([1.0, 9.0, 0.1], [0.2, 0.1, 0.7], 9.0, 9.0),
        ([1.0, 9.1, 9.1, 0.1], [1 / 3, 1 / 7, 1 / 9, 0.7], 9.1, 9.1),
        ([9.1] * 7, [1] * 7, 9.1, 9.1),
        ([2.0, math.inf], [1, 1], 2.0, 2.0),
        ([2.0, math.nan], [0.5, 0.5], 2.0, 2.0),
        ([1e30, 3e30], [1, 1], 3e30, 3e30),
        ([0.0, 0.0], [1, 1], 0.0, 0.0),
        ([math.inf], [1], 7.0, 7.0),  # not recorded: the history stays
        ([5.0], [0], 7.0, 7.0),  # not used
    ],
)
def test_combined_uses_record_the_maximum(amaxes, weights, low, high):
    states, each = zip(*(emitted(amax, history=7.0) for amax in amaxes), strict=True)
    seen = jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *each)
    new = delayed.advance(states[0], seen)
    assert np.float32(low) <= float(new["amax_history"][0]) <= np.float32(high)
    np.testing.assert_array_equal(new["amax_history"][1:], 7.0)
    expected = 7.0 / 448 if sum(weights) else 1.0  # an unused state keeps its scale, which was 1
    np.testing.assert_allclose(new["scale"], expected, rtol=2e-7)
    assert not new["amax_bins"].any()


@pytest.mark.parametrize("mode", ["warmup", "flax"])
def test_the_larger_of_two_observations_loses_no_bit(mode):
    spec = DelayedSpec(LENGTH, amax_init=mode)
    state = delayed.initial_state(spec) | {"amax_history": jnp.arange(4.0)}
    scale = delayed.current_scale(state, jnp.float32(0), E4M3, spec)
    seen = [delayed.observe(state, scale, jnp.float32(amax), spec) for amax in (1.01, 1.12, 1.11)]
    nothing = jax.tree.map(jnp.zeros_like, seen[0])
    total = functools.reduce(delayed.larger, seen, nothing)
    for name, value in total.items():
        np.testing.assert_array_equal(value, seen[1][name])
    if mode == "warmup":
        poisoned = delayed.larger(total, delayed.observe(state, scale, jnp.float32(math.inf), spec))
        assert float(delayed.largest(poisoned)) == np.float32(1.12)


@pytest.mark.parametrize("amax", [math.inf, math.nan])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_non_finite_micro_batch_leaves_the_scale_of_the_big_batch_in_any_order(amax, order):
    state, seen = emitted(amax, history=7.0)  # its scale is 1 before the step
    nothing = jax.tree.map(jnp.zeros_like, seen)
    big = delayed.advance(state, seen)
    np.testing.assert_allclose(big["scale"], 7.0 / 448, rtol=2e-7)
    total = delayed.larger(*((nothing, seen)[place] for place in order))
    jax.tree.map(np.testing.assert_array_equal, delayed.advance(state, total), big)
    # One with a finite amax goes before both.
    _, finite = emitted(2.0, history=7.0)
    total = delayed.larger(*((finite, total)[place] for place in order))
    jax.tree.map(np.testing.assert_array_equal, delayed.advance(state, total), delayed.advance(state, finite))


@pytest.mark.parametrize("amax", [1e-30, 1e-36, 1e-38, 0.0])
def test_a_scale_never_flushes_to_zero(amax):
    state, seen = emitted(amax, history=amax)
    assert float(delayed.advance(state, seen)["scale"][0]) == 1.0
