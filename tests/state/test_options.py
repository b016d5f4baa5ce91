"""An fp8 training step under jax's options: the same numbers, shapes and dtypes as without options."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxquant
from jaxquant import RECIPES, maybe_quantize_model, state
from jaxquant.ops import dot_general, initial_state
from tests import numerics

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
CONFIG = {"quantization": "fp8", "amax_history_length": 4}
RANK = {"jax_numpy_rank_promotion": "raise"}
STRICT = RANK | {"jax_numpy_dtype_promotion": "strict"}
OPTIONS = [{"jax_enable_x64": True}, STRICT | {"jax_debug_nans": True, "jax_check_tracer_leaks": True}]
STRINGS = ["int8", "int8w", "fp8", "fp8_block", "mxfp8", "nvfp4", "ggml_q4_0"]
BACKENDS = [*((string, "native") for string in STRINGS), ("int8", "aqt"), ("fp8_e4m3", "qwix")]


@contextlib.contextmanager
def configured(options):
    """Set options of jax inside a ``with`` block."""
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def linen():
    """Run two micro-batches and an update, three times."""
    model = maybe_quantize_model(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), CONFIG, X)
    variables = model.init(jax.random.key(0), X)
    optimizer = state.Optimizer(optax.sgd(1e-2))
    opt_state = optimizer.init(variables)

    @jax.jit
    def step(variables, opt_state, x):
        one, two = (jax.grad(lambda v, x: (model.apply(v, x) ** 2).sum())(variables, part) for part in (x[:2], x[2:]))
        grads = jax.tree.map(jnp.add, one, two)
        return optimizer.step(grads, opt_state, variables)

    for factor in (1, 9, 0.1):
        variables, opt_state = step(variables, opt_state, X * np.float32(factor))
    return variables


def of_nnx():
    """Run an update three times."""
    model = maybe_quantize_model(nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0))), CONFIG, X)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        state.apply_gradients(model, optimizer, state.grad(lambda model: (model(x) ** 2).sum())(model))

    for factor in (1, 9, 0.1):
        step(model, optimizer, X * np.float32(factor))
    return nnx.to_pure_dict(nnx.state(model))


@pytest.fixture(scope="module")
def expected():
    return {run: run() for run in (linen, of_nnx)}


@pytest.mark.parametrize("options", OPTIONS, ids=["x64", "strict"])
@pytest.mark.parametrize("run", [linen, of_nnx])
def test_a_training_step_is_the_same_under_options_of_jax(run, options, expected):
    with configured(options):
        found = run()
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected[run])
    jax.tree.map(np.testing.assert_array_equal, found, expected[run])


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_strings_train_and_serve_without_promotions(name, backend):
    """The step is only traced, because promotions depend only on shapes and dtypes."""
    x, model, config = jnp.ones((2, 4, 256)), nn.Dense(256), {"quantization": name, "quant_backend": backend}
    quantized = maybe_quantize_model(model, config, x)
    served = maybe_quantize_model(model, config | {"checkpoint_is_quantized": True}, x)
    loss = lambda p, s, x: (quantized.apply(state.merge(p, s), x) ** 2).sum()  # noqa: E731

    def step(x):
        params, own = state.split(quantized.init(jax.random.key(0), x))
        grads, seen = jax.grad(loss, (0, 1))(params, own, x)
        own = state.update(own, seen) if own else own
        return grads, served.apply(jaxquant.convert(model, state.merge(params, own), config, x), x)

    with configured(STRICT if backend == "native" else RANK):  # AQT and Qwix promote dtypes
        grads, out = jax.eval_shape(step, x)
    assert (grads["kernel"].shape, out.shape) == ((256, 256), x.shape)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_gradient_under_a_transfer_guard_and_without_jit(name):
    x, w = jax.device_put((X, X.T))
    recipe = RECIPES[name].recipe
    assert recipe is not None
    own = initial_state(recipe)
    gradient = jax.grad(lambda w, s: dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe, state=s).sum(), (0, 1))
    expected = jax.jit(gradient)(w, own)
    with jax.transfer_guard("disallow"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(jax.jit(gradient)(w, own)), jax.device_get(expected))
    with jax.disable_jit():
        found = gradient(w, own)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=numerics.SMALL_SUM_RTOL, atol=numerics.SMALL_SUM_ATOL)
