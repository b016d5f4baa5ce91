"""A training state that was not made as it must be says what to pass."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state

from jaxquant import state
from jaxquant.state.optimizer import have_stepped

VARIABLES = {"params": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}


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


def test_of_several_accumulations_out_of_step_one_is_enough():
    none, first, both = ([jnp.int32(n) for n in counts] for counts in ((0, 0), (1, 0), (1, 1)))
    assert have_stepped(none, first)
    assert have_stepped(none, both)
    assert not have_stepped(first, first)
