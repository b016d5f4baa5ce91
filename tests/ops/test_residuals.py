"""compress_residuals: exact results, gradients at the rounded arguments, one byte an element kept."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant
from jaxquant.audit.cost import saved_for_backward
from train import model

OPTIMIZED = False


def gate(a, b):
    return nn.silu(a) * b


def rounded(x, group):
    """Round each group of the last axis to e4m3 by its own scale, in numpy."""
    x = np.asarray(x, np.float32)
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(448)
    scale = np.where(scale == 0, np.float32(1), scale)
    return ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).reshape(x.shape)


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(("size", "group"), [(256, 128), (200, 100), (131, 131)])
def test_gradients_are_those_at_the_rounded_arguments(size, group):
    a, b, pull = normal(0, 6, size) * 30, normal(1, 6, size), normal(2, 6, size)
    compressed = jaxquant.compress_residuals(gate, argnums=(0, 1))
    out, backward = jax.vjp(compressed, a, b)
    np.testing.assert_array_equal(out, gate(a, b))
    expected = jax.vjp(gate, rounded(a, group), rounded(b, group))[1](pull)
    for found, wanted, plain in zip(backward(pull), expected, jax.vjp(gate, a, b)[1](pull), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert 0.005 < np.linalg.norm(found - plain) / np.linalg.norm(plain) < 0.05


def test_small_arrays_integers_and_scalars_are_kept_as_they_are():
    def function(tree, factor):
        return tree["x"] ** 2 * tree["places"][:, None] * factor

    tree = {"x": normal(0, 4, 8), "places": jnp.arange(4)}
    compressed = jaxquant.compress_residuals(function, argnums=(0, -1))
    (found, _), (plain, _) = (
        jax.grad(lambda tree, factor, f=f: f(tree, factor).sum(), (0, 1), allow_int=True)(tree, 3.0)
        for f in (compressed, function)
    )
    np.testing.assert_array_equal(found["x"], plain["x"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_kept_takes_a_byte_an_element(dtype):
    a, b = normal(0, 64, 384, dtype=dtype), normal(1, 64, 384, dtype=dtype)
    compressed = jaxquant.compress_residuals(gate, argnums=(0, 1))
    kept = saved_for_backward(lambda a, b: compressed(2 * a, 2 * b), a, b)
    assert kept == {"float8_e4m3fn": 2 * 64 * 384, "float32": 2 * 64 * 3 * 4}
    assert {x.dtype.name for x in jax.grad(lambda a, b: compressed(a, b).sum(), (0, 1))(a, b)} == {dtype}


def test_groups_of_zeros_and_of_what_is_not_finite_keep_to_themselves():
    x = normal(0, 2, 256).at[0, 5].set(jnp.inf).at[1, 130].set(jnp.nan).at[1, :128].set(0)
    found = jax.grad(lambda x: jaxquant.compress_residuals(lambda x: x**2)(x).sum())(x)
    expected = np.isfinite(np.asarray(x).reshape(2, 2, 128)).all(-1)
    np.testing.assert_array_equal(np.isfinite(found.reshape(2, 2, 128)).all(-1), expected)
    np.testing.assert_array_equal(found[1, :128], 0)


def test_transformations_change_nothing():
    a, b = normal(0, 8, 4, 128), normal(1, 8, 4, 128)
    slopes = jax.grad(lambda a, b: jaxquant.compress_residuals(gate, (0, 1))(a, b).sum(), (0, 1))
    expected = jax.jit(slopes)(a, b)
    looped = lambda a, b: jax.lax.map(lambda each: slopes(*each), (a, b))  # noqa: E731
    for run in (jax.vmap(slopes), looped):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), jax.jit(run)(a, b), expected)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="argnums has 2"):
        jaxquant.compress_residuals(gate, (0, 2))(jnp.ones(16), jnp.ones(16))
    with pytest.raises(TypeError, match="pass arguments by position"):
        jaxquant.compress_residuals(gate)(jnp.ones(16), b=jnp.ones(16))
    compressed = jaxquant.compress_residuals(lambda x: x**3)
    with pytest.raises(NotImplementedError, match=r"second derivatives through .*compress_residuals"):
        jax.grad(lambda x: jax.grad(lambda x: compressed(x).sum())(x).sum())(jnp.ones(16))


# e4m3 is off by 2^-4 of a number at most, here through two layers; a gradient that crosses a boundary of e5m2 moves by
# 2^-2 of itself.
@pytest.mark.slow
def test_a_decoder_keeps_norms_and_gates_in_fp8():
    """The loss is the same to the bit; gradients are near; and every matmul is reported as before."""
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    found = {}
    for saved in ("full", "fp8"):
        config = model.DecoderConfig(64, 32, 64, 2, 2, 1, 16, dtype="bfloat16", saved_activations=saved)
        decoder = jaxquant.maybe_quantize_model(model.Decoder(config), "fp8", tokens)
        variables = jax.jit(decoder.init)({"params": jax.random.key(1)}, tokens)

        def loss(variables, decoder=decoder):
            return decoder.apply(variables, tokens, targets=tokens).mean()

        value, grads = jax.jit(jax.value_and_grad(loss))(variables)
        rows = [
            (row.path, row.matmul, row.dtypes, row.fault) for row in jaxquant.coverage(jax.grad(loss), variables).rows
        ]
        found[saved] = float(value), jax.tree.leaves(grads["params"]), saved_for_backward(loss, variables), rows
    (loss, grads, kept, rows), (small_loss, small_grads, small_kept, small_rows) = found["full"], found["fp8"]
    assert small_loss == loss
    assert small_rows == rows
    assert sum(small_kept.values()) < 0.75 * sum(kept.values())
    for a, b in zip(grads, small_grads, strict=True):
        assert 0 < np.linalg.norm(a - b) <= 2.0**-2 * np.linalg.norm(a)
