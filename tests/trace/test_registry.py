"""Registered functions with custom derivatives, and kernels: the registered program is read and quantized."""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.trace import register_function, registry, unregister_function
from tests.trace.functions import CURRENT, FP8, layers, normal

P = {"own": {"kernel": normal(0, 8, 8)}, "last": {"kernel": normal(1, 8, 8)}}
X = normal(2, 6, 8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def own_dense(x, w, factor):
    return factor * (x @ w)


def _backward(factor, saved, g):
    x, w = saved
    return factor * 7 * (g @ w.T), factor * 7 * (x.T @ g)  # wrong on purpose, so that the test detects its use


own_dense.defvjp(lambda x, w, factor: (factor * (x @ w), (x, w)), _backward)


@jax.custom_jvp
def own_jvp(x, w):
    return x @ w


own_jvp.defjvp(lambda a, t: (a[0] @ a[1], t[0] @ a[1] + a[0] @ t[1]))


def own_kernel(x, w, out):
    out[...] = x[...] @ w[...]


def in_kernel(x, w):
    return pl.pallas_call(own_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)


def after(fn):
    """Add a quantized layer after a function of the parameter ``own``."""
    return lambda p, x: jnp.tanh(fn(x, p["own"]["kernel"])) @ p["last"]["kernel"]


FN = after(lambda x, w: own_dense(x, w, 2.0))
PLAIN = after(lambda x, w: 2.0 * (x @ w))


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def gradients(fn, params, config):
    quantized = jaxquant.quantize(fn, config)
    state = quantized.init(params, X)
    loss = lambda p, s, x: jnp.sum(jnp.square(quantized(p, s, x)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(params, state, X)


def test_a_function_that_is_read_itself_is_quantized_as_a_plain_one():
    register_function(own_dense)
    assert set(layers(FN, P, X, config=FP8).values()) == {"fp8"}
    found, plain = (gradients(jax.checkpoint(fn), P, FP8) for fn in (FN, PLAIN))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, plain))


@pytest.mark.parametrize(("fn", "name"), [(in_kernel, "own_kernel"), (own_jvp, own_jvp)])
def test_kernels_and_forward_derivatives(fn, name):
    register_function(name, lambda x, w: x @ w)
    assert set(layers(after(fn), P, X).values()) == {"fp8_current"}
    plain = gradients(after(lambda x, w: x @ w), P, CURRENT)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradients(after(fn), P, CURRENT), plain))


def test_what_stays_in_float_keeps_its_own_derivative():
    register_function(own_dense)
    config = CURRENT | {"rules": [{"path": "own", "recipe": None}]}
    ours, plain = gradients(FN, P, config)[1][0], gradients(PLAIN, P, config)[1][0]
    np.testing.assert_allclose(ours["own"]["kernel"], 7 * plain["own"]["kernel"], rtol=1e-5)


def test_a_converted_kernel_runs_in_it():
    register_function(own_dense)
    quantized = jaxquant.quantize(FN, CURRENT)
    converted = quantized.convert(P, {}, X)
    assert {type(leaf["kernel"]).__name__ for leaf in converted.values()} == {"QTensor"}
    assert np.array_equal(quantized(converted, {}, X), quantized(P, {}, X))


def test_what_does_not_fit_and_what_cannot_be_registered():
    register_function("own_dense", lambda x, w: (x @ w)[:3])
    with pytest.raises(ValueError, match=r"'own_dense' returns float32\[3,8\] for float32\[6,8\]"):
        jaxquant.quantize(FN, CURRENT).report(P, X)
    unregister_function("own_dense")
    assert "inside custom_vjp_call" in layers(FN, P, X)["own"]
    register_function(own_dense)
    with pytest.raises(ValueError, match=r"'own_dense at .*' is already registered; call jaxquant"):
        register_function(own_dense)
    with pytest.raises(TypeError, match=r"takes a jax.custom_vjp or jax.custom_jvp function, or a name, got"):
        register_function(in_kernel)
    factor = 2.0

    def within(x, w):
        return (x @ w) * factor

    with pytest.raises(ValueError, match="is a closure"):
        register_function(jax.custom_vjp(within), lambda x, w: (x @ w) * 2.0)


def repeat(times, x, w):
    """Compute two layers with the same weight."""
    step = lambda carry, _: ((jnp.tanh(times(carry[0], w)), carry[1] + 1), None)  # noqa: E731
    return jax.lax.scan(step, (x, 0), None, length=2)[0]


def test_a_wrapped_function_is_opened_by_the_name_in_the_report():
    """Equinox wraps functions so: a tuple of arrays, static arguments, a jit, one name for all functions."""

    def fn_wrapped(static, arrays):
        return jax.jit(functools.partial(repeat, *static))(*arrays)

    own = jax.custom_vjp(fn_wrapped, nondiff_argnums=(0,))
    own.defvjp(lambda static, arrays: (own(static, arrays), arrays), lambda static, arrays, g: (arrays,))
    fn = after(lambda x, w: own((jnp.matmul,), (x, w))[0])
    plain = after(lambda x, w: jax.jit(functools.partial(repeat, jnp.matmul))(x, w)[0])
    assert "of 'fn_wrapped'" in layers(fn, P, X)["own"]
    register_function("fn_wrapped")
    assert set(layers(fn, P, X).values()) == {"fp8_current"}
    assert jax.tree.all(jax.tree.map(np.array_equal, gradients(fn, P, CURRENT), gradients(plain, P, CURRENT)))
