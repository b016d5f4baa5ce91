"""Experts, grouped matmuls and convolutions on AQT and Qwix: the library's own, native's where it was left open."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import ops
from jaxquant.config.quant_config import QuantConfig
from tests.trace.functions import normal

SIZES = jnp.array([5, 0, 4])
PARAMS = {"experts": normal(0, 3, 8, 6), "filter": {"kernel": normal(1, 3, 6, 4)}, "last": {"kernel": normal(2, 4, 5)}}
X = normal(3, 12, 8)


def grouped(p, x):
    return jax.lax.ragged_dot(x, p["experts"], SIZES)


def model(p, x):
    """Experts, a convolution and a matmul."""
    rows = jnp.tanh(grouped(p, x)).reshape(2, 6, 6)
    numbers = ("NWC", "WIO", "NWC")
    rows = jax.lax.conv_general_dilated(rows, p["filter"]["kernel"], (1,), "SAME", dimension_numbers=numbers)
    return jnp.tanh(rows) @ p["last"]["kernel"]


def recipe_of(config):
    recipe = QuantConfig.from_any(config).recipe()
    assert recipe is not None
    return recipe


@pytest.mark.parametrize("string", ["int8", "fp8_full", "fp8_e4m3", "aqt_fp8"])
def test_auto_leaves_no_contraction_in_float(string):
    quantized = jaxquant.quantize(model, {"quantization": string})
    assert [row.recipe for row in quantized.report(PARAMS, X)] == [string] * 3


def test_what_the_library_lacks_is_natives_op_to_the_bit():
    config = {"quantization": "aqt_fp8"}
    quantized = jaxquant.quantize(lambda p, x: grouped({"experts": p["w"]["kernel"]}, x), config)
    params = {"w": {"kernel": PARAMS["experts"]}}
    expected = ops.ragged_dot(X, PARAMS["experts"], SIZES, recipe=recipe_of(config))
    np.testing.assert_array_equal(quantized(params, {}, X), expected)


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_a_backend_that_was_asked_for_is_not_left(backend):
    rows = jaxquant.quantize(model, {"quantization": "int8", "quant_backend": backend}).report(PARAMS, X).rows
    assert [row.recipe for row in rows] == [None, None, "int8"]
    assert all("use quant_backend 'native'" in row.reason for row in rows[:2])
    rules = [{"path": "experts", "recipe": "int8"}]
    with pytest.raises(NotImplementedError, match=r"rule 'experts' at 'experts': .*ragged_dot"):
        jaxquant.quantize(model, {"quantization": "int8", "quant_backend": backend, "rules": rules}).init(PARAMS, X)


@pytest.mark.parametrize("string", ["fp8_full", "fp8_e4m3"])
def test_nothing_behind_the_last_group_reaches_a_number(string):
    q, grad = jaxquant.quantize(grouped, {"quantization": string}), normal(4, 12, 6)

    @jax.jit
    def run(x, grad):
        out, pull = jax.vjp(lambda p, x: q(p, {}, x), {"experts": PARAMS["experts"]}, x)
        return out, *jax.tree.leaves(pull(grad))

    expected = run(X, grad)
    for value in (jnp.nan, 1e4):
        for found, each in zip(run(X.at[9:].set(value), grad.at[9:].set(value)), expected, strict=True):
            np.testing.assert_array_equal(found, each)


def test_auto_computes_experts_natively_each_by_itself():
    """One whose weights are small keeps them, beside large ones."""
    p = {"experts": PARAMS["experts"].at[2].multiply(1e-6)}
    q = jaxquant.quantize(grouped, {"quantization": "fp8_e4m3"})
    assert [row.backend for row in q.report(p, X)] == ["native"]
    found, exact = q(p, {}, X)[5:9], grouped(p, X)[5:9]
    assert jnp.linalg.norm(found - exact) < 0.05 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_each_expert_is_quantized_by_itself(backend):
    """As under vmap, forward and backward, with a weight on either side; noise of no stream differs by step."""
    q = jaxquant.quantize(
        lambda p, x: jnp.einsum("efd,ebd->ebf", p["w"], x), {"quantization": "int8", "quant_backend": backend}
    )
    alone = jaxquant.quantize(lambda p, x: x @ p["w"].T, {"quantization": "int8", "quant_backend": backend})
    p, x = {"w": normal(0, 3, 4, 8)}, normal(1, 3, 5, 8)
    out = jax.jit(q)(p, {}, x)
    for expert in range(3):
        expected = jax.jit(alone)({"w": p["w"][expert]}, {}, x[expert])
        np.testing.assert_allclose(out[expert], expected, rtol=1e-6, atol=1e-6)
    grad = jax.jit(jax.grad(lambda p, x, key=None: jnp.sum(jnp.sin(q(p, {}, x, key=key)))))
    first, again = grad(p, x), grad(p, x)
    np.testing.assert_array_equal(first["w"], again["w"])
    assert not np.array_equal(grad(p, x, key=jax.random.key(1))["w"], grad(p, x, key=jax.random.key(2))["w"])


LIBRARY_OPS = [("int8", "aqt"), ("int8", "qwix"), ("aqt_fp8", "aqt"), ("fp8_full", "qwix"), ("int8", "native")]


def loss_of(string, backend, fn=lambda p, x: jnp.tanh(x @ p["w"])):
    quantized = jaxquant.quantize(fn, {"quantization": string, "quant_backend": backend})
    return lambda p, x: jnp.sum(jnp.square(quantized(p, {}, x)))


@pytest.mark.parametrize(("string", "backend"), LIBRARY_OPS)
def test_second_derivatives_are_refused_on_every_backend(string, backend):
    p, x = {"w": normal(0, 8, 6)}, normal(1, 5, 8)
    loss = loss_of(string, backend)
    penalty = lambda p, x: jnp.sum(jnp.square(jax.grad(loss, 1)(p, x)))  # noqa: E731
    of_factor = lambda c: jnp.sum(jnp.square(jax.grad(lambda x: c * loss(p, x))(x)))  # noqa: E731
    used = [(jax.grad(penalty), (p, x)), (jax.grad(penalty, 1), (p, x)), (jax.grad(of_factor), (1.0,))]
    for run, args in used:
        with pytest.raises(NotImplementedError, match=f"second derivatives through recipe '{string}' are not defined"):
            jax.eval_shape(run, *args)
    for forward in (loss, jax.grad(loss)):
        with pytest.raises(NotImplementedError, match=r"is quantized, .* no derivative in forward mode"):
            jax.jvp(lambda x, run=forward: run(p, x), (x,), (x,))
    dropped = lambda p: loss(jax.tree.map(lambda a, b: a - jax.lax.stop_gradient(b), p, jax.grad(loss)(p, x)), x)  # noqa: E731
    assert jax.eval_shape(jax.grad(dropped), p)["w"].shape == (8, 6)


def test_second_derivatives_through_groups_are_refused():
    loss = loss_of("fp8_full", "native", lambda p, x: grouped({"experts": p["w"]}, x))
    penalty = lambda p: jnp.sum(jnp.square(jax.grad(loss, 1)(p, X)))  # noqa: E731
    with pytest.raises(NotImplementedError, match="second derivatives through recipe 'fp8_full'"):
        jax.eval_shape(jax.grad(penalty), {"w": PARAMS["experts"]})


@pytest.mark.parametrize(("string", "backend"), LIBRARY_OPS)
def test_no_rows_give_no_rows_and_a_gradient_of_zeros(string, backend):
    p, x = {"w": normal(0, 8, 6)}, normal(1, 5, 8)[:0]
    config = {"quantization": string, "quant_backend": backend}
    q = jaxquant.quantize(lambda p, x: x @ p["w"], config)
    assert q(p, {}, x).shape == (0, 6)
    dp, dx = jax.grad(lambda p, x: q(p, {}, x).sum(), (0, 1))(p, x)
    assert dx.shape == (0, 8)
    np.testing.assert_array_equal(dp["w"], jnp.zeros((8, 6)))
    x = jnp.zeros((3, 0))
    np.testing.assert_array_equal(q({"w": p["w"][:0]}, {}, x), jnp.zeros((3, 6)))


@pytest.mark.parametrize("backend", ["aqt", "qwix"])
def test_no_rows_meet_a_converted_kernel(backend):
    config, model, x = {"quantization": "int8", "quant_backend": backend}, nn.Dense(6), normal(1, 5, 8)
    served = jaxquant.convert(model.init(jax.random.key(0), x), config, x, model=model)
    run = jaxquant.maybe_quantize_model(model, config | {"checkpoint_is_quantized": True}, x)
    assert run.apply(served, x[:0]).shape == (0, 6)
