"""Warm quant state: scales from the history only, decided at trace time, with the bits of the general state."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxquant
from jaxquant import state as quant_state
from jaxquant.config.recipes import RECIPES
from jaxquant.core import delayed
from jaxquant.ops.dot_general import dot_general, initial_state
from jaxquant.ops.operand import quantize_operand
from jaxquant.state.table import layers_of, make_state, tables_of

RECIPE = RECIPES["fp8"].recipe
assert RECIPE is not None
DIMS = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16)
KERNELS = {name: jax.random.normal(jax.random.key(n), (16, 16)) / 4 for n, name in enumerate(("first", "second"))}


def fresh():
    return make_state({f"{name}/{tensor}": row for name in KERNELS for tensor, row in initial_state(RECIPE).items()})


def layer(rows, name):
    return {tensor: rows[f"{name}/{tensor}"] for tensor in ("input", "kernel", "output_grad")}


def step(state, x, uses_second):
    """Run a step of two layers; the second may be skipped."""

    def loss(kernels, state, x):
        rows = {f"{path}/{name}": row for path, own in layers_of(state).items() for name, row in own.items()}
        y = dot_general(x, kernels["first"], DIMS, recipe=RECIPE, state=layer(rows, "first"))
        second = lambda y: dot_general(y, kernels["second"], DIMS, recipe=RECIPE, state=layer(rows, "second"))  # noqa: E731
        y = jax.lax.cond(uses_second, second, lambda y: y, y.astype(jnp.float32))
        return (y.astype(jnp.float32) ** 2).mean()

    value, (grads, seen) = jax.value_and_grad(loss, (0, 1))(KERNELS, state, x)
    return quant_state.update(state, seen), (value, grads)


STEP = jax.jit(step)


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def warm_of(state):
    """Return whether each row is warm, by name."""
    return {name: warm for table in tables_of(state) for name, warm in zip(table.rows, table.warm, strict=True)}


def test_a_warm_state_has_the_bits_of_a_cold_one_step_for_step():
    cold, _ = STEP(fresh(), X, True)
    warm = quant_state.warm(cold)
    assert all(warm_of(warm).values())
    assert jax.tree.map(jnp.shape, jax.tree.leaves(warm)) == jax.tree.map(jnp.shape, jax.tree.leaves(cold))
    for scale in (1.0, 3.0, 0.01):
        cold, ours = STEP(cold, X * scale, True)
        warm, theirs = STEP(warm, X * scale, True)
        same(ours, theirs)
        same(quant_state.rows_of(cold), quant_state.rows_of(warm))
    assert all(warm_of(warm).values())  # a scan can carry the state


def test_a_cold_tensor_in_a_warm_step_is_scaled_by_its_own_amax_and_an_unused_one_keeps_its_state():
    cold, _ = STEP(fresh(), X, False)
    state = quant_state.warm(cold)
    assert warm_of(state) == {name: name.startswith("first") for name in quant_state.rows_of(state)}
    before = layer(quant_state.rows_of(state), "second")
    state, _ = STEP(state, X, False)
    cold, _ = STEP(cold, X, False)
    same(layer(quant_state.rows_of(state), "second"), before)  # no gradient reached it
    # The second layer's first step is the step of a cold state, which clips nothing and flushes nothing.
    used, ours = STEP(state, X, True)
    expected, theirs = STEP(cold, X, True)
    same(ours, theirs)
    same(quant_state.rows_of(used), quant_state.rows_of(expected))
    assert float(quant_state.rows_of(used)["second/input"]["amax_history"][0]) > 0
    assert all(warm_of(quant_state.warm(used)).values())


def reductions(state):
    recipe = dataclasses.replace(RECIPE, arithmetic="exact")  # no optimization barrier connects the amax and the cast

    def cast(state, x):
        return quantize_operand(x, recipe.fwd.lhs, (1,), recipe=recipe, state=state)[0].qvalue

    return jax.jit(cast).lower(state, X).compile().as_text().count(" reduce(")


def test_the_cast_of_a_warm_tensor_does_not_wait_for_its_amax():
    cold = delayed.initial_state(RECIPE.delayed)
    warm = cold | {"amax_bins": delayed.widen_bins(delayed.empty_bins())}
    assert reductions(cold) > reductions(warm) == 1  # the maximum over the history


def test_warm_reads_values_and_says_so_where_there_are_none():
    with pytest.raises(TypeError, match=r"call jaxquant\.state\.warm\(quant_state\) between two steps"):
        jax.jit(quant_state.warm)(fresh())
    assert all(warm_of(quant_state.warm(jax.eval_shape(fresh))).values())
    row = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), initial_state(RECIPE)["input"])
    row["amax_history"] = row["amax_history"].at[0, 0].set(1.0)
    stacked = make_state({"layers/input": row})
    assert not any(warm_of(quant_state.warm(stacked)).values())  # one of the two layers has none


def linen_accumulates(turns):
    model = jaxquant.maybe_quantize_model(nn.Dense(16), ACCUMULATED, X)
    tx = optax.MultiSteps(optax.sgd(1e-3), 2)
    train = quant_state.TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), X), tx=tx)
    for index, size in enumerate(SIZES):
        if index == turns:
            params, quant = quant_state.split(train.params)
            train = train.replace(params=quant_state.merge(params, quant_state.warm(quant)))
        grads = jax.grad(lambda v, x: (model.apply(v, x) ** 2).mean())(train.params, size * X)
        train = train.apply_gradients(grads=grads)
    return quant_state.rows_of(quant_state.split(train.params)[1])


def nnx_accumulates(turns):
    model = jaxquant.maybe_quantize_model(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), ACCUMULATED, X)
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(1e-3), 2), wrt=nnx.Param)
    for index, size in enumerate(SIZES):
        if index == turns:
            nnx.update(model, quant_state.warm(nnx.to_pure_dict(nnx.state(model, quant_state.QuantState))))
        _, grads = quant_state.value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, size * X)
        quant_state.apply_gradients(model, optimizer, grads)
    return quant_state.rows_of(nnx.to_pure_dict(nnx.state(model, quant_state.QuantState)))


ACCUMULATED = {"quantization": "fp8", "amax_history_length": 4}
SIZES = (1.0, 1.0, 50.0, 2.0)


@pytest.mark.parametrize("run", [linen_accumulates, nnx_accumulates])
def test_a_state_that_turns_warm_amid_micro_batches_loses_none(run):
    """Before micro-batch 2, it is between two optimizer steps; before micro-batch 3, it is inside a step."""
    expected = run(None)
    assert max(map(float, map(jnp.max, jax.tree.leaves(expected)))) > 50
    for turns in (2, 3):
        jax.tree.map(np.testing.assert_array_equal, run(turns), expected)
