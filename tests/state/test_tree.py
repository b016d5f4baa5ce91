"""Quant state in a loop: one use, many uses, no use, against a plain Python loop."""

from __future__ import annotations

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import state
from jaxquant.config.recipes import RECIPES
from jaxquant.core.quant_state import flat, nested
from jaxquant.ops import dot_general, initial_state

RECIPE = RECIPES["fp8"].recipe
NUMBERS = (((1,), (0,)), ((), ()))


def loss(quant, xs, w, weights):
    ys = [dot_general(x, w, NUMBERS, recipe=RECIPE, state=nested(quant)) for x in xs]
    return sum((y**2).sum() * c for y, c in zip(ys, weights, strict=True))


XS = [jax.random.normal(jax.random.key(i), (4, 8)) * scale for i, scale in enumerate((1.0, 9.0, 0.1))]
W = jax.random.normal(jax.random.key(9), (8, 8))
START = flat(initial_state(RECIPE))


def test_update_reaches_into_nested_trees_and_checks_them():
    seen = jax.grad(loss)(START, XS[:1], W, [1.0])
    new = state.update({"a": {"op": START}, "b": START}, {"a": {"op": seen}, "b": seen})
    np.testing.assert_array_equal(new["a"]["op"]["input_scale"], new["b"]["input_scale"])
    assert float(new["b"]["input_amax_history"][0]) == float(jnp.abs(XS[0]).max())
    with pytest.raises(ValueError, match="must be one tree"):
        state.update({"a": START}, {"b": seen})


def test_trees_that_differ_are_refused_where_they_do():
    seen = state.no_observation(START)
    lacks = {name: value for name, value in seen.items() if name != "kernel_scale"}
    for other, match in (
        ({"a": {"op": seen}}, "quant state has a module at 'b' and its gradient has nothing"),
        ({"a": {"op": lacks}, "b": seen}, r"has shape \(1,\) at 'a/op/kernel_scale' and its gradient has nothing"),
        ({"a": {"op": seen}, "b": seen, 3: seen}, "quant state has nothing at '3' and its gradient has a module"),
        (
            {"a": {"op": jax.tree.map(lambda leaf: leaf[None], seen)}, "b": seen},
            r"has shape \(1,\) at 'a/op/input_scale' and its gradient has shape \(1, 1\)",
        ),
    ):
        with pytest.raises(ValueError, match=match + ".*must be one tree"):
            state.update({"a": {"op": START}, "b": START}, other)


def test_names_that_changed_keep_an_alias():
    assert state.nothing_seen is state.no_observation
    assert state.from_flax is state.with_bins
    assert state.Gradients(1, 2).seen == state.Gradients(1, 2).observation == 2
    assert state.OptimizerState(1, 2).seen == state.OptimizerState(1, 2).observation == 2


def test_frozen_dicts_come_out_as_dicts():
    frozen = flax.core.freeze({"params": {"w": 1}, state.OVERWRITE_WITH_GRADIENT: {"a": {"op": START}}})
    _, quant = state.split(frozen)
    assert jax.tree.structure(quant) == jax.tree.structure(state.update(quant, state.no_observation(quant)))


def test_variables_that_are_not_split_are_refused():
    with pytest.raises(ValueError, match=r"collections \['cache'\] beside"):
        state.split({"params": {}, "cache": {}})
    with pytest.raises(ValueError, match=r"no collection 'params', only .*; pass all that model.init returned,"):
        state.split({"cache": {}})
