"""Converted parameters in traced functions: the bits of training, the kernels of ``jaxquant.convert``, and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.core.qtensor import QTensor, dequantize
from tests.serving import models
from tests.trace.functions import CURRENT, FP8, normal


def is_kernel(leaf):
    return isinstance(leaf, QTensor)


def kernels(tree):
    """Return the converted kernels of a tree by path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kernel)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if is_kernel(leaf)}


def served(fn, config, params, *args, state=None):
    """Return the quantized function and its converted parameters; check that both compute the same bits."""
    q = jaxquant.quantize(fn, config)
    state = models.filled(q.init(params, *args)) if state is None else state
    converted = q.convert(params, state, *args)
    np.testing.assert_array_equal(
        *(np.asarray(jax.jit(q)(*given, *args), np.float32) for given in ((params, state), (converted, {})))
    )
    return q, converted


def test_through_a_scan_remat_jit_a_cond_and_a_loop():
    @jax.jit
    def shuffle(w):
        return jnp.squeeze(w[None].astype(jnp.float32), 0)

    def fn(p, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ shuffle(w)), None))
        x, _ = jax.lax.scan(layer, x, p["stack"])
        x = jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, p["either"])
        return jax.lax.fori_loop(0, 2, lambda _, y: y @ p["loop"], x)

    p = {"stack": normal(0, 3, 8, 8), "loop": normal(1, 8, 8), "either": normal(2, 8, 8)}
    converted = served(fn, CURRENT | {"rules": [{"path": "either", "recipe": None}]}, p, normal(3, 4, 8))[1]
    assert set(kernels(converted)) == {"['stack']", "['loop']"}


def test_experts_are_converted_each_by_itself():
    """Test batch axes, and a scan over layers of experts; the weight is the left or the right operand."""

    def fn(p, x):
        layer = lambda x, w: (jnp.einsum("efd,ebd->ebf", w, x), None)  # noqa: E731
        x, _ = jax.lax.scan(layer, x, p["experts"])
        return jax.vmap(jnp.matmul, in_axes=(0, 2))(x, p["last"])

    p, x = {"experts": normal(0, 3, 2, 8, 8), "last": normal(1, 8, 4, 2)}, normal(2, 2, 5, 8)
    _, converted = served(fn, FP8, p, x)
    assert converted["experts"].scale.shape == (3, 2, 1, 1)
    assert converted["last"].scale.shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("fn", "kernel", "x"),
    [
        (lambda w, x: jax.lax.ragged_dot(x, w["w"], jnp.array([5, 0, 4])), normal(0, 3, 8, 6), normal(1, 10, 8)),
        (lambda w, x: jax.lax.conv(x, w["w"].transpose(2, 1, 0), (2,), "SAME"), normal(0, 3, 4, 6), normal(1, 2, 4, 7)),
    ],
    ids=["ragged_dot", "conv"],
)
def test_gradients_of_convolutions_and_ragged_matmuls(fn, kernel, x):
    """The gradients equal the gradients with the dequantized kernel."""
    q, converted = served(fn, {"quantization": "int8", "quant_backend": "native"}, {"w": kernel}, x)
    floats = {"w": dequantize(converted["w"])}
    y, back = jax.vjp(lambda x: q(converted, {}, x), x)
    _, expected = jax.vjp(lambda x: fn(floats, x), x)
    grad = normal(2, *y.shape)
    np.testing.assert_allclose(back(grad)[0], expected(grad)[0], rtol=1e-5, atol=1e-5)
    loss = lambda p: jnp.sum(q(p, {}, x))  # noqa: E731
    with pytest.raises(ValueError, match="a converted kernel, which does not train"):
        jax.grad(loss, allow_int=True)(converted)


def test_a_layer_whose_weight_stays_float_needs_its_state():
    def fn(p, x):
        return jnp.tanh(x @ (p["sum"]["a"] + p["sum"]["b"])) @ p["last"]["kernel"]

    p = {"sum": {"a": normal(0, 8, 8), "b": normal(3, 8, 8)}, "last": {"kernel": normal(1, 8, 8)}}
    q, x = jaxquant.quantize(fn, FP8), normal(2, 3, 8)
    state = q.init(p, x)
    state = jaxquant.state.update(state, jax.grad(lambda s: jnp.sum(q(p, s, x)))(state))
    with pytest.warns(UserWarning, match="leaves the weights of 1 layers in float .sum: .* pass the quant state"):
        converted = q.convert(p, state, x)
    np.testing.assert_array_equal(jax.jit(q)(converted, state, x), jax.jit(q)(p, state, x))
    with pytest.raises(ValueError, match="convert left the weight of 'sum' in float"):
        q(converted, {}, x)


