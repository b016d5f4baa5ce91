"""Experts, convolutions, 4 bits, edges and converted models on AQT and Qwix, completed by the native backend."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import ops
from jaxquant.config.quant_config import QuantConfig
from jaxquant.core.qtensor import dequantize, is_tensor
from tests import numerics
from tests.trace.functions import normal

SIZES = jnp.array([5, 0, 4])
PARAMS = {"experts": normal(0, 3, 8, 6), "filter": {"kernel": normal(1, 3, 6, 4)}, "last": {"kernel": normal(2, 4, 5)}}
X = normal(3, 12, 8)


def config_of(string, backend):
    return {"quantization": string, "quant_backend": backend}


def grouped(p, x):
    return jax.lax.ragged_dot(x, p["experts"], SIZES)


def model(p, x):
    """Compute experts, a convolution and a matmul."""
    rows = jnp.tanh(grouped(p, x)).reshape(2, 6, 6)
    numbers = ("NWC", "WIO", "NWC")
    rows = jax.lax.conv_general_dilated(rows, p["filter"]["kernel"], (1,), "SAME", dimension_numbers=numbers)
    return jnp.tanh(rows) @ p["last"]["kernel"]


def test_auto_leaves_no_contraction_in_float_and_what_a_library_lacks_is_natives_op_to_the_bit():
    config = {"quantization": "aqt_fp8"}
    assert [row.recipe for row in jaxquant.quantize(model, config).report(PARAMS, X)] == ["aqt_fp8"] * 3
    quantized = jaxquant.quantize(lambda p, x: grouped({"experts": p["w"]["kernel"]}, x), config)
    expected = ops.ragged_dot(X, PARAMS["experts"], SIZES, recipe=QuantConfig.from_any(config).recipe())
    np.testing.assert_array_equal(quantized({"w": {"kernel": PARAMS["experts"]}}, {}, X), expected)


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_a_backend_that_was_asked_for_is_not_left(backend):
    config = config_of("int8", backend)
    rows = jaxquant.quantize(model, config).report(PARAMS, X).rows
    assert [row.recipe for row in rows] == [None, None, "int8"]
    assert all("use quant_backend 'native'" in row.reason for row in rows[:2])
    rules = [{"path": "experts", "recipe": "int8"}]
    with pytest.raises(NotImplementedError, match=r"rule 'experts' for layer 'experts': .*ragged_dot"):
        jaxquant.quantize(model, config | {"rules": rules}).init(PARAMS, X)


def test_nothing_behind_the_last_group_reaches_a_number():
    q, grad = jaxquant.quantize(grouped, {"quantization": "fp8_full"}), normal(4, 12, 6)

    @jax.jit
    def run(x, grad):
        out, pull = jax.vjp(lambda p, x: q(p, {}, x), {"experts": PARAMS["experts"]}, x)
        return out, *jax.tree.leaves(pull(grad))

    expected = run(X, grad)
    for value in (jnp.nan, 1e4):
        for found, each in zip(run(X.at[9:].set(value), grad.at[9:].set(value)), expected, strict=True):
            np.testing.assert_array_equal(found, each)


@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_4_bits_on_qwix_compile_for_cpus_and_convert(name):
    """XLA:CPU fails on 4-bit operands that need no reshape."""
    x, params = normal(0, 8, 32), {"w": normal(1, 32, 16)}
    q = jaxquant.quantize(lambda p, x: x @ p["w"], config_of(name, "qwix"))
    assert [row.recipe for row in q.report(params, x).rows] == [name]
    grads = jax.jit(jax.grad(lambda p, x: jnp.sum(q(p, {}, x) ** 2), argnums=(0, 1)))(params, x)
    exact = jax.grad(lambda p, x: jnp.sum((x @ p["w"]) ** 2), argnums=(0, 1))(params, x)
    for found, want in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(found - want) < 0.5 * np.linalg.norm(want)
    np.testing.assert_array_equal(jax.jit(q)(q.convert(params, {}, x), {}, x), jax.jit(q)(params, {}, x))


@pytest.mark.parametrize(("string", "backend"), [("int8", "aqt"), ("fp8_full", "qwix"), ("int8", "native")])
def test_second_derivatives_are_refused_and_no_rows_give_no_rows(string, backend):
    p, x = {"w": normal(0, 8, 6)}, normal(1, 5, 8)
    q = jaxquant.quantize(lambda p, x: x @ p["w"], config_of(string, backend))
    loss = lambda p, x: jnp.sum(jnp.square(jnp.tanh(q(p, {}, x))))  # noqa: E731
    penalty = lambda p, x: jnp.sum(jnp.square(jax.grad(loss, 1)(p, x)))  # noqa: E731
    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match=f"second derivatives through recipe '{string}' are not defined"):
            jax.eval_shape(jax.grad(penalty, argument), p, x)
    for forward in (loss, jax.grad(loss)):
        with pytest.raises(NotImplementedError, match=r"is quantized, .* no derivative in forward mode"):
            jax.jvp(lambda x, run=forward: run(p, x), (x,), (x,))
    dropped = lambda p: loss(jax.tree.map(lambda a, b: a - jax.lax.stop_gradient(b), p, jax.grad(loss)(p, x)), x)  # noqa: E731
    assert jax.eval_shape(jax.grad(dropped), p)["w"].shape == (8, 6)

    assert q(p, {}, x[:0]).shape == (0, 6)
    dp, dx = jax.grad(lambda p, x: q(p, {}, x).sum(), (0, 1))(p, x[:0])
    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dp["w"], jnp.zeros((8, 6)))
    np.testing.assert_array_equal(q({"w": p["w"][:0]}, {}, jnp.zeros((3, 0))), jnp.zeros((3, 6)))


class Converted(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(24)(x)
        return nn.Einsum((24, 2, 8), "bk,khd->bhd", use_bias=False)(x)


@pytest.mark.parametrize(("string", "backend"), [("int8", "aqt"), ("fp8_full", "qwix")])  # native: test_edges.py
def test_the_input_gradient_of_a_converted_model_is_that_of_the_dequantized_one(string, backend):
    config, plain = config_of(string, backend), Converted()
    served = jaxquant.convert(plain, plain.init(jax.random.key(1), X), config, X)
    run = jaxquant.maybe_quantize_model(plain, config | {"checkpoint_is_quantized": True}, X)
    gradient = jax.jit(jax.grad(lambda x: run.apply(served, x).sum()))(X)
    floats = jax.tree.map(lambda leaf: dequantize(leaf) if is_tensor(leaf) else leaf, served, is_leaf=is_tensor)
    exact = jax.grad(lambda x: plain.apply(floats, x).sum())(X)
    np.testing.assert_allclose(gradient, exact, rtol=numerics.SMALL_SUM_RTOL, atol=numerics.SMALL_SUM_ATOL)
    assert run.apply(served, X[:0]).shape == (0, 2, 8)
