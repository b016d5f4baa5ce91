"""A whole fp8 training step under options of jax: the numbers, shapes and dtypes of the plain one."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxquant import maybe_quantize_model, state

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
CONFIG = {"quantization": "fp8", "amax_history_length": 4}
OPTIONS = [{"jax_enable_x64": True}, {"jax_numpy_dtype_promotion": "strict"}, {"jax_debug_nans": True}]


@contextlib.contextmanager
def configured(options):
    """Set options of jax for a block."""
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def linen(config=CONFIG):
    """Two micro-batches and an update, three times."""
    model = maybe_quantize_model(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), config, X)
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


def in_flax_mode():
    return linen(CONFIG | {"amax_init": "flax"})


def of_nnx():
    """An update, three times."""
    model = maybe_quantize_model(nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0))), CONFIG)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        state.apply_gradients(model, optimizer, state.grad(lambda model: (model(x) ** 2).sum())(model))

    for factor in (1, 9, 0.1):
        step(model, optimizer, X * np.float32(factor))
    return nnx.to_pure_dict(nnx.state(model))


@pytest.fixture(scope="module")
def expected():
    return {run: run() for run in (linen, in_flax_mode, of_nnx)}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("run", [linen, in_flax_mode, of_nnx])
def test_a_training_step_is_the_same_under_options_of_jax(run, options, expected):
    with configured(options):
        found = run()
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected[run])
    jax.tree.map(np.testing.assert_array_equal, found, expected[run])