def test_what_stays_float_is_said():
    def fn(p, x):
        x = jnp.concatenate([x @ w for w in jnp.split(p["fused"], 2, axis=1)], axis=1)
        x = x @ (p["base"] + p["a"] @ p["b"])
        x = (x @ p["tied"]) @ p["tied"].T
        return x @ p["last"]

    p = {name: normal(n, 8, 8) for n, name in enumerate(("fused", "base", "tied", "last"))}
    p |= {"a": normal(5, 8, 2), "b": normal(6, 2, 8)}
    q, x = jaxquant.quantize(fn, CURRENT), normal(7, 3, 8)
    text = r"fused: its weight is computed from a parameter by split; base: .* from several .* in 2 different ways"
    with pytest.warns(UserWarning, match=text):
        converted = q.convert(p, {}, x)
    assert set(kernels(converted)) == {"['last']"}
    np.testing.assert_array_equal(jax.jit(q)(converted, {}, x), jax.jit(q)(p, {}, x))
    with pytest.raises(NotImplementedError, match=r"not allow that convert leaves the weights of 3 layers in float"):
        jaxquant.quantize(fn, CURRENT | {"strict": True}).convert(p, {}, x)


HAS = r"converted kernel of float32 scales \(1, 8\), but recipe 'int8' needs float32 scales"


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda p, x: x @ p["w"] + jnp.sum(p["w"]), NotImplementedError, "converted kernel in reduce_sum, but a"),
        (lambda p, x: (x @ p["w"], p["w"]), NotImplementedError, "converted kernel in the output of the fun"),
        (lambda p, x: jax.lax.conv(x[:, :, None], p["w"][:, :, None], (1,), "VALID"), ValueError, HAS),
        (lambda p, x: x[:, :4] @ p["w"].reshape(4, 16), NotImplementedError, "does not support reshape: "),
    ],
)
def test_what_cannot_read_a_converted_kernel_is_refused(fn, error, text):
    p, x, config = {"w": normal(0, 8, 8)}, normal(1, 2, 8), {"quantization": "int8", "quant_backend": "native"}
    converted = jaxquant.quantize(lambda p, x: x @ p["w"], config).convert(p, {}, x)  # one scale a column
    with pytest.raises(error, match=text):
        jaxquant.quantize(fn, config)(converted, {}, x)


@pytest.mark.parametrize(("made", "served"), [("fp8_block", "mxfp8"), ("quartet2", "nvfp4")])
def test_a_kernel_of_another_recipe_is_refused_whose_elements_are_the_same(made, served):
    p, x = {"w": normal(0, 256, 32)}, normal(1, 4, 256)
    first, second = (jaxquant.quantize(lambda p, x: x @ p["w"], {"quantization": s}) for s in (made, served))
    with pytest.raises(ValueError, match=rf"layer 'w' has a converted kernel of .* scales .*, but recipe '{served}' n"):
        second(first.convert(p, {}, x), {}, x)


def test_a_weight_that_a_loop_changes_stays_float():
    def fn(p, x):
        return x @ p["w"] + jnp.sum(jax.lax.fori_loop(0, 3, lambda i, ws: ws[::-1], (p["w"], p["v"]))[0])

    p, x, q = {"w": normal(0, 16, 16), "v": normal(1, 16, 16)}, normal(2, 4, 16), jaxquant.quantize(fn, CURRENT)
    with pytest.warns(UserWarning, match="leaves the weights .*a loop that changes the weight"):
        served = q.convert(p, {}, x)
    assert not isinstance(served["w"], QTensor)
    np.testing.assert_array_equal(q(served, {}, x), q(p, {}, x))


def test_a_recurrent_weight_is_converted():
    def fn(p, xs):
        begin = jnp.broadcast_to(p["h"], (4, 16))
        return jax.lax.scan(lambda h, x: (jnp.tanh(x @ p["wx"] + h @ p["wh"]), None), begin, xs)[0]

    p = {"wx": normal(0, 16, 16), "wh": normal(1, 16, 16), "h": normal(2, 16)}
    config = {"quantization": "mxfp8", "quant_backend": "native", "strict": True}
    assert set(kernels(served(fn, config, p, normal(3, 5, 4, 16))[1])) == {"['wx']", "['wh']"}
