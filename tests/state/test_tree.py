"""Quant state in a loop: one use, many uses, no use, and trees of another structure."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

from jaxquant import state
from jaxquant.config.recipes import RECIPES
from jaxquant.core import delayed
from jaxquant.core.recipe import DelayedSpec
from jaxquant.ops import dot_general, initial_state
from jaxquant.state.optimizer import have_stepped
from jaxquant.state.table import make_state
from tests.states import recorded

RECIPE = RECIPES["fp8"].recipe
NUMBERS = (((1,), (0,)), ((), ()))


def loss(quant, x, w):
    return (dot_general(x, w, NUMBERS, recipe=RECIPE, state=quant) ** 2).sum()


X = jax.random.normal(jax.random.key(0), (4, 8))
W = jax.random.normal(jax.random.key(9), (8, 8))
START = initial_state(RECIPE)
SEEN = jax.grad(loss)(START, X, W)


def tables(**layers):
    """Return quant state of layers by name, from fields by tensor."""
    return make_state({f"{name}/{tensor}": row for name, layer in layers.items() for tensor, row in layer.items()})


def test_update_reaches_into_trees_of_tables():
    """Each model inside a larger model has a separate table."""
    start, seen = ({"a": {"op": tables(one=each)}, "b": tables(two=each)} for each in (START, SEEN))
    new = state.rows_of(state.update(start, seen))
    np.testing.assert_array_equal(new["a/op/one/input"]["scale"], new["b/two/input"]["scale"])
    assert new["b/two/input"]["amax_history"][0] == recorded(jnp.abs(X).max())


def test_trees_that_differ_are_refused_where_they_do():
    start, seen = tables(a=START, b=START), tables(a=SEEN, b=SEEN)
    lacks = {tensor: row for tensor, row in SEEN.items() if tensor != "kernel"}
    longer = jax.tree.map(lambda leaf: leaf[None], SEEN)
    for other, where in (
        (tables(a=SEEN), "b/input"),
        (tables(a=lacks, b=SEEN), "a/kernel"),
        (tables(a=SEEN, b=SEEN, c=SEEN), "c/input"),
        (tables(a=longer, b=SEEN), "a/input"),
        ({"x": seen}, "a/input"),
    ):
        for combine in (state.update, state.accumulate):
            with pytest.raises(ValueError, match=f"different structures at '{where}'; differentiate with"):
                combine(start, other)


def test_micro_batches_are_accumulated_in_any_order():
    """Uses flax's first amax, recorded unchanged; core/test_delayed.py and must_hold/test_state.py test the warm-up."""
    spec = DelayedSpec(4, amax_init="flax")
    own = delayed.initial_state(spec) | {"amax_history": jnp.arange(4.0)}
    observed = [delayed.observe(own, own["scale"], jnp.float32(amax), spec) for amax in (1.01, 1.12, 0.5)]
    start, *seen = (make_state({"layer/input": each}) for each in (own, *observed))
    for order in (seen, seen[::-1]):
        total = functools.reduce(state.accumulate, order, state.no_observation(start))
        history = state.rows_of(state.update(start, total))["layer/input"]["amax_history"]
        np.testing.assert_array_equal(history, np.float32([1.12, 2, 3, 0]))


def test_of_several_accumulations_out_of_step_one_is_enough():
    none, first, both = ([jnp.int32(n) for n in counts] for counts in ((0, 0), (1, 0), (1, 1)))
    assert have_stepped(none, first)
    assert have_stepped(none, both)
    assert not have_stepped(first, first)


def test_variables_that_are_not_split_are_refused():
    with pytest.raises(ValueError, match=r"have the collections \['cache'\]; pass only the parameters and quant state"):
        state.split({"params": {}, "cache": {}})
    with pytest.raises(ValueError, match=r"no collection 'params', only .*; pass everything that model.init returned,"):
        state.split({"cache": {}})


def test_an_optimizer_state_of_another_make_is_refused():
    variables = {"params": {"kernel": jnp.ones((2, 2))}}
    make = {"apply_fn": jnp.dot, "params": variables, "tx": optax.sgd(0.1)}
    theirs, ours = train_state.TrainState.create(**make), state.TrainState.create(**make)
    assert int(ours.apply_gradients(grads=variables).step) == 1
    with pytest.raises(TypeError, match=r"must be an OptimizerState, got tuple; create the state with TrainState"):
        ours.replace(opt_state=theirs.opt_state).apply_gradients(grads=variables)
