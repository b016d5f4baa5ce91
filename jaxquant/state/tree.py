"""Quant state in a training loop: split it from the parameters, and apply what a backward pass says of it.

Quant state (amax histories, scales, sparsity masks) lives in the collection ``_overwrite_with_gradient``, under flax's
names. It is no parameter: its "gradient" is the new state, and whatever is done to gradients (clipping, weight decay, a
cast) must not touch it. The loop is

    params, quant_state = split(model.init(key, x))
    loss, (grads, seen) = jax.value_and_grad(lambda p, s: loss_fn(merge(p, s)), argnums=(0, 1))(params, quant_state)
    params, quant_state = optimizer_step(params, grads), update(quant_state, seen)

``seen`` may be a sum or a mean over uses of a layer, micro-batches or devices: ``update`` takes the maximum out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.core.delayed import BINS, combine

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Collection of the quant state: flax's name, so that flax's ``TrainState`` keeps it out of the optimizer."""

Tree = Mapping[str, Any]
_FIELDS = ("scale", "amax_history", "amax_bins")
_BINS_SUFFIX = "_amax_bins"
_USES = "sparsity_uses"


def split(variables: Tree) -> tuple[Any, dict[str, Any]]:
    """Split a model's variables into parameters and quant state ({} where a recipe has none).

    Raises:
      ValueError: there is no "params" collection, or another one that this split would lose.
    """
    if "params" not in variables:
        raise ValueError(f"variables have no collection 'params', only {sorted(variables)}")
    others = sorted(set(variables) - {"params", OVERWRITE_WITH_GRADIENT})
    if others:
        raise ValueError(f"variables have collections {others} beside parameters and quant state; split them off first")
    return variables["params"], dict(variables.get(OVERWRITE_WITH_GRADIENT, {}))


def merge(params: Any, quant_state: Tree) -> dict[str, Any]:
    """Put parameters and quant state together again, for ``model.apply``."""
    return {"params": params} | ({OVERWRITE_WITH_GRADIENT: quant_state} if quant_state else {})


def from_flax(quant_state: Tree) -> dict[str, Any]:
    """Complete the state of flax's fp8 ops, as from a checkpoint, for recipes that do not run in flax mode.

    Adds the empty ``amax_bins`` beside each amax history; ``amax_init: flax`` takes flax's state as it is. Leading
    axes, as of layers under ``nn.scan``, are kept.
    """
    new: dict[str, Any] = {}
    for name, value in quant_state.items():
        new[name] = from_flax(value) if isinstance(value, Mapping) else value
        if name.endswith("_amax_history") and not isinstance(value, Mapping):
            bins = name.removesuffix("_amax_history") + _BINS_SUFFIX
            new[bins] = quant_state.get(bins, jnp.zeros((*value.shape[:-1], BINS), jnp.float32))
    return new


def update(old: Tree, seen: Tree) -> dict[str, Any]:
    """Return the quant state after a step.

    Args:
      old: the state that the step used.
      seen: its "gradient", from one backward pass or summed or averaged over several (all with this ``old``).

    A tensor that was used once gets exactly what its backward pass wrote. One that was used several times gets the
    largest amax, rounded up by at most 12.5 % (``core.delayed``). One that was not used, or whose amax was not finite,
    keeps its state. State in flax mode has no such record and is overwritten as flax does it.

    Raises:
      ValueError: the two trees differ.
    """
    if set(old) != set(seen):
        raise ValueError(f"quant state has {sorted(old)} and its gradient has {sorted(seen)}; they must be one tree")
    new = {name: update(old[name], seen[name]) for name in old if isinstance(old[name], Mapping)}
    if new:
        return new | {name: seen[name] for name in old if name not in new}
    new = dict(seen)
    for name in old:
        if name.endswith(_BINS_SUFFIX):
            new |= _update_tensor(old, seen, name.removesuffix(_BINS_SUFFIX))
    if _USES in old:
        new |= _update_sparsity(old, seen)
    return new


def _update_tensor(old: Tree, seen: Tree, tensor: str) -> dict[str, jax.Array]:
    """Apply ``delayed.combine`` to one tensor's variables."""
    before, after = ({name: tree[f"{tensor}_{name}"] for name in _FIELDS} for tree in (old, seen))
    return {f"{tensor}_{name}": value for name, value in combine(before, after).items()}


def _update_sparsity(old: Tree, seen: Tree) -> dict[str, jax.Array]:
    uses = seen[_USES]
    used = uses > 0
    new: dict[str, jax.Array] = {_USES: jnp.zeros_like(uses)}
    for name in ("sparsity_step", "sparsity_mask"):
        trailing = (1,) * (old[name].ndim - uses.ndim)
        shape = uses.shape + trailing
        mean = seen[name] / jnp.where(used, uses, 1.0).reshape(shape).astype(seen[name].dtype)
        new[name] = jnp.where(used.reshape(shape), jnp.round(mean), old[name])
    return new
