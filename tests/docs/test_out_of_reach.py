"""The table of unreachable calls in docs/guide/what.md: every message is the message that a user sees."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxquant
from jaxquant.trace import registry, unregister_function
from tests.trace.functions import CURRENT, shape

PAGE = Path(__file__).parents[2] / "docs/guide/what.md"
X, W, STACK = shape(8, 8), shape(8, 8), shape(4, 8, 8)
MASK = np.ones((8, 8), np.float32)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def own_dense(x, w):
    return x @ w


_vjp, _jvp = jax.custom_vjp(own_dense), jax.custom_jvp(own_dense)
_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
_jvp.defjvp(lambda a, t: (a[0] @ a[1], t[0] @ a[1] + a[0] @ t[1]))


def own_kernel(x, w, out):
    out[...] = x[...] @ w[...]


def _sharded(fn, *specs):
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    names = [PartitionSpec(*spec) for spec in specs]
    return jax.shard_map(fn, mesh=mesh, in_specs=tuple(names), out_specs=PartitionSpec(), check_vma=False)


def _scanned(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


CASES = {
    "custom_vjp": (lambda w, x: _vjp(x, w), W),
    "custom_jvp": (lambda w, x: _jvp(x, w), W),
    "callback": (lambda w, x: jax.pure_callback(own_dense, X, x, w), W),
    "kernel": (lambda w, x: pl.pallas_call(own_kernel, X, interpret=True)(x, w), W),
    "picked": (lambda w, x: jnp.einsum("td,tdf->tf", x, w[(x[:, 0] > 0).astype(int)]), STACK),
    "gradient": (lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x), W),
    "closure": (lambda w, x: x + MASK @ w, W),
    "constant": (lambda w, x: x + jnp.ones((8, 8)) @ w, W),
    "parameters": (lambda w, x: x + w @ w, W),
    "stack": (_sharded(_scanned, ("x",), ()), STACK),
}
"""Operation on a parameter, and the parameter's shape."""


def _with_layer(fn):
    """Add a quantized layer after the operation on the parameter ``w``."""
    return lambda p, x: fn(p["w"], x) @ p["layer"]["w"]


def _reason(fn, w, config=CURRENT):
    """Return the reason that the report has for ``w``."""
    rows = jaxquant.quantize(_with_layer(fn), config).report({"w": w, "layer": {"w": W}}, X)
    assert [row.recipe for row in rows if row.path == "layer"] == [config["quantization"]]
    (found,) = {row.reason for row in rows if row.path == "w"}
    return found


def _convolution(w, x):
    return jax.lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


def _config(string, backend="native", **options):
    return {"quantization": string, "quant_backend": backend, **options}


BY_BACKEND = {
    "convolution on AQT": (_convolution, W, _config("int8", "aqt")),
    "ragged on Qwix": (lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([2] * 4)), STACK, _config("int8", "qwix")),
    "convolution of blocks": (_convolution, W, _config("mxfp8")),
}


class Own(nnx.Module):
    """A custom layer, which some calls skip, and a layer of flax."""

    def __init__(self):
        self.mine = nnx.Dict(kernel=nnx.Param(jnp.ones((8, 8))))
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x, is_whole=True):
        return self.linear(x @ self.mine.kernel.get_value() if is_whole else x)


def _call_what_no_example_ran():
    x = jnp.ones((8, 8))
    nnx.eval_shape(lambda: jaxquant.maybe_quantize_model(Own(), _config("fp8"), x, is_whole=False)(x))


def _new_layer():
    params = {"w": W, "layer": {"w": W}}
    known = jaxquant.quantize(lambda p, x: x @ p["layer"]["w"], _config("fp8"))
    known.init(params, X)
    new = jaxquant.quantize(lambda p, x: x @ p["layer"]["w"] @ p["w"], _config("fp8"), like=known)
    jax.eval_shape(new, params, {}, X)


def _init(fn, config):
    return lambda: jaxquant.quantize(fn, config).init({"w": W, "layer": {"w": W}}, X)


def _registered_wrong():
    jaxquant.register_function("own_dense", lambda x, w: (x, w))
    try:
        _init(_with_layer(_OUT), _config("fp8"))()
    finally:
        unregister_function("own_dense")


_OUT = CASES["custom_vjp"][0]
ERRORS = {
    "of this function .w: inside custom_vjp_call of 'own_dense'": _init(lambda p, x: _OUT(p["w"], x), _config("fp8")),
    "strict true does not allow that 1 matmul": _init(_with_layer(_OUT), _config("fp8", strict=True)),
    "rule 'w' .* for layer 'w', but": _init(_with_layer(_OUT), _config("fp8", rules=[{"path": "w", "recipe": "fp8"}])),
    "'own_dense' returns float32.8,8., float32.8,8.": _registered_wrong,
    "layer 'w' .parameter w. did not run": _new_layer,
    "needs quant state, but the model has no 'input_amax_bins' at 'mine'": _call_what_no_example_ran,
}
"""Part of the message -> function that raises the error."""
SECTION = PAGE.read_text().partition("## What cannot be reached")[2].partition("\n## ")[0]
REASONS = re.findall(r"^\| .* \| `(.+)` \|$", SECTION, re.M)


def test_a_matmul_that_cannot_be_quantized_warns_once_and_is_an_error_under_strict():
    fn, params = CASES["stack"][0], {"w": STACK, "layer": {"w": W}}
    make = lambda **options: jaxquant.quantize(_with_layer(fn), CURRENT | options)  # noqa: E731
    quantized = make()
    with pytest.warns(UserWarning, match="stay in float") as caught:
        quantized.init(params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jax.eval_shape(quantized, params, {}, X)
    why = f"stay in float (w: {_reason(fn, STACK)}); add a rule with recipe null"
    assert [str(each.message).endswith(why) for each in caught] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(rules=[{"path": "w", "recipe": None}]).init(params, X)
    with pytest.raises(NotImplementedError, match=re.escape(why)):
        make(strict=True).init(params, X)


@pytest.mark.parametrize(("case", "reason"), list(zip((CASES | BY_BACKEND).values(), REASONS, strict=True)))
def test_the_reason_is_what_a_user_sees(case, reason):
    assert _reason(*case) == reason


@pytest.mark.parametrize("message", ERRORS)
def test_a_matmul_that_was_asked_for_and_cannot_be_reached_is_an_error(message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        ERRORS[message]()
