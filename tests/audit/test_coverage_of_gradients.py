"""Coverage of gradients: it lists only the needed ones, and strict requires both gradients of every quantized layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant
from tests.models import chain

X = jnp.ones((8, 32))
INT8 = {"quantization": "int8", "quant_backend": "native"}
A, B = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)
linear = functools.partial(nnx.Linear, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
WIDTHS = {"a": (32, 48), "b": (48, 40)}


class Two(nnx.Module):
    """Two layers; ``call_b`` calls the second one."""

    def __init__(self, call_b=lambda b, h: b(h)):
        for name, (k, n) in WIDTHS.items():
            setattr(self, name, linear(k, n))
        self.call_b = call_b

    def __call__(self, x):
        return self.call_b(self.b, nnx.relu(self.a(x)))


def found_in(model, backend="native", frozen="", x_is_trained=True):
    """Return the coverage of the loss and gradients of an int8 model, without the gradients of a frozen layer."""
    config = INT8 | {"quant_backend": backend}
    graph, frozen_params, params, rest = nnx.split(
        jaxquant.maybe_quantize_model(model, config, X),
        lambda path, value: isinstance(value, nnx.Param) and bool(frozen) and frozen in path,
        nnx.Param,
        ...,
    )

    def loss(params, x):
        return jnp.sum(jnp.square(nnx.merge(graph, frozen_params, params, rest)(x)))

    step = jax.value_and_grad(loss, argnums=(0, 1) if x_is_trained else 0)
    return jaxquant.coverage(step, params, X)


def with_gradients(change, b, h):
    """Call a layer, and replace the gradients of its kernel and its input with the results of ``change``."""
    graph, state = nnx.split(b)

    def plain(state, h):
        return nnx.merge(graph, state)(h)

    call = jax.custom_vjp(plain)

    def backward(residuals, grad):
        pull, h = residuals
        d_state, dh = pull(grad)
        [kernel] = [leaf for leaf in jax.tree.leaves(d_state) if leaf.shape == WIDTHS["b"]]
        d_kernel, dh = change(h, grad, kernel, dh)
        return jax.tree.map(lambda leaf: d_kernel if leaf is kernel else leaf, d_state), dh

    def forward(state, h):
        out, pull = jax.vjp(plain, state, h)
        return out, (pull, h)

    call.defvjp(forward, backward)
    return call(state, h)


def stolen(change):
    return Two(functools.partial(with_gradients, change))


# -- float gradients instead of gradients with the recipe --------------------------------------------------------------


def test_a_gradient_that_is_float_or_has_no_matmul_is_missing():
    """The recipe requires a quantized gradient. A float gradient of the layer's own activation belongs to the layer."""
    found = found_in(stolen(lambda h, grad, dk, dh: ((3 * h).T @ (2 * grad), dh)))
    [row] = [row for row in found.rows if row.path == ""]
    assert (row.dtypes.is_low, row.reason) == (False, "no parameter: activation × activation")
    assert found.missing == ("b drhs",)
    with pytest.raises(ValueError, match="strict: b drhs: this matmul of the config is not in the program"):
        found.check()
    found = found_in(stolen(lambda h, grad, dk, dh: (jnp.sum(h[:, :, None] * grad[:, None, :], 0), dh)), "qwix")
    assert found.missing == ("b drhs",)
    assert found_in(stolen(lambda h, grad, dk, dh: (dk, jnp.zeros_like(dh)))).missing == ("b dlhs",)
    with pytest.raises(ValueError, match=r"strict: b drhs: int8 × int8 is expected .* float32 × float32 was found"):
        found_in(stolen(lambda h, grad, dk, dh: (h.T @ grad, dh))).check()


class Three(nnx.Module):
    """Three layers with the same input and the same shape."""

    def __init__(self):
        for name in "abc":
            setattr(self, name, linear(32, 32))

    def __call__(self, x):
        return self.a(x) * self.b(x) + self.c(x)


@pytest.mark.parametrize(("backend", "x_is_trained"), [("native", True), ("qwix", False)])
def test_layers_that_share_an_input_have_a_weight_gradient_each(backend, x_is_trained):
    found = found_in(Three(), backend, x_is_trained=x_is_trained)
    found.check()
    matmuls = ["fwd", "dlhs", "drhs"] if x_is_trained else ["fwd", "drhs"]
    assert sorted((row.path, row.matmul) for row in found.rows) == sorted((p, m) for p in "abc" for m in matmuls)


# -- additional gradients ----------------------------------------------------------------------------------------------


