"""The steps of CONTRIBUTING: a new element type and a recipe with it can be trained, reported and served."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxquant
from jaxquant.config import recipes
from jaxquant.config.explain import explain
from jaxquant.core import dtypes

NAME = "float8_e3m4"
X = jax.random.normal(jax.random.key(0), (16, 32))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Add one row to ELEMENTS and one to RECIPES; no other table changes."""
    monkeypatch.setitem(dtypes.ELEMENTS, NAME, dtypes.floating(NAME))
    recipe = recipes._same("fp8_e3m4", NAME)
    row = recipes.RecipeRow(recipe, "FP8 with four bits of mantissa")
    monkeypatch.setitem(recipes.RECIPES, "fp8_e3m4", row)
    return {"quantization": "fp8_e3m4"}


def test_a_recipe_of_a_new_element(config: dict[str, str]):
    assert NAME in explain("fp8_e3m4")
    plain = nn.Dense(8)
    model = jaxquant.maybe_quantize_model(plain, config, X)
    variables = model.init(jax.random.key(1), X)
    tx = optax.adam(1e-2)
    state = jaxquant.state.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(lambda v: (model.apply(v, X) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads), loss

    coverage = jaxquant.coverage(step, state)
    coverage.check()
    assert "e3m4 × e3m4" in str(coverage)
    losses = []
    for _ in range(20):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]

    served = jaxquant.maybe_quantize_model(plain, config | {"checkpoint_is_quantized": True}, X)
    converted = jaxquant.convert(plain, state.params, config, X)
    assert converted["params"]["kernel"].qvalue.dtype == jnp.dtype(NAME)
    np.testing.assert_array_equal(served.apply(converted, X), model.apply(state.params, X))
