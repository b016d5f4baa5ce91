"""Optimizers beside quant state: gradients go to the optimizer, what was observed to the state, and never crosswise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jaxtyping import Array, Bool, Int

from jaxquant.state.tree import (
    OVERWRITE_WITH_GRADIENT,
    Tree,
    accumulate,
    merge,
    no_observation,
    refuse_trained,
    split,
    update,
    warmed_as,
)


class OptimizerState(NamedTuple):
    """State of ``Optimizer``.

    Attributes:
      inner: that of the wrapped optimizer, over the parameters.
      seen: under ``optax.MultiSteps``, what was observed of the quant state since its last update; else None.
        Checkpoints have it by this name; here it is ``observation``.
    """

    inner: Any
    seen: Any

    @property
    def observation(self) -> Any:
        """What was observed since the last update."""
        return self.seen


class Optimizer:
    """Step a model's variables, parameters by an optax optimizer and quant state by what the backward pass observed.

    Clipping, weight decay, EMA and casts inside ``tx`` are handed the parameters and their gradients alone. Under
    ``optax.MultiSteps`` the quant state waits for the optimizer: over k micro-batches it records the largest amax and
    changes once, when the parameters do.

        optimizer = jaxquant.state.Optimizer(optax.MultiSteps(optax.adamw(1e-3), 4))
        opt_state = optimizer.init(variables)
        variables, opt_state = optimizer.step(jax.grad(loss)(variables), opt_state, variables)

    Args:
      tx: an optax ``GradientTransformation`` or ``MultiSteps``.
    """

    def __init__(self, tx: optax.GradientTransformation | optax.MultiSteps):
        self._tx = tx

    def init(self, variables: Tree) -> OptimizerState:
        """Make the optimizer's state for a model's variables, as ``model.init`` gives them.

        Raises:
          ValueError: no "params" among the variables, quant state that an optimizer has changed, or an optimizer with a
            mask or labels of the whole variables.
        """
        params, quant_state = split(variables)
        refuse_trained(quant_state)
        inner = _of_params(self._tx.init, params)
        return OptimizerState(inner, no_observation(quant_state) if quant_state and multi_steps(inner) else None)

    def step(
        self, grads: Tree, state: OptimizerState, variables: Tree, **extra: Any
    ) -> tuple[dict[str, Any], OptimizerState]:
        """Return the variables and the optimizer's state after a step.

        Args:
          grads: gradient with respect to ``variables``, quant state included.
          state: from ``init`` or the last step.
          variables: parameters and quant state.
          extra: further arguments of the optimizer's ``update``.

        Raises:
          TypeError: a state that ``init`` has not made.
          ValueError: the gradient has no quant state while the variables have, or the other way round; or the state was
            made for variables without quant state, or for the whole variables.
        """
        if not isinstance(state, OptimizerState):
            raise TypeError(
                f"the state of jaxquant.state.Optimizer must be an OptimizerState, got {type(state).__name__}; make it "
                "with Optimizer.init, of all that model.init returned"
            )
        (params, quant_state), (param_grads, observation) = split(variables), split(grads)
        if quant_state and not observation:
            raise ValueError(
                f"the variables have {OVERWRITE_WITH_GRADIENT!r} and their gradient has not; take the gradient with "
                "respect to all that model.init returned"
            )
        if observation and not quant_state:
            raise ValueError(
                f"the gradient has {OVERWRITE_WITH_GRADIENT!r} and the variables have not, as after restoring a float "
                "checkpoint; jaxquant.state.merge its parameters with the quant state of model.init"
            )
        if quant_state and state.observation is None and multi_steps(state.inner):
            raise ValueError(
                "optax.MultiSteps has an optimizer state of a model without quant state; make one with Optimizer.init "
                "(TrainState.create) of all that model.init returned, and put the old one's inner into it"
            )
        updates, inner = _of_params(self._tx.update, param_grads, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        if state.observation is None:
            return merge(params, update(quant_state, observation)), OptimizerState(inner, None)
        observation = accumulate(warmed_as(state.observation, quant_state), observation)
        ended = have_stepped(multi_steps(state.inner), multi_steps(inner))
        quant_state = jax.tree.map(_choose(ended), update(quant_state, observation), quant_state)
        waiting = jax.tree.map(_choose(ended), no_observation(observation), observation)
        return merge(params, quant_state), OptimizerState(inner, waiting)


def _of_params(call: Callable[..., Any], *args: Any, **extra: Any) -> Any:
    """Call an optimizer on parameters; its raw error about the tree of the whole variables is said in words."""
    try:
        return call(*args, **extra)
    except ValueError as error:
        if not re.search(r"tree.*\bparams\b", str(error), re.DOTALL):
            raise
        raise ValueError(
            "the optimizer has a mask, labels or a state made from all that model.init returned, and is given the "
            "parameters alone; make them from variables['params'], which is jaxquant.state.split(variables)[0], or "
            "make the mask a function of the parameters"
        ) from error


def _choose(condition: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda chosen, other: jnp.where(condition, chosen, other)


def multi_steps(state: Any) -> list[Int[Array, ""]]:
    """List the counts of optimizer steps that each ``optax.MultiSteps`` within an optimizer's state keeps."""

    def is_multi(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    return [node.gradient_step for node in jax.tree.leaves(state, is_leaf=is_multi) if is_multi(node)]


def have_stepped(before: list[Int[Array, ""]], after: list[Int[Array, ""]]) -> Bool[Array, ""]:
    """Return whether the optimizer updated parameters: of several ``optax.MultiSteps`` out of step, whether one did.

    Args:
      before, after: from ``multi_steps``, of the optimizer's state before a call of its update and after it.
    """
    return jnp.any(jnp.stack([new != old for old, new in zip(before, after, strict=True)]))


class TrainState(train_state.TrainState):
    """flax's ``TrainState`` with quant state: ``params`` holds all that ``model.init`` returned.

    flax's own overwrites the quant state with its gradient, which under reuse, accumulation or a skipped layer is not
    the next state. This one applies ``Optimizer``; ``create``, ``apply_fn`` and ``replace`` are flax's. Gradients with
    respect to ``params`` have what was observed among them: ``optax.global_norm``, and clipping outside of ``tx``, are
    for ``jaxquant.state.split(grads)[0]``.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> TrainState:
        """Return the state after a step.

        Args:
          grads: gradient with respect to ``params``, quant state included.
          kwargs: further fields to replace.

        Raises:
          TypeError: ``opt_state`` is not one that ``create`` made.
          ValueError: the gradient has no quant state while ``params`` has, or the other way round.
        """
        if not isinstance(self.opt_state, OptimizerState):
            raise TypeError(
                f"opt_state of this TrainState must be an OptimizerState, got {type(self.opt_state).__name__}; "
                "make the state with TrainState.create, whose params are all that model.init returned"
            )
        params, opt_state = Optimizer(self.tx).step(grads, self.opt_state, self.params)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any) -> TrainState:
        """Make a state at step 0.

        Args:
          apply_fn: usually ``model.apply``.
          params: the model's variables: ``{"params": …}``, with quant state where the recipe has some.
          tx: an optax ``GradientTransformation`` or ``MultiSteps``.
          kwargs: fields of a subclass.

        Raises:
          ValueError: ``params`` has no "params" collection, or one beside it that is not quant state.
        """
        opt_state = Optimizer(tx).init(params)
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)
