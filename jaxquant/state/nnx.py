"""Quant state of NNX models: a Variable type of its own, which no optimizer sees and which advances after each step.

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    loss, grads = value_and_grad(loss_fn)(model, batch)
    apply_gradients(model, optimizer, grads)

The "gradient" of the state is what a step saw (see ``jaxquant.state.tree``), so a step must differentiate with respect
to it beside the parameters. Where it does not, a quantized layer raises: a history that silently stands still is worse.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxquant.state.optimizer import multi_steps
from jaxquant.state.tree import accumulate, nothing_seen, update, with_bins

Array = jax.Array
Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


class QuantState(nnx.Variable[Array]):
    """Amax histories, scales and sparsity masks: no parameter, so ``nnx.Optimizer(wrt=nnx.Param)`` leaves it alone."""


TRAINED = (nnx.Param, QuantState)
"""Filter of what a training step differentiates: ``argnums=nnx.DiffState(0, jaxquant.state.TRAINED)``."""

# jit caches by function and shapes; a user context is part of the key, so that both answers are kept apart.
_standing_still = jax.make_user_context(False)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Allow gradients that leave quant state out, on purpose: it stands still, as for saliency maps or a frozen model.

    To be held around the call of the function that differentiates.
    """
    with _standing_still(True):
        yield


def grad(f: Callable[..., Any], *, argnums: Argnums = 0, has_aux: bool = False, **options: Any) -> Callable[..., Any]:
    """Be ``nnx.grad`` that also differentiates quant state; see ``value_and_grad``."""
    return nnx.grad(f, argnums=_with_state(argnums), has_aux=has_aux, **options)


def value_and_grad(
    f: Callable[..., Any], *, argnums: Argnums = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """Be ``nnx.value_and_grad`` that also differentiates quant state.

    Args:
      f: loss of (model, ...).
      argnums: positions of the models. A position means its ``nnx.Param``; ``nnx.DiffState(0, nnx.LoRAParam)`` chooses
        other parameters. Quant state is added to either.
      has_aux: ``f`` returns (loss, anything).
      options: further arguments of ``nnx.value_and_grad``.

    Returns:
      A function like that of ``nnx.value_and_grad``; its gradients go to ``apply_gradients``.
    """
    return nnx.value_and_grad(f, argnums=_with_state(argnums), has_aux=has_aux, **options)


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, grads: Any, **options: Any) -> None:
    """Update a model's parameters by its optimizer and advance its quant state, in place.

    Under ``optax.MultiSteps`` the quant state waits for the optimizer: over k micro-batches it records the largest amax
    and changes once, when the parameters do. What they have seen so far lies in the state's ``amax_bins``.

    Args:
      model: the model that was differentiated.
      optimizer: made with ``wrt=nnx.Param`` or another filter of parameters.
      grads: from ``value_and_grad``.
      options: keyword arguments of ``optimizer.update``.

    Raises:
      ValueError: the gradients lack the model's quant state.
      NotImplementedError: ``MultiSteps`` with weight sparsity or flax's amax protocol.
    """
    old, seen = _quant_states(model, grads)
    before = [count[...] for count in multi_steps(optimizer.opt_state)]
    if old and before:
        seen = accumulate(with_bins(nothing_seen(old), old), seen)
    optimizer.update(model, grads, **options)
    if not old:
        return
    if not before:
        nnx.update(model, update(old, seen))
        return
    after = [count[...] for count in multi_steps(optimizer.opt_state)]
    ended = jnp.all(jnp.stack([new != count for new, count in zip(after, before, strict=True)]))
    new, waiting = update(old, seen), with_bins(old, seen)
    nnx.update(model, jax.tree.map(lambda stepped, kept: jnp.where(ended, stepped, kept), new, waiting))


def advance(model: nnx.Module, grads: Any) -> None:
    """Replace a model's quant state by the one after the step, in place; parameters are left alone.

    Args:
      model: the model that was differentiated.
      grads: from one backward pass, or summed or averaged over several (see ``jaxquant.state.update``).

    Raises:
      ValueError: the gradients lack the model's quant state.
    """
    old, seen = _quant_states(model, grads)
    if old:
        nnx.update(model, update(old, seen))


def _quant_states(model: nnx.Module, grads: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    old, seen = (nnx.to_pure_dict(nnx.state(tree, QuantState)) for tree in (model, grads))
    if old and not seen:
        raise ValueError(
            f"the gradients have no quant state and the model has some, as at {_first_path(old)!r}; "
            "differentiate with jaxquant.state.value_and_grad"
        )
    return old, seen


def require_state_gradient(path: str, operands: Sequence[Array], state: Any) -> Any:
    """Pass quant state through, and raise where a gradient of a layer's operands is taken without that of its state.

    Args:
      path: of the layer, for the error.
      operands: of its contraction.
      state: pytree of its quant state.

    Raises:
      ValueError: while differentiating, outside ``frozen``.
    """
    return state if _standing_still.value else _watched(path, tuple(operands), state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(path: str, operands: tuple[Array, ...], state: Any) -> Any:
    return state


def _watched_fwd(path: str, operands: Any, state: Any) -> tuple[Any, None]:
    if any(x.perturbed for x in jax.tree.leaves(operands)) and not all(x.perturbed for x in jax.tree.leaves(state)):
        raise ValueError(
            f"layer {path!r} has quant state and its gradient is taken without that of the state, which would never "
            "advance; use jaxquant.state.value_and_grad, or argnums=nnx.DiffState(0, jaxquant.state.TRAINED); where "
            "it is to stand still, call under jaxquant.state.frozen()"
        )
    return jax.tree.map(lambda x: x.value, state), None


def _watched_bwd(path: str, _: None, gradient: Any) -> tuple[None, Any]:
    return None, gradient


_watched.defvjp(_watched_fwd, _watched_bwd, symbolic_zeros=True)


def _with_state(argnums: Argnums) -> nnx.DiffState | tuple[nnx.DiffState, ...]:
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, TRAINED)
    if isinstance(argnums, nnx.DiffState):
        return nnx.DiffState(argnums.argnum, (argnums.filter, QuantState))
    return tuple(_with_state(each) for each in argnums)  # pyright: ignore[reportReturnType]


def _first_path(tree: Mapping[Any, Any]) -> str:
    path, _ = jax.tree.leaves_with_path(tree)[0]
    return "/".join(str(key.key) for key in path[:-2])  # without the op's and the variable's names
