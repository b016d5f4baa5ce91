"""Noise of stochastic rounding: exact distribution, independence, and the same bits however a tensor is cut."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ops
from jaxquant.config.recipes import RECIPES
from jaxquant.core.rounding import Seed, _drawn, content_key, digest, fold, fold_many, noise, two_keys

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
    """The keys that a step draws from: folds by step and by layer, the two gradients of one output, and shifts."""
    key = jax.random.key(0)
    keys = [jax.random.fold_in(key, step) for step in range(3)]
    keys += [jax.random.fold_in(each, grad) for each in keys[:2] for grad in (0, 1)]
    keys += [jax.random.key(each) for each in (1, 2)]
    keys += [fold(key, 0), fold(key, 1), fold(fold(key, 0), 1), *two_keys(fold(key, 0))]
    found = [draws(each) - 0.5 for each in keys]
    limit = 5 / np.sqrt(N) / 12  # of a mean of products of two independent ones
    for a, b in itertools.combinations(found, 2):
        assert abs((a * b).mean()) < limit
        assert abs((a[:, 1:] * b[:, :-1]).mean()) < limit
    one = found[0]
    for shift in (1, 2, 3, 8, 128, 512):
        assert abs((one[:, shift:] * one[:, :-shift]).mean()) < 1.5 * limit
        assert abs((one[shift:] * one[:-shift]).mean()) < 1.5 * limit
    # Sums over rows and columns, as matmuls take them, have the variance of independent numbers.
    for axis in (0, 1):
        variance = one.sum(axis).var() / (SHAPE[0] / 12)
        assert abs(variance - 1) < 5 * np.sqrt(2 / SHAPE[0])


def test_folds_are_all_different_and_a_bit_of_key_or_number_changes_half_of_theirs():
    numbers = np.arange(2**17, dtype=np.uint32)
    seeds = fold_many(jax.random.key(7), numbers)
    whole = np.asarray(seeds.first, np.uint64) << np.uint64(32) | np.asarray(seeds.second, np.uint64)
    assert len(np.unique(whole)) == len(numbers)
    assert tuple(each[5] for each in seeds) == fold(jax.random.key(7), 5)
    words = np.random.default_rng(0).integers(0, 2**32, (4096, 3), dtype=np.uint32)  # a seed and a number

    def folded(words):
        of_one = lambda first, second, number: jnp.stack(_drawn(fold(Seed(first, second), number)))  # noqa: E731
        return np.asarray(jax.vmap(of_one)(*words.T))

    base = folded(words)
    for word in range(3):
        for bit in range(32):
            flipped = words.copy()
            flipped[:, word] ^= np.uint32(1 << bit)
            changed = np.unpackbits((folded(flipped) ^ base).view(np.uint8), axis=-1)
            # Five standard errors of each of 64 bits over 4096 draws.
            assert abs(changed.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(4096)


def test_noise_can_begin_at_another_place():
    key = jax.random.key(5)
    np.testing.assert_array_equal(noise(key, (64,))[8:], noise(key, (56,), jnp.uint32(8)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_any_stream_of_jax_random_is_accepted(impl):
    first, second = (draws(jax.random.key(n, impl=impl)) for n in (0, 1))
    assert abs(((first - 0.5) * (second - 0.5)).mean()) < 5 / np.sqrt(N) / 12


def test_a_digest_changes_with_every_value_and_with_their_order():
    scales, history = jnp.linspace(0.1, 1, 64).reshape(8, 8), jnp.zeros(8).at[0].set(3.0)
    found = digest([scales, history])
    assert found == digest([scales.reshape(2, 4, 8), history])
    changed = [scales[::-1], scales.T, scales * 2, scales.at[3, 3].multiply(1 + 2**-20)]
    others = [digest([each, history]) for each in changed]
    others += [digest([scales, each]) for each in (jnp.roll(history, 1), history * 2)]
    assert len({int(found), *map(int, others)}) == 7


@pytest.mark.parametrize("string", ["nvfp4", "quartet2", "tetrajet_v2", "int8"])
def test_no_two_batches_draw_one_noise(string):
    """The gradient of an activation depends on the activation through the noise alone."""
    recipe, numbers = RECIPES[string].recipe, (((1,), (0,)), ((), ()))
    x, w, g = (jax.random.normal(jax.random.key(n), shape, "bfloat16") for n, shape in enumerate(((64, 128),) * 3))
    w, g = w.T, g[:, :64]
    run = jax.jit(lambda x: jax.vjp(lambda x: ops.dot_general(x, w, numbers, recipe=recipe), x)[1](g)[0])
    batches = (jax.random.normal(jax.random.key(n), x.shape, x.dtype) for n in range(50))
    assert len({np.asarray(run(x), np.float32).tobytes() for x in batches}) == 50


def test_gradients_that_differ_in_bfloat16_have_keys_of_their_own():
    keys = {tuple(map(int, content_key(jax.random.normal(jax.random.key(n), (8, 8), "bfloat16")))) for n in range(1000)}
    assert len(keys) == 1000
