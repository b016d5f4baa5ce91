"""Optimizers that step parameters by their gradients and quant state by its observation, and never mix the two."""

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
    match_warm_layout,
    merge,
    no_observation,
    refuse_trained,
    split,
    update,
)


class OptimizerState(NamedTuple):
    """State of ``Optimizer``.

    Attributes:
      inner: state of the wrapped optimizer, over the parameters.
      seen: observation of the quant state since its last update under ``optax.MultiSteps``, otherwise None. Checkpoints
        use this name; code reads ``observation``.
    """

    inner: Any
    seen: Any

    @property
    def observation(self) -> Any:
        """Observation since the last update, or None."""
        return self.seen


class Optimizer:
    """Optimizer of a model's variables: an optax optimizer steps parameters, observations update quant state.

    Clipping, weight decay, EMA and casts inside ``tx`` get only the parameters and their gradients. Under
    ``optax.MultiSteps`` the quant state is updated together with the parameters: it changes once in k micro-batches
    and records their largest amax.

        optimizer = jaxquant.state.Optimizer(optax.MultiSteps(optax.adamw(1e-3), 4))
        opt_state = optimizer.init(variables)
        variables, opt_state = optimizer.step(jax.grad(loss)(variables), opt_state, variables)

    Args:
      tx: optax ``GradientTransformation`` or ``MultiSteps``.
    """

    def __init__(self, tx: optax.GradientTransformation | optax.MultiSteps):
        self._tx = tx

    def init(self, variables: Tree) -> OptimizerState:
        """Create the optimizer's state for a model's variables, as ``model.init`` returns them.

        Raises:
          ValueError: the variables have no "params", an optimizer has changed the quant state, or the optimizer has a
            mask or labels for all variables instead of the parameters.
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
          grads: gradient with respect to ``variables``, including quant state.
          state: state from ``init`` or the last step.
          variables: parameters and quant state.
          extra: further arguments of the optimizer's ``update``.

        Raises:
          TypeError: the state does not come from ``init``.
          ValueError: only one of variables and gradient has quant state, or the state was created for variables without
            quant state or for all variables instead of the parameters.
        """
        if not isinstance(state, OptimizerState):
            raise TypeError(
                f"the state of jaxquant.state.Optimizer must be an OptimizerState, got {type(state).__name__}; create "
                "the state with Optimizer.init, from all variables that model.init returned"
            )
        (params, quant_state), (param_grads, observation) = split(variables), split(grads)
        if quant_state and not observation:
            raise ValueError(
                f"the variables have the collection {OVERWRITE_WITH_GRADIENT!r}, but the gradient does not; "
                "differentiate with respect to all variables that model.init returned"
            )
        if observation and not quant_state:
            raise ValueError(
                f"the gradient has the collection {OVERWRITE_WITH_GRADIENT!r}, but the variables do not; add the quant "
                "state that model.init returned, with jaxquant.state.merge(params, quant_state)"
            )
        if quant_state and state.observation is None and multi_steps(state.inner):
            raise ValueError(
                "the optax.MultiSteps state was created for a model without quant state; create a new state with "
                "Optimizer.init or TrainState.create, from all variables that model.init returned, and copy the field "
                "inner from the old state"
            )
        updates, inner = _of_params(self._tx.update, param_grads, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        if state.observation is None:
            return merge(params, update(quant_state, observation)), OptimizerState(inner, None)
        observation = accumulate(match_warm_layout(state.observation, quant_state), observation)
        has_stepped = have_stepped(multi_steps(state.inner), multi_steps(inner))
        quant_state = jax.tree.map(_choose(has_stepped), update(quant_state, observation), quant_state)
        pending = jax.tree.map(_choose(has_stepped), no_observation(observation), observation)
        return merge(params, quant_state), OptimizerState(inner, pending)


def _of_params(call: Callable[..., Any], *args: Any, **extra: Any) -> Any:
    """Call an optimizer on parameters, with a clear error if it was set up for all variables."""
    try:
        return call(*args, **extra)
    except ValueError as error:
        if not re.search(r"tree.*\bparams\b", str(error), re.DOTALL):
            raise
        raise ValueError(
            "the optimizer gets only the parameters, but the mask, labels or state of the optimizer were made from all "
            "variables that model.init returned; make the mask, labels and state from variables['params'], which is "
            "jaxquant.state.split(variables)[0]"
        ) from error


def _choose(condition: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda chosen, other: jnp.where(condition, chosen, other)


def multi_steps(state: Any) -> list[Int[Array, ""]]:
    """List the optimizer step counts of all ``optax.MultiSteps`` within an optimizer's state."""

    def is_multi(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    return [node.gradient_step for node in jax.tree.leaves(state, is_leaf=is_multi) if is_multi(node)]


def have_stepped(before: list[Int[Array, ""]], after: list[Int[Array, ""]]) -> Bool[Array, ""]:
    """Return whether any of the optimizer's ``optax.MultiSteps`` updated parameters.

    Args:
      before, after: results of ``multi_steps`` for the optimizer's state before and after a call of its update.
    """
    return jnp.any(jnp.stack([new != old for old, new in zip(before, after, strict=True)]))


class TrainState(train_state.TrainState):
    """flax's ``TrainState`` with quant state: ``params`` holds all variables that ``model.init`` returned.

    flax's own class overwrites quant state with its gradient, which is wrong if a layer is reused or skipped, or if
    gradients are accumulated. This class applies ``Optimizer``; ``create``, ``apply_fn`` and ``replace`` are flax's.
    Gradients with respect to ``params`` include the observation, so ``optax.global_norm``, and clipping outside of
    ``tx``, must use ``jaxquant.state.split(grads)[0]``.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> TrainState:
        """Return the state after a step.

        Args:
          grads: gradient with respect to ``params``, including quant state.
          kwargs: further fields to replace.

        Raises:
          TypeError: ``opt_state`` does not come from ``create``.
          ValueError: only one of ``params`` and gradient has quant state.
        """
        if not isinstance(self.opt_state, OptimizerState):
            raise TypeError(
                f"opt_state of this TrainState must be an OptimizerState, got {type(self.opt_state).__name__}; "
                "create the state with TrainState.create(params=variables, …), from all variables of model.init"
            )
        params, opt_state = Optimizer(self.tx).step(grads, self.opt_state, self.params)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any) -> TrainState:
        """Create a state at step 0.

        Args:
          apply_fn: usually ``model.apply``.
          params: variables of the model: ``{"params": …}``, with quant state if the recipe has any.
          tx: optax ``GradientTransformation`` or ``MultiSteps``.
          kwargs: fields of a subclass.

        Raises:
          ValueError: ``params`` has no "params" collection, or a further one that is not quant state.
        """
        opt_state = Optimizer(tx).init(params)
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)
