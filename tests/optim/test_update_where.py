"""A skipped update changes no bit, for every moment dtype and every implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxquant.optim import quantize_state, stochastic_round, update_where

OPTIMIZED = False
PARAMS = {"w": jax.random.normal(jax.random.key(0), (256, 128)).at[0, 0].set(-0.0), "b": -jnp.zeros(128)}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


WAYS: dict[str, Any] = {
    "bfloat16": lambda: optax.chain(quantize_state(optax.adamw(1e-2), "fp8_coat"), stochastic_round()),
    "xla": lambda: quantize_state(optax.adamw(1e-2), "fp8_coat", apply=True),
    "kernel": lambda: quantize_state(optax.adamw(1e-2), "fp8_coat", axis=-2, apply=True, implementation="pallas"),
    "masked": lambda: optax.masked(quantize_state(optax.lion(1e-2), "int8_linear"), {"w": True, "b": False}),
    "MultiSteps": lambda: optax.MultiSteps(quantize_state(optax.adamw(1e-2), "fp8_coat"), 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_is_not_made_changes_no_bit(way: str):
    tx = WAYS[way]()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS) if way == "bfloat16" else PARAMS

    @jax.jit
    def step(changes: jax.Array, scale: jax.Array, state: Any, params: Any) -> Any:
        return update_where(changes, tx, jax.tree.map(lambda p: jnp.cos(p) * scale, params), state, params)

    params, state = step(jnp.bool_(True), jnp.float32(1), tx.init(params), params)
    wanted = step(jnp.bool_(True), jnp.float32(1), state, params)
    for scale in (1.0, jnp.nan, jnp.inf):
        found = step(jnp.bool_(False), jnp.float32(scale), state, params)
        assert bits(found) == bits((params, state))
    assert bits(step(jnp.bool_(True), jnp.float32(1), state, params)) == bits(wanted) != bits((params, state))


@pytest.mark.parametrize("way", ["xla", "kernel"])
def test_one_that_is_made_is_that_of_update(way: str):
    tx = WAYS[way]()
    made, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    found = jax.jit(lambda changes, *args: update_where(changes, tx, *args))(
        jnp.bool_(True), PARAMS, tx.init(PARAMS), PARAMS
    )
    assert bits(found) == bits((made.weights, state))


def test_a_state_that_is_not_told_is_an_error():
    inner = quantize_state(optax.adamw(1e-2), "fp8_coat")
    deaf = optax.GradientTransformation(inner.init, lambda u, s, p=None: inner.update(u, s, p))
    for tx in (deaf, optax.MultiSteps(inner, 2).gradient_transformation()):
        with pytest.raises(ValueError, match="drops the argument changes of update; accept and forward"):
            update_where(jnp.bool_(True), tx, PARAMS, tx.init(PARAMS), PARAMS)
