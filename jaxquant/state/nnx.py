"""Quant state of NNX models: a separate Variable type, which optimizers ignore and which is updated after each step.

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, grads = value_and_grad(loss_fn)(model, batch)
    apply_gradients(model, optimizer, grads)

The "gradient" of the state is the observation of a step (see ``jaxquant.state.tree``), so a step must differentiate
with respect to the state as well as the parameters, and pass the result on. A quantized layer raises if a gradient is
taken in another way, and ``optimizer.update(model, grads)`` rejects these gradients: silently stale amax histories
would be worse.
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
from jaxquant.state.tree import OVERWRITE_WITH_GRADIENT, add_stored_observation, store_observation, update
from jaxquant.state.watch import by_hand

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


_Overwritten: Any = nnx.variablelib.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)


class QuantState(_Overwritten):
    """Amax histories, scales and sparsity masks. Not a parameter, so ``nnx.Optimizer(wrt=nnx.Param)`` ignores it.

    It subclasses the type that flax creates for Linen's collection of the same purpose, so that loops that look for
    this type, such as MaxText's, find it.
    """


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients that ``value_and_grad`` returns, for ``apply_gradients``. ``nnx.Optimizer.update`` raises on them.

    A plain update would use the gradients of the parameters and silently drop the observation. As a pytree they can be
    summed and averaged over micro-batches; clip and take norms only of ``params``.

    Attributes:
      params: gradients of the parameters, an ``nnx.State``.
      observation: observation of the quant state, an ``nnx.State``.
    """

    params: Any
    observation: Any

    @property
    def seen(self) -> Any:
        """Alias of ``observation``."""
        return self.observation

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Return the two parts; the first key appears in the error of an ``nnx.Optimizer``."""
        return ((_REFUSAL, self.params), (jax.tree_util.GetAttrKey("observation"), self.observation)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> Gradients:
        """Return gradients made from the two parts."""
        return cls(*children)


# flax flattens gradients by these keys, which no tree of an optimizer contains.
_REFUSAL = jax.tree_util.GetAttrKey("these gradients are for jaxquant.state.apply_gradients")


def grad(f: Callable[..., Any], *, argnums: Argnums = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Return a function like ``nnx.grad`` that also differentiates with respect to quant state.

    Args:
      f, argnums, has_aux, options: arguments of ``value_and_grad``.
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
    """Return a function like ``nnx.value_and_grad`` that also differentiates with respect to quant state.

    Args:
      f: loss function of (model, ...).
      argnums: positions of the models. A position selects the ``nnx.Param`` variables of that model. To select other
        variables, pass an ``nnx.DiffState``, for example ``nnx.DiffState(0, nnx.LoRAParam)``. Quant state is always
        added to the selected variables.
      has_aux: whether ``f`` returns (loss, aux).
      options: further arguments of ``nnx.value_and_grad``.

    Returns:
      A function like the result of ``nnx.value_and_grad``. Its gradients are ``Gradients``, for ``apply_gradients``.
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
    """Update a model's parameters with its optimizer, and its quant state, in place.

    Under ``optax.MultiSteps`` the quant state is updated together with the parameters: it changes once in k
    micro-batches and records their largest amax. Until then, ``amax_bins`` accumulates the observations.

    Args:
      model: differentiated model.
      optimizer: optimizer created with ``wrt=nnx.Param`` or another filter of parameters.
      grads: result of ``value_and_grad``, or an ``nnx.State`` of gradients taken under ``by_hand``.
      options: keyword arguments of ``optimizer.update``.

    Raises:
      ValueError: the gradients lack quant state of the model, or the optimizer also updates quant state.
      TypeError: the arguments are in another order.
      NotImplementedError: ``MultiSteps`` is used with weight sparsity or ``amax_init: flax``.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(f"apply_gradients needs (model, optimizer, grads), got optimizer {type(optimizer).__name__}")
    old, observation = _quant_states(model, grads)
    if both := nnx.to_pure_dict(nnx.state(model, nnx.All(optimizer.wrt, QuantState))):
        raise ValueError(
            f"the optimizer updates quant state, such as {_first_path(both)!r}, which is not a parameter; create the "
            "optimizer with wrt=nnx.Param"
        )
    before = [count[...] for count in multi_steps(optimizer.opt_state)]
    pending = store_observation(old, observation) if before else old
    optimizer.update(model, _parts(grads).params, **options)
    if not old:
        return
    if not before:
        nnx.update(model, update(old, observation))
        return
    has_stepped = have_stepped(before, [count[...] for count in multi_steps(optimizer.opt_state)])
    new = update(old, observation)
    nnx.update(model, jax.tree.map(lambda stepped, kept: jnp.where(has_stepped, stepped, kept), new, pending))


def advance(model: nnx.Module, grads: Any) -> None:
    """Update a model's quant state in place; parameters are not changed.

    Observations that ``apply_gradients`` accumulated under ``optax.MultiSteps`` count as observed in this step.

    Args:
      model: differentiated model.
      grads: gradients from one backward pass, or summed or averaged over several (see ``jaxquant.state.update``).

    Raises:
      ValueError: the gradients do not contain the model's quant state.
    """
    old, observation = _quant_states(model, grads)
    if old:
        nnx.update(model, update(old, observation))


def _parts(grads: Any) -> Gradients:
    return grads if isinstance(grads, Gradients) else Gradients(*nnx.state(grads, nnx.Not(QuantState), QuantState))


def _quant_states(model: nnx.Module, grads: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's quant state and the observations from these gradients and from earlier micro-batches."""
    trees = (model, _parts(grads).observation)
    old, observation = (nnx.to_pure_dict(nnx.state(tree, QuantState)) for tree in trees)
    if old and not observation:
        raise ValueError(
            f"the model has quant state, such as {_first_path(old)!r}, but the gradients have no quant state; "
            "differentiate with jaxquant.state.value_and_grad"
        )
    return old, add_stored_observation(observation, old)


def _with_state(argnums: Argnums) -> nnx.DiffState | tuple[nnx.DiffState, ...]:
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, (nnx.Param, QuantState))
    if isinstance(argnums, nnx.DiffState):
        return nnx.DiffState(argnums.argnum, (argnums.filter, QuantState))
    return tuple(_with_state(each) for each in argnums)  # pyright: ignore[reportReturnType]


def _first_path(tree: Mapping[Any, Any]) -> str:
    return next(iter(rows_of(tree))).rpartition("/")[0].rpartition("/")[0]
