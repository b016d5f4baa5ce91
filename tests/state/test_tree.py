"""Quant state in a loop: one use, many uses, no use, and trees that do not fit."""

from __future__ import annotations

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import state
from jaxquant.config.recipes import RECIPES
from jaxquant.core import delayed
from jaxquant.core.recipe import DelayedSpec
from jaxquant.ops import dot_general, initial_state
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
    """Return the state of layers by name, whose fields are given by tensor."""
    return make_state({f"{name}/{tensor}": row for name, layer in layers.items() for tensor, row in layer.items()})


def test_update_reaches_into_trees_of_tables():
    """Models of a larger one keep each its own."""
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
            with pytest.raises(ValueError, match=f"differ at '{where}'; they must be of one state"):
                combine(start, other)


@pytest.mark.parametrize("mode", ["warmup", "flax"])
def test_micro_batches_are_accumulated_in_any_order(mode):
    spec = DelayedSpec(4, amax_init=mode)
    own = delayed.initial_state(spec) | {"amax_history": jnp.arange(4.0)}
    start = make_state({"layer/input": own})
    seen = [
        make_state({"layer/input": delayed.observe(own, own["scale"], jnp.float32(amax), spec)})
        for amax in (1.01, 1.12, 0.5)
    ]
    for order in (seen, seen[::-1]):
        total = state.no_observation(start)
        for each in order:
            total = state.accumulate(total, each)
        history = state.rows_of(state.update(start, total))["layer/input"]["amax_history"]
        newest = np.float32(1.12) if mode == "flax" else recorded(1.12)
        np.testing.assert_array_equal(history, [newest, 2.0, 3.0, 0.0])


def test_names_that_stay_keep_an_alias():
    assert state.nnx.Gradients(1, 2).seen == state.nnx.Gradients(1, 2).observation == 2
    assert state.optimizer.OptimizerState(1, 2).seen == state.optimizer.OptimizerState(1, 2).observation == 2


def test_frozen_dicts_come_out_as_dicts():
    frozen = flax.core.freeze({"params": {"w": 1}, state.OVERWRITE_WITH_GRADIENT: {"a": tables(op=START)}})
    _, quant = state.split(frozen)
    assert jax.tree.structure(quant) == jax.tree.structure(state.update(quant, state.no_observation(quant)))


def test_variables_that_are_not_split_are_refused():
    with pytest.raises(ValueError, match=r"collections \['cache'\] beside"):
        state.split({"params": {}, "cache": {}})
    with pytest.raises(ValueError, match=r"no collection 'params', only .*; pass all that model.init returned,"):
        state.split({"cache": {}})
