"""Quant state of NNX models: a Variable type of its own, which no optimizer sees and which advances after each step.

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, grads = value_and_grad(loss_fn)(model, batch)
    apply_gradients(model, optimizer, grads)

The "gradient" of the state is what a step observed (see ``jaxquant.state.tree``), so a step must differentiate with
respect to it beside the parameters, and hand it on. A quantized layer raises where a gradient is taken in another way,
and ``optimizer.update(model, grads)`` alone does not take these gradients: a history that silently stands still is
worse.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.state.optimizer import have_stepped, multi_steps
from jaxquant.state.table import rows_of
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, hold_observation, update, with_waiting
from jaxquant.state.watch import by_hand

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


_Overwritten: Any = nnx.variablelib.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)


class QuantState(_Overwritten):
    """Amax histories, scales and sparsity masks: no parameter, so ``nnx.Optimizer(wrt=nnx.Param)`` leaves it alone.

    It is of the type that flax makes for Linen's collection of the same purpose, so that loops which look for that,
    as MaxText's, find it.
    """


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What ``value_and_grad`` returns, for ``apply_gradients``. ``nnx.Optimizer.update`` raises on it.

    A plain update would take the parameters' part and drop the rest without a word. As a pytree it may be added up
    and averaged over micro-batches; clipping and norms are for ``params`` alone.

    Attributes:
      params: the parameters' gradients, an ``nnx.State``.
      observation: what the step observed of quant state, an ``nnx.State``.
    """

    params: Any
    observation: Any

    @property
    def seen(self) -> Any:
        """Alias of ``observation``."""
        return self.observation

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Return the two parts; the first key is there to be read in the error of an ``nnx.Optimizer``."""
        return ((_REFUSAL, self.params), (jax.tree_util.GetAttrKey("observation"), self.observation)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Gradients:
        """Return gradients of these two parts."""
        return cls(*children)


# flax takes gradients apart by these keys, and none of an optimizer's trees has them.
_REFUSAL = jax.tree_util.GetAttrKey("these gradients are for jaxquant.state.apply_gradients")


def grad(f: Callable[..., Any], *, argnums: Argnums = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Return a function as ``nnx.grad`` does, which also differentiates quant state.

    Args:
      f, argnums, has_aux, options: as in ``value_and_grad``.
    """
    both = value_and_grad(f, argnums=argnums, has_aux=has_aux, **options)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return run


def value_and_grad(
    f: Callable[..., Any], *, argnums: Argnums = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """Return a function as ``nnx.value_and_grad`` does, which also differentiates quant state.

    Args:
      f: loss of (model, ...).
      argnums: positions of the models. A position means its ``nnx.Param``; ``nnx.DiffState(0, nnx.LoRAParam)`` chooses
        other parameters. Quant state is added to either.
      has_aux: ``f`` returns (loss, anything).
      options: further arguments of ``nnx.value_and_grad``.

    Returns:
      A function like that of ``nnx.value_and_grad``, whose gradients are ``Gradients``, for ``apply_gradients``.
    """
    both = nnx.value_and_grad(f, argnums=_with_state(argnums), has_aux=has_aux, **options)
    is_one = isinstance(argnums, int | nnx.DiffState)

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with by_hand():
            value, grads = both(*args, **kwargs)
        return value, _parts(grads) if is_one else tuple(_parts(each) for each in grads)

    return run


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, grads: Any, **options: Any) -> None:
    """Update a model's parameters by its optimizer and advance its quant state, in place.

    Under ``optax.MultiSteps`` the quant state waits for the optimizer: over k micro-batches it records the largest amax
    and changes once, when the parameters do. What they have observed so far lies in the state's ``amax_bins``.

    Args:
      model: the model that was differentiated.
      optimizer: made with ``wrt=nnx.Param`` or another filter of parameters.
      grads: from ``value_and_grad``, or an ``nnx.State`` taken ``by_hand``.
      options: keyword arguments of ``optimizer.update``.

    Raises:
      ValueError: the gradients lack quant state of the model, or the optimizer was made to update it too.
      TypeError: arguments in another order.
      NotImplementedError: ``MultiSteps`` with weight sparsity or flax's amax protocol.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(f"optimizer is {type(optimizer).__name__}; call apply_gradients(model, optimizer, grads)")
    old, observation = _quant_states(model, grads)
    if both := nnx.to_pure_dict(nnx.state(model, nnx.All(optimizer.wrt, QuantState))):
        raise ValueError(
            f"the optimizer updates quant state, as at {_first_path(both)!r}, which is no parameter; make it with "
            "wrt=nnx.Param"
        )
    before = [count[...] for count in multi_steps(optimizer.opt_state)]
    waiting = hold_observation(old, observation) if before else old
    optimizer.update(model, _parts(grads).params, **options)
    if not old:
        return
    if not before:
        nnx.update(model, update(old, observation))
        return
    ended = have_stepped(before, [count[...] for count in multi_steps(optimizer.opt_state)])
    new = update(old, observation)
    nnx.update(model, jax.tree.map(lambda stepped, kept: jnp.where(ended, stepped, kept), new, waiting))


def advance(model: nnx.Module, grads: Any) -> None:
    """Replace a model's quant state by the one after the step, in place; parameters are left alone.

    What ``apply_gradients`` left waiting for the end of ``optax.MultiSteps`` counts as observed in this step.

    Args:
      model: the model that was differentiated.
      grads: from one backward pass, or summed or averaged over several (see ``jaxquant.state.update``).

    Raises:
      ValueError: the gradients lack the model's quant state.
    """
    old, observation = _quant_states(model, grads)
    if old:
        nnx.update(model, update(old, observation))


def _parts(grads: Any) -> Gradients:
    return grads if isinstance(grads, Gradients) else Gradients(*nnx.state(grads, nnx.Not(QuantState), QuantState))


def _quant_states(model: nnx.Module, grads: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's quant state and what has been observed of it, in these gradients and before them."""
    trees = (model, _parts(grads).observation)
    old, observation = (nnx.to_pure_dict(nnx.state(tree, QuantState)) for tree in trees)
    if old and not observation:
        raise ValueError(
            f"the gradients have no quant state and the model has some, as at {_first_path(old)!r}; "
            "differentiate with jaxquant.state.value_and_grad"
        )
    return old, with_waiting(observation, old)


def _with_state(argnums: Argnums) -> nnx.DiffState | tuple[nnx.DiffState, ...]:
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, (nnx.Param, QuantState))
    if isinstance(argnums, nnx.DiffState):
        return nnx.DiffState(argnums.argnum, (argnums.filter, QuantState))
    return tuple(_with_state(each) for each in argnums)  # pyright: ignore[reportReturnType]


def _first_path(tree: Mapping[Any, Any]) -> str:
    return next(iter(rows_of(tree))).rpartition("/")[0].rpartition("/")[0]
