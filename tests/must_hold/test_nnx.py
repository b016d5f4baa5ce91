"""NNX: property 7 (the state advances with a real optimizer) and property 2; each is also broken on purpose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxquant import maybe_quantize_model, state
from tests.must_hold.broken import fails_when_broken
from tests.must_hold.loop import LENGTH, WEIGHTS, PythonLoop, amax, inputs, op_state

CONFIG = {"quantization": "fp8", "amax_history_length": LENGTH}


class Net(nnx.Module):
    """One layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def loss(model: Net, x: jax.Array, weight: float) -> jax.Array:
    return (weight * model(x)).sum()


def quant_state(model: Net):
    return op_state(nnx.to_pure_dict(nnx.state(model, state.QuantState)))


def build(tx):
    model = maybe_quantize_model(Net(nnx.Rngs(0)), CONFIG, inputs(0)[0])
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, weight):
    state.apply_gradients(model, optimizer, state.grad(loss)(model, x, weight))


def check_advances() -> None:
    """Run three Adam steps: the kernel changes, and so does its amax."""
    model, optimizer = build(optax.adam(1e-2))
    expected = PythonLoop()
    for step in range(3):
        x, before = inputs(step)[0], model.dense.kernel[...]
        train_step(model, optimizer, x, 2.0)
        expected.step(input=[amax(x)], kernel=[amax(before)], output_grad=[2.0])
        expected.check(quant_state(model))
        assert (model.dense.kernel[...] != before).any()


def test_7_the_state_advances_with_the_optimizer():
    check_advances()


def check_accumulation(how: str) -> None:
    """Micro-batches of different magnitudes update the state once per optimizer step, like a loop over all of them."""
    model, optimizer = build(optax.MultiSteps(optax.sgd(0.0), 3) if how == "MultiSteps" else optax.sgd(0.0))
    kernel = amax(model.dense.kernel[...])
    expected = PythonLoop()
    for step in range(3):
        xs = inputs(step)
        expected.step(input=[amax(x) for x in xs], kernel=[kernel] * 3, output_grad=WEIGHTS)
        if how == "MultiSteps":
            for x, weight in zip(xs, WEIGHTS, strict=True):
                train_step(model, optimizer, x, weight)
        else:
            graph, params, quant, rest = nnx.split(model, nnx.Param, state.QuantState, ...)

            def seen(quant, x, weight, graph=graph, params=params, rest=rest):
                with state.by_hand():
                    grads = jax.grad(lambda q: loss(nnx.merge(graph, params, q, rest), x, weight))(quant)
                return nnx.to_pure_dict(grads)

            pure = nnx.to_pure_dict(quant)
            if how == "accumulate":
                parts = [seen(quant, x, weight) for x, weight in zip(xs, WEIGHTS, strict=True)]
                total = functools.reduce(state.accumulate, parts, state.no_observation(pure))
            else:

                def add(total, item, quant=quant, seen=seen):
                    return state.accumulate(total, seen(quant, *item)), None

                total, _ = jax.lax.scan(add, state.no_observation(pure), (xs, jnp.array(WEIGHTS)))
            nnx.update(model, state.update(pure, total))
        expected.check(quant_state(model))
    assert not np.any(quant_state(model)["input_amax_bins"])


@pytest.mark.parametrize("how", ["MultiSteps", "accumulate", "lax.scan"])
def test_2_micro_batches_leave_the_state_of_the_big_batch(how):
    check_accumulation(how)


def check_plain_grad_is_an_error() -> None:
    model, _ = build(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"'dense'.*state\.value_and_grad"):
        nnx.grad(loss)(model, inputs(0)[0], 1.0)


def check_plain_grad_of_the_state_is_an_error() -> None:
    """A plain optimizer would use only the gradients of parameters and silently ignore the rest."""
    model, _ = build(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"'dense' has quant state, but the gradient is taken without jaxq"):
        nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, state.QuantState)))(model, inputs(0)[0], 1.0)


def check_plain_update_is_an_error() -> None:
    model, optimizer = build(optax.sgd(0.1))
    grads = state.grad(loss)(model, inputs(0)[0], 1.0)
    with pytest.raises(ValueError, match=r"for jaxquant\.state\.apply_gradients"):
        optimizer.update(model, grads)


ERRORS = (check_plain_grad_is_an_error, check_plain_grad_of_the_state_is_an_error, check_plain_update_is_an_error)


@pytest.mark.parametrize("check", ERRORS)
def test_7_a_step_after_which_the_state_would_stand_still_is_an_error(check):
    check()


BROKEN = {
    "only the parameters are stepped": (state.nnx, "update", lambda old, seen: old, check_advances),
    "every micro-batch is a step": (state.nnx, "multi_steps", lambda _: [], lambda: check_accumulation("MultiSteps")),
    "the last micro-batch wins": (
        state.nnx,
        "add_stored_observation",
        lambda seen, _: seen,
        lambda: check_accumulation("MultiSteps"),
    ),
    "nobody watches": (
        state.watch,
        "_watched",
        lambda watch, path, answer, operands, state: state,
        check_plain_grad_is_an_error,
    ),
    "nobody asks who takes the gradient": (
        state.watch,
        "_watched",
        lambda watch, path, answer, operands, state: state,
        check_plain_grad_of_the_state_is_an_error,
    ),
    "gradients that a plain optimizer takes": (
        state.nnx,
        "_parts",
        lambda grads: grads,
        check_plain_update_is_an_error,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_property_is_seen(name):
    fails_when_broken(*BROKEN[name])
