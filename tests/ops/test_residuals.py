"""compress_residuals: exact results, gradients at the rounded arguments, one saved byte per element."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant
from jaxquant.audit.cost import saved_for_backward

OPTIMIZED = False


def gate(a, b):
    return nn.silu(a) * b


def rounded(x, group):
    """Round each group of the last axis to e4m3 with the group's scale, in numpy."""
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


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"argnums has 2, but .* got 2 arguments; count from 0"):
        jaxquant.compress_residuals(gate, (0, 2))(jnp.ones(16), jnp.ones(16))
    with pytest.raises(TypeError, match="as keyword arguments; pass arrays by position, and bind other arguments with"):
        jaxquant.compress_residuals(gate)(jnp.ones(16), b=jnp.ones(16))
    compressed = jaxquant.compress_residuals(lambda x: x**3)
    with pytest.raises(NotImplementedError, match=r"second derivatives through .*compress_residuals"):
        jax.grad(lambda x: jax.grad(lambda x: compressed(x).sum())(x).sum())(jnp.ones(16))
