"""Noise of stochastic rounding: exact distribution, independence, and the same bits for every sharding of a tensor."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jaxquant import ops
from jaxquant.config.recipes import RECIPES
from jaxquant.core.rounding import fold, gradient_keys, noise

N = 10**6
SHAPE = (1000, 1000)


def draws(key, shape=SHAPE):
    return np.asarray(jax.jit(lambda k: noise(k, shape))(key), np.float64)


def test_a_million_draws_have_the_moments_of_the_uniform_distribution():
    u = draws(jax.random.key(3))
    assert u.min() >= 0
    assert u.max() < 1
    # Five standard errors: of the mean sqrt(1/12 / N), of the variance sqrt((1/80 - 1/144) / N).
    assert abs(u.mean() - (0.5 - 2**-25)) < 5 * np.sqrt(1 / 12 / N)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt((1 / 80 - 1 / 144) / N)
    # Every byte of the 24 bits is uniform: chi-square of 255 degrees, five standard deviations of sqrt(2 · 255).
    bits = (u * 2**24).astype(np.int64).ravel()
    for shift in (0, 8, 16):
        counts = np.bincount((bits >> shift) & 255, minlength=256)
        assert abs(((counts - N / 256) ** 2 / (N / 256)).sum() - 255) < 5 * np.sqrt(510)


def test_gradients_layers_steps_and_neighbours_are_not_correlated():
    """Keys of a step: folds by step and by layer, the two gradients of one output, and shifts."""
    key = jax.random.key(0)
    keys = [jax.random.fold_in(key, step) for step in range(3)]
    keys += [jax.random.fold_in(each, grad) for each in keys[:2] for grad in (0, 1)]
    keys += [jax.random.key(each) for each in (1, 2)]
    keys += [fold(key, 0), fold(key, 1), fold(fold(key, 0), 1), *gradient_keys(fold(key, 0))]
    found = [draws(each) - 0.5 for each in keys]
    limit = 5 / np.sqrt(N) / 12  # standard error of a mean of products of two independent numbers
    for a, b in itertools.combinations(found, 2):
        assert abs((a * b).mean()) < limit
        assert abs((a[:, 1:] * b[:, :-1]).mean()) < limit
    one = found[0]
    for shift in (1, 2, 3, 8, 128, 512):
        assert abs((one[:, shift:] * one[:, :-shift]).mean()) < 1.5 * limit
        assert abs((one[shift:] * one[:-shift]).mean()) < 1.5 * limit
    # Sums over rows and columns, as in matmuls, have the variance of independent numbers.
    for axis in (0, 1):
        variance = one.sum(axis).var() / (SHAPE[0] / 12)
        assert abs(variance - 1) < 5 * np.sqrt(2 / SHAPE[0])


def test_any_stream_of_jax_random_is_accepted():
    first, second = (draws(jax.random.key(n, impl="rbg")) for n in (0, 1))
    assert abs(((first - 0.5) * (second - 0.5)).mean()) < 5 / np.sqrt(N) / 12


@pytest.mark.parametrize("string", ["nvfp4", "int8"])
def test_no_two_batches_draw_one_noise(string):
    """The gradient of an activation depends on the activation only through the noise."""
    recipe, numbers = RECIPES[string].recipe, (((1,), (0,)), ((), ()))
    x, w, g = (jax.random.normal(jax.random.key(n), shape, "bfloat16") for n, shape in enumerate(((64, 128),) * 3))
    w, g = w.T, g[:, :64]
    run = jax.jit(lambda x: jax.vjp(lambda x: ops.dot_general(x, w, numbers, recipe=recipe), x)[1](g)[0])
    batches = (jax.random.normal(jax.random.key(n), x.shape, x.dtype) for n in range(20))
    assert len({np.asarray(run(x), np.float32).tobytes() for x in batches}) == 20
