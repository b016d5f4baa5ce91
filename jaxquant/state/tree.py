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

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxquant.core import delayed

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Collection of the quant state: flax's name, so that flax's ``TrainState`` keeps it out of the optimizer."""

Tree = Mapping[str, Any]
_FIELDS = ("scale", "amax_history", "amax_bins")
_HISTORY_SUFFIX, _BINS_SUFFIX = "_amax_history", "_amax_bins"
_USES = "sparsity_uses"


def split(variables: Tree) -> tuple[Any, dict[str, Any]]:
    """Split a model's variables into parameters and quant state ({} where a recipe has none).

    Raises:
      ValueError: there is no "params" collection, or another one that this split would lose.
    """
    if "params" not in variables:
        raise ValueError(
            f"variables have no collection 'params', only {sorted(variables)}; pass all that model.init returned"
        )
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
        if name.endswith(_HISTORY_SUFFIX) and not isinstance(value, Mapping):
            bins = name.removesuffix(_HISTORY_SUFFIX) + _BINS_SUFFIX
            new[bins] = quant_state.get(bins, delayed.empty_bins(value.shape[:-1]))
    return new


def update(old: Tree, seen: Tree) -> dict[str, Any]:
    """Return the quant state after a step.

    Args:
      old: the state that the step used.
      seen: its "gradient", from one backward pass or summed or averaged over several (all with this ``old``).

    A tensor's history takes the largest amax of all uses, exactly, unless different amaxes lie within an eighth of the
    largest one in the same sum; then it is rounded up by at most 12.5 % (``core.delayed``). One that was not used, or
    whose amax was not finite, keeps its state. State in flax mode is overwritten as flax does it, but for a tensor that
    was not used.

    Raises:
      ValueError: the two trees differ.
    """
    return _pairwise(old, seen, _advance, "quant state", "its gradient")


def accumulate(total: Tree, seen: Tree) -> dict[str, Any]:
    """Combine what two backward passes saw of the same quant state, as micro-batches: the maximum of every amax.

    Gradients are added, this is not: ``grads = grads + new_grads``, ``total = accumulate(total, seen)``. The order does
    not matter, and ``nothing_seen(quant_state)`` is where to begin. (A sum or mean is right too, but for the rounding
    that ``update`` tells of.)

    Raises:
      ValueError: the two trees differ.
    """
    return _pairwise(total, seen, _combine, "what was seen", "what is added")


def nothing_seen(quant_state: Any) -> Any:
    """Make the observation of a step that used no tensor; ``update`` with it changes nothing."""
    return jax.tree.map(jnp.zeros_like, quant_state)


def with_bins(tree: Tree, source: Tree) -> dict[str, Any]:
    """Give a tree of quant state the bins of another: so a state can hold what was seen until it advances.

    Raises:
      NotImplementedError: state without bins, of flax mode or sparsity.
    """
    return _pairwise(tree, source, _take_bins, "quant state", "the source of its bins")


def with_waiting(seen: Tree, quant_state: Tree) -> dict[str, Any]:
    """Add to what was seen what waits in the bins of a state (``with_bins``); where none does, no bit changes.

    State without bins, of flax mode or sparsity, has nothing that waits.
    """
    return _pairwise(seen, quant_state, _add_waiting, "what was seen", "quant state")


def _pairwise(
    first: Tree, second: Tree, combine: Callable[[Tree, Tree], dict[str, Any]], *names: str
) -> dict[str, Any]:
    """Apply ``combine`` to the variables of every module, pairing two trees of one structure."""
    if set(first) != set(second):
        raise ValueError(f"{names[0]} has {sorted(first)} and {names[1]} has {sorted(second)}; they must be one tree")
    inner = {name: value for name, value in first.items() if isinstance(value, Mapping)}
    new = {name: _pairwise(value, second[name], combine, *names) for name, value in inner.items()}
    leaves = [{name: tree[name] for name in first if name not in inner} for tree in (first, second)]
    return new | (combine(*leaves) if leaves[0] else {})


def _tensors(variables: Tree) -> list[str]:
    """Name the tensors with delayed scaling among a module's variables."""
    return [name.removesuffix(_HISTORY_SUFFIX) for name in variables if name.endswith(_HISTORY_SUFFIX)]


def _fields(variables: Tree, tensor: str) -> dict[str, jax.Array]:
    return {name: variables[f"{tensor}_{name}"] for name in _FIELDS if f"{tensor}_{name}" in variables}


def _advance(old: Tree, seen: Tree) -> dict[str, Any]:
    new = dict(seen)
    for tensor in _tensors(old):
        before, after = _fields(old, tensor), _fields(seen, tensor)
        if "amax_bins" in before:
            fields = delayed.advance(before, after)
        else:
            # A scale of 0 is no scale: it is the gradient of a tensor that was not used.
            used = after["scale"] != 0
            fields = {name: jnp.where(used, after[name], before[name]) for name in before}
        new |= {f"{tensor}_{name}": value for name, value in fields.items()}
    return new | (_update_sparsity(old, seen) if _USES in old else {})


def _take_bins(tree: Tree, source: Tree) -> dict[str, Any]:
    if _USES in tree or any("amax_bins" not in _fields(tree, tensor) for tensor in _tensors(tree)):
        raise NotImplementedError(
            "optax.MultiSteps on an NNX model with weight sparsity or amax_init 'flax': their state has no place for "
            "what micro-batches saw; add up the gradients of the micro-batches with jaxquant.state.accumulate"
        )
    return {name: source[name] if name.endswith(_BINS_SUFFIX) else value for name, value in tree.items()}


def _add_waiting(seen: Tree, state: Tree) -> dict[str, Any]:
    new = dict(seen)
    for tensor in _tensors(seen):
        fields = _fields(seen, tensor)
        if "amax_bins" in fields:
            waiting = nothing_seen(fields) | {"amax_bins": state[f"{tensor}{_BINS_SUFFIX}"]}
            new |= {f"{tensor}_{name}": value for name, value in delayed.larger(fields, waiting).items()}
    return new


def _combine(total: Tree, seen: Tree) -> dict[str, Any]:
    new = {name: total[name] + seen[name] for name in total}  # sparsity: sums, divided by their uses in the update
    for tensor in _tensors(total):
        fields = delayed.larger(_fields(total, tensor), _fields(seen, tensor))
        new |= {f"{tensor}_{name}": value for name, value in fields.items()}
    return new


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
