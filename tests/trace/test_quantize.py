"""``jaxquant.quantize``: state, caching, decisions, trees of every kind, and errors."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant.state.table import make_state
from tests.numerics import FLOAT32_EPS
from tests.states import nested
from tests.trace.functions import CURRENT, FP8, float8_dots, normal, shape

SQUARE = shape(8, 8)
X = shape(6, 8)


def encode(p, x):
    return jax.nn.relu(x @ p["enc"]["kernel"])


def decode(p, x):
    return jax.nn.log_softmax(encode(p, x) @ p["dec"]["kernel"])


PARAMS = {"enc": {"kernel": SQUARE}, "dec": {"kernel": SQUARE}}


def counted(fn):
    """Return a function and a counter of its traces."""
    calls = []

    def wrapped(*args):
        calls.append(1)
        return fn(*args)

    return wrapped, calls


def test_a_second_call_does_not_retrace():
    fn, calls = counted(lambda p, x, n: n * (x @ p["w"]))
    q = jaxquant.quantize(fn, CURRENT)
    p, x = {"w": normal(0, 8, 8)}, normal(1, 6, 8)
    first = q(p, {}, x, 2.0)
    assert len(calls) == 1
    np.testing.assert_array_equal(q(p, {}, x, 4.0), 2 * first)
    assert len(calls) == 1
    loss = lambda p: jnp.sum(q(p, {}, x, 2.0))  # noqa: E731
    jax.eval_shape(jax.grad(loss), p)
    jax.eval_shape(jax.grad(loss), p)
    assert len(calls) == 1
    q(p, {}, x[:3], 2.0)
    assert len(calls) == 2


def test_decisions_are_those_of_the_whole_model():
    """A layer before a softmax is a head if it is called separately; in the model, another layer follows."""
    whole = jaxquant.quantize(decode, FP8)
    state = jax.eval_shape(whole.init, PARAMS, X)
    assert set(nested(state)) == {"enc"}
    part = lambda p, x: jax.nn.softmax(x @ p["enc"]["kernel"])  # noqa: E731
    assert jaxquant.quantize(part, FP8).report(PARAMS, X).quantized == []
    shared = jaxquant.quantize(part, FP8, like=whole)
    assert [row.recipe for row in shared.report(PARAMS, X)] == ["fp8"]
    assert float8_dots(shared, PARAMS, state, X) == 1
    # The part is called with the state of the whole model.
    assert jax.tree.structure(jax.eval_shape(shared.init, PARAMS, X)) == jax.tree.structure(state)


def test_stale_decisions_are_an_error():
    q = jaxquant.quantize(lambda p, x, deep: decode(p, x) if deep else encode(p, x), CURRENT)
    jax.eval_shape(lambda p, x: q(p, {}, x, False), PARAMS, X)  # without init, the first call decides
    with pytest.raises(ValueError, match="call init first, with arguments that run all layers, or call jaxquant"):
        jax.eval_shape(lambda p, x: q(p, {}, x, True), PARAMS, X)
    with pytest.raises(ValueError, match=r"passed as like has no recipes yet; call like\.init first"):
        jaxquant.quantize(decode, CURRENT, like=jaxquant.quantize(encode, CURRENT)).init(PARAMS, X)
    with pytest.raises(ValueError, match="'fp8' but the function that was passed as like= has 'fp8_current'; pass"):
        jaxquant.quantize(decode, FP8, like=jaxquant.quantize(encode, CURRENT))


def test_state_that_is_missing_or_of_another_layout():
    def stacked(p, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"]["kernel"])[0]

    def one(p, x):
        return x @ p["w"]["kernel"][0]

    p = {"w": {"kernel": shape(3, 8, 8)}}
    q = jaxquant.quantize(stacked, FP8)
    state = jax.eval_shape(q.init, p, X)
    with pytest.raises(ValueError, match=r"'fp8' of layer 'w' needs quant state, but quant_state has no 'input_\w+'"):
        jax.eval_shape(q, p, {}, X)
    rows = jaxquant.state.rows_of(state)
    rows["w/input"] |= {"scale": shape(4, 1)}
    with pytest.raises(ValueError, match=r"scale' of shape \(4, 1\) for layer 'w', but this call needs shape \(3, 1\)"):
        jax.eval_shape(q, p, make_state(rows), X)
    with pytest.raises(ValueError, match="'w' runs outside of scans here, but its quant state is for a layer that"):
        jax.eval_shape(jaxquant.quantize(one, FP8, like=q), p, state, X)


class Pair(NamedTuple):
    weight: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    kernel: Any
    activation: Any


def test_trees_of_every_kind_and_leaves_that_are_no_arrays():
    """Modules whose leaves include functions and flags, like Equinox modules."""
    params = {
        "layers": [Pair(SQUARE, shape(8)), Linear(SQUARE, jnp.tanh)],
        "head": (SQUARE, None),
        "name": "net",
        "scale": 2.0,
    }

    def fn(params, x, train, extra):
        first, second = params["layers"]
        x = second.activation((x @ first.weight + first.bias) @ second.kernel) * params["scale"]
        assert params["name"] == "net"
        return {"out": x @ params["head"][0] if train else x, "extra": extra["n"] + 1, "none": None}

    q = jaxquant.quantize(fn, FP8)
    given = (X, True, {"n": shape()})
    report = jaxquant.quantize(fn, CURRENT).report(params, *given)
    assert [row.path for row in report.quantized] == ["layers/0", "layers/1", "head/0"]
    arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape) if hasattr(leaf, "shape") else leaf, (params, given))
    params, given = arrays
    state = q.init(params, *given)
    out = jax.eval_shape(lambda x: q(params, state, x, *given[1:]), given[0])
    assert (out["out"].shape, out["extra"].shape, out["none"]) == ((6, 8), (), None)
    assert q(params, state, given[0], False, {"n": 1})["extra"] == 2


def test_a_layer_that_is_probably_the_head_is_marked():
    params, tokens = {"table": shape(50, 32), "up": shape(32, 64), "to.words": shape(64, 50)}, jnp.arange(8)
    report = jaxquant.quantize(lambda p, t: p["table"][t] @ p["up"] @ p["to.words"], "int8").report(params, tokens)
    assert str(report).count(r"the head: add the rule {path: 'to\.words', recipe: null}") == 1


def test_without_quantization_the_function_itself_runs():
    q = jaxquant.quantize(encode, {"quantization": ""})
    assert q.init(PARAMS, X) == {}
    assert str(jax.make_jaxpr(lambda p, x: q(p, {}, x))(PARAMS, X)).count("float8") == 0
    assert [row.recipe for row in q.report(PARAMS, X)] == [None]


def test_signature_and_keyword_arguments():
    def fn(weights, x, times=1.0, /, other=None, *, mode="sum", **rest):
        return getattr(jnp, mode)(x @ weights["w"]) * times + sum(rest.values())

    params, x = {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))
    q = jaxquant.quantize(fn, FP8)
    assert str(inspect.signature(q)) == (
        "(weights, quant_state, x, times=1.0, /, other=None, *, mode='sum', key=None, **rest)"
    )
    assert inspect.signature(q.init) == inspect.signature(q.report) == inspect.signature(fn)
    state = q.init(params, x, mode="mean", more=1.0)
    assert q(params, state, x, 2.0, mode="mean", more=1.0) == q(params, state, x, mode="mean") * 2 + 1
    q = jaxquant.quantize(lambda weights, x, mode="sum": fn(weights, x, mode=mode), FP8)
    jitted = jax.jit(q, static_argnames="mode", donate_argnames="x")
    assert jitted.lower(params, state, x, "mean").args_info[0][2].donated
    assert q(weights=params, quant_state=state, x=x) == q(params, state, x)


def test_arguments_that_do_not_fit_are_told():
    params, x = {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))
    q = jaxquant.quantize(lambda params, x, key=None: x @ params["w"], FP8)
    state = q.init(params, x, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"must be called as \(params, quant_state, x, key=None\): missing .* 'x'"):
        q(params, quant_state=state)
    with pytest.raises(TypeError, match="an argument named 'key', but key= is the random key"):
        q(params, state, x, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"qfn\(params, quant_state, \*args\): .* got ArrayImpl"):
        jaxquant.quantize(encode, FP8)({"enc": {"kernel": jnp.ones((8, 8))}}, x)
    with pytest.raises(ValueError, match="an argument named 'quant_state'; rename the argument"):
        jaxquant.quantize(lambda params, quant_state: params, FP8)


def test_forward_mode_names_the_layer():
    params, x = {"w": {"kernel": jnp.ones((8, 8))}}, jnp.ones((2, 8))
    q = jaxquant.quantize(lambda params, x: x @ params["w"]["kernel"], CURRENT)
    run = jax.checkpoint(lambda params: q(params, {}, x))
    with pytest.raises(NotImplementedError, match=r"layer 'w' is quantized, .* no derivative in forward mode"):
        jax.jit(jax.jacfwd(run))(params)
    assert jax.jacrev(run)(params)["w"]["kernel"].shape == (2, 8, 8, 8)


def test_a_gradient_of_a_vmap_of_a_scan():
    params, xs = {"w": jnp.ones((2, 8, 8))}, jnp.ones((3, 2, 8))
    q = jaxquant.quantize(lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0].sum(), CURRENT)
    found = jax.grad(lambda params: jax.vmap(lambda x: q(params, {}, x))(xs).sum())(params)
    single = jax.grad(lambda params: q(params, {}, xs[0]))(params)
    np.testing.assert_allclose(found["w"], 3 * single["w"], rtol=4 * FLOAT32_EPS)  # the order of the sum differs