def test_only_the_gradients_of_what_is_trained_are_needed():
    for x_is_trained in (False, True):
        found = found_in(Two(), x_is_trained=x_is_trained)
        found.check()
        assert [row.matmul for row in found.rows if row.path == "a"].count("dlhs") == x_is_trained
    found = found_in(Two(), frozen="b")
    assert found.missing == ("b drhs",)
    found.check(without=["b drhs"])
    with pytest.raises(ValueError, match="without has 'a drhs', which is not missing; missing: b drhs"):
        found.check(without=["a drhs"])
    graph, state = nnx.split(jaxquant.maybe_quantize_model(Two(), INT8, X))
    jaxquant.coverage(lambda state, x: nnx.merge(graph, state)(x), state, X).check()  # a forward pass has no gradients


@jax.custom_vjp
def remade_attention(q, k):
    """Compute scores times k; the backward pass recomputes the scores, like flash attention."""
    return nnx.softmax(q @ k.T) @ k


def _remade_backward(residuals, grad):
    q, k = (3 * each for each in residuals)
    scores = nnx.softmax(q @ k.T)
    d_scores = scores * (grad @ k.T)
    return d_scores @ k, d_scores.T @ q + scores.T @ grad


remade_attention.defvjp(lambda q, k: (remade_attention(q, k), (q, k)), _remade_backward)


def test_gradients_of_attention_scores_are_no_fault():
    for attention in (remade_attention, jax.checkpoint(remade_attention.fun)):
        found = found_in(Two(lambda b, h, attention=attention: attention(b(h), 2 * b(h))))
        found.check()
        assert {row.reason for row in found.rows if not row.path} == {"no parameter: activation × activation"}


# -- unused results ----------------------------------------------------------------------------------------------------


def count(function):
    return len(jaxquant.coverage(function, A, B).rows)


def test_a_matmul_that_nobody_reads_is_not_listed():
    def unused_carry(a, b):
        body = lambda carry, _: ((carry[0] + 1, a @ b), None)  # noqa: E731
        return jax.lax.scan(body, (0.0, jnp.zeros((8, 4))), length=3)[0][0]

    def behind_a_barrier(a, b):
        return jax.lax.optimization_barrier((a, a @ b))[0]

    assert count(lambda a, b: (a @ b, a)[1]) == 0
    assert count(unused_carry) == 0
    assert count(behind_a_barrier) == 0


def test_a_matmul_that_decides_or_is_told_is_listed():
    def printed(a, b):
        jax.debug.print("{}", a @ b)
        return a

    def loop(a, b):
        return jax.lax.while_loop(lambda i: (a @ b)[0, 0] > i, lambda i: i + 1, 0.0)

    assert count(lambda a, b: jax.lax.cond((a @ b)[0, 0] > 0, lambda: 1.0, lambda: 2.0)) == 1
    assert count(loop) == 1
    assert count(printed) == 1


# -- gradients without a known layer -----------------------------------------------------------------------------------

FP8 = {"quantization": "fp8_current", "quant_backend": "native"}


def without_gradient_of_b(variables):
    params = variables["params"]
    return variables | {"params": params | {"b": jax.tree.map(jax.lax.stop_gradient, params["b"])}}


def found_in_dense(loss, prepare=lambda variables: variables):
    """Return the coverage of the gradients of three quantized layers, without the forward pass."""
    model = jaxquant.maybe_quantize_model(chain(a=32, b=32, c=32), FP8, X)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    step = jax.grad(lambda variables, x: loss(model.apply(prepare(variables), x)))
    return jaxquant.coverage(step, variables, X, config=FP8)


def test_gradients_of_a_sum_are_those_of_their_layers():
    """Later kernels are multiplied into the output's gradient, and the result of the last layer is unused."""
    found = found_in_dense(jnp.sum)
    found.check()
    backward = ["a drhs", "b dlhs", "b drhs", "c dlhs", "c drhs"]
    assert sorted(f"{row.path} {row.matmul}" for row in found.rows if row.matmul != "fwd") == backward


def test_gradients_of_other_layers_do_not_stand_for_one_that_is_missing():
    for loss in (jnp.sum, lambda y: jnp.sum(y**2)):
        found = found_in_dense(loss, without_gradient_of_b)
        assert found.missing == ("b drhs",)
        found.check(without=["b drhs"])


class Gated(nn.Module):
    """Kernels of mirrored shapes in one module, whose gradients have the same sizes and scopes."""

    @nn.compact
    def __call__(self, x):
        up, gate, down = (self.param(name, nn.initializers.ones, (32, 32)) for name in ("up", "gate", "down"))
        h = nn.gelu(x @ gate) * (x @ up)
        return h @ down


def test_gradients_of_one_rematerialized_module_are_told_by_their_lines():
    model = jaxquant.maybe_quantize_model(nn.remat(Gated)(), INT8, X)
    step = jax.value_and_grad(lambda variables, x: jnp.sum(jnp.square(model.apply(variables, x))), argnums=(0, 1))
    jaxquant.coverage(step, jax.eval_shape(model.init, jax.random.key(0), X), X).check()
