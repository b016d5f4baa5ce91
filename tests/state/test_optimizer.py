"""A training state that was not made as it must be says what to pass."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state

from jaxquant import state

VARIABLES = {"params": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}


def test_parameters_alone_are_refused_with_what_to_pass():
    match = r"only \['bias', 'kernel'\]; pass all that model.init returned, and not variables\['params'\]"
    with pytest.raises(ValueError, match=match):
        state.TrainState.create(apply_fn=jnp.dot, params=VARIABLES["params"], tx=optax.sgd(0.1))


def test_an_optimizer_state_of_another_make_is_refused():
    theirs = train_state.TrainState.create(apply_fn=jnp.dot, params=VARIABLES, tx=optax.sgd(0.1))
    ours = state.TrainState.create(apply_fn=jnp.dot, params=VARIABLES, tx=optax.sgd(0.1))
    assert int(ours.apply_gradients(grads=VARIABLES).step) == 1
    with pytest.raises(
        TypeError,
        match=r"opt_state of this TrainState must be an OptimizerState, got tuple; make the state with "
        r"TrainState.create, whose params are all that model.init returned",
    ):
        ours.replace(opt_state=theirs.opt_state).apply_gradients(grads=VARIABLES)
