"""Quant state in a training loop: split it from the parameters, and apply what a backward pass observed.

Quant state (amax histories, scales, sparsity masks) lives in the collection ``_overwrite_with_gradient``, under flax's
names. It is no parameter: its "gradient" is what was observed of it, and whatever is done to gradients (clipping,
weight decay, a cast) must not touch it. The loop is

    params, quant_state = split(model.init(key, x))
    grads = jax.grad(lambda p, s: loss_fn(merge(p, s)), argnums=(0, 1))
    param_grads, observation = grads(params, quant_state)
    params, quant_state = optimizer_step(params, param_grads), update(quant_state, observation)

``observation`` may be a sum or a mean over uses of a layer, micro-batches or devices: ``update`` takes the maximum out
of it. What is here takes packed state, too (``state.packed``). What is stored need not hold the state's bins:
``state.stored``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxquant.core import delayed
from jaxquant.core.paths import join_path
from jaxquant.core.quant_state import (
    BINS,
    HISTORY,
    MASK,
    SCALE,
    SPARSITY,
    STEP,
    USES,
    delayed_tensors,
    fields_of,
    flat,
    is_named,
)
from jaxquant.state.packed import PackedState, State, Tree, pack, require_tree, unpack

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Collection of the quant state: flax's name, so that flax's ``TrainState`` keeps it out of the optimizer."""

_MARK = re.compile(rf"({BINS}|{HISTORY}|{SPARSITY}_{USES})(_|$)")
"""Pattern of the name, flat or nested, of a field that an optimizer makes negative."""
_READ: weakref.WeakValueDictionary[int, Tracer] = weakref.WeakValueDictionary()
"""Traced marks of quant state that a layer has read, by id: the arrays of the function that takes the gradient."""


def split(variables: Tree) -> tuple[Any, dict[str, Any]]:
    """Split a model's variables into parameters and quant state ({} where a recipe has none).

    Raises:
      ValueError: there is no "params" collection, or another one that this split would lose.
      TypeError: the quant state among them is packed.
    """
    require_tree(variables, "variables")
    if "params" not in variables:
        raise ValueError(
            f"variables have no collection 'params', only {sorted(variables)}; pass all that model.init returned, and "
            "not variables['params'], to jaxquant.state.split, TrainState and Optimizer"
        )
    if isinstance(variables.get(OVERWRITE_WITH_GRADIENT), PackedState):
        raise TypeError(
            f"variables have packed quant state in {OVERWRITE_WITH_GRADIENT!r}, where a model reads nested dicts; put "
            "jaxquant.state.unpack of it there, or keep it beside the parameters, for jaxquant.state.merge and update"
        )
    others = sorted(set(variables) - {"params", OVERWRITE_WITH_GRADIENT})
    if others:
        raise ValueError(f"variables have collections {others} beside parameters and quant state; split them off first")
    return variables["params"], _as_dicts(variables.get(OVERWRITE_WITH_GRADIENT, {}))


def merge(params: Any, quant_state: State) -> dict[str, Any]:
    """Merge parameters and quant state into a model's variables, for ``model.apply``.

    Args:
      params: the collection "params".
      quant_state: {} where a recipe has none; packed state is unpacked.

    Raises:
      TypeError: ``quant_state`` is not a mapping or packed state.
      ValueError: the arguments are swapped, or one of them is the whole variables.
    """
    tree, found = unpack(quant_state), next(_marks_in(params), None)
    names = list(params) if isinstance(params, Mapping) else type(params).__name__  # a function's may be any pytree
    is_whole = (names == ["params"] or "params" in tree) and tree and names != list(tree)  # alike: those of a function
    if found or is_whole or (tree and not next(_marks_in(tree), None)):
        raise ValueError(
            f"params has {names} and quant_state has {list(tree)}: they are swapped, or one of them is the whole "
            "variables; call merge(params, quant_state) with the two parts that jaxquant.state.split returns"
        )
    return {"params": params} | ({OVERWRITE_WITH_GRADIENT: tree} if tree else {})


def _marks_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the array of each field of quant state that an optimizer would make negative."""
    for keys, leaf in jax.tree.leaves_with_path(tree):
        if _MARK.search("_".join(str(getattr(key, "key", "")) for key in keys[-2:])):
            yield join_path(keys), leaf


def refuse_optimized(params: Any) -> None:
    """Refuse quant state among the parameters that an optimizer updates.

    Raises:
      ValueError: names the variable, and what keeps the state out of an optimizer.
    """
    for path, _ in _marks_in(params):
        raise ValueError(
            f"the optimizer updates quant state, as at {path!r}, which is not a parameter: the next loss would be NaN; "
            "give the optimizer parameters alone (jaxquant.state.split), or use jaxquant.state.TrainState or Optimizer"
        )


def _refuse_swapped(quant_state: State, observation: State) -> None:
    """Refuse the arguments of ``update`` in the wrong order, if one array of each shows it.

    In a trace, the state is an array that a layer has read. Otherwise only an observation has numbers in its bins.
    """
    (_, first), (name, second) = (next(_marks_in(tree), ("", None)) for tree in (quant_state, observation))
    is_known = isinstance(second, Tracer) or BINS not in name
    is_state = _READ.get(id(second)) is second if is_known else any_of(first, np.any) and not any_of(second, np.any)
    if is_state and second is not None:
        raise ValueError(
            "observation is the quant state of the step and quant_state is what the step observed; call "
            "jaxquant.state.update(quant_state, observation), where observation is the gradient"
        )


@functools.cache
def _watch_optax() -> None:
    """Replace ``optax.apply_updates``, once, by a function that refuses quant state among the parameters."""
    plain = optax.apply_updates

    @functools.wraps(plain)
    def apply_updates(params: Any, updates: Any) -> Any:
        refuse_optimized(params)
        return plain(params, updates)

    optax.apply_updates = apply_updates


def refuse_trained(quant_state: State) -> None:
    """Refuse quant state that an optimizer has changed, where its values can be read; ``core.delayed`` has the rule.

    Its first call with quant state also replaces ``optax.apply_updates``, for the whole process: a jitted step runs
    Python once, while it is traced, and only that call of an optax loop has the names of what is updated. A name that
    was imported from optax earlier is not replaced (``docs/guide/delayed.md``).

    Raises:
      ValueError: names the variable, and what keeps the state out of an optimizer.
    """
    if quant_state:
        _watch_optax()
    for path, leaf in _marks_in(quant_state):
        if isinstance(leaf, Tracer):
            outer: Any = leaf
            while isinstance(inner := getattr(outer, "primal", None), Tracer):  # what jax.grad was given
                outer = inner
            _READ[id(outer)] = outer
        elif any_of(leaf, lambda part: part < 0):
            if isinstance(quant_state, PackedState):
                return refuse_trained(unpack(quant_state))
            raise ValueError(
                f"quant state {path!r} has negative numbers, which only an optimizer makes: it was trained "
                "as if it were a weight; begin with the quant state of a new model.init, and give the optimizer "
                "parameters alone (jaxquant.state.split), or use jaxquant.state.TrainState or Optimizer"
            )


def _as_dicts(tree: Any) -> Any:
    """Return nested dicts for nested mappings, so that what ``update`` returns has the same structure."""
    return {name: _as_dicts(value) for name, value in tree.items()} if isinstance(tree, Mapping) else tree


def any_of(value: Any, test: Callable[[np.ndarray], Any]) -> bool:
    """Check whether any number of an array passes a test, where it can be read here; shapes and tracers cannot."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return any(np.any(test(np.asarray(shard.data))) for shard in value.addressable_shards)
    return isinstance(value, np.ndarray) and bool(np.any(test(value)))


def update(quant_state: State, observation: State) -> Any:
    """Return the quant state after a step.

    A tensor's history takes the largest amax of all uses, exactly, unless different amaxes of the same sum lie within
    an eighth of the largest one, or more than 2^25 below it; then it may be rounded up, by at most 12.5 %
    (``core.delayed``). It is never rounded down, whatever the weights of the sum. One that was not used, or whose amax
    was not finite, keeps its state. State in flax mode is overwritten as flax does it, except that of a tensor that was
    not used.

    Args:
      quant_state: the state that the step used. Where it is packed, so is what is returned.
      observation: its "gradient", from one backward pass or summed or averaged with positive weights over several (all
        with this ``quant_state``).

    Raises:
      TypeError: one of them is not a mapping or packed state.
      ValueError: the two trees differ, in names or shapes, are swapped, or have no quant state.
    """
    new = _in_pairs(quant_state, observation, _advance, "quant state", "its gradient")
    if jax.tree.leaves(new) and not next(_marks_in(new), None):
        raise ValueError(f"quant_state has no quant state, only {list(unpack(new))}; pass that of jaxquant.state.split")
    _refuse_swapped(quant_state, observation)
    return new


def accumulate(total: State, observation: State) -> Any:
    """Combine what two backward passes observed of the same quant state, as micro-batches: the maximum of every amax.

    Gradients are added, this is not: ``grads = grads + new_grads``, ``total = accumulate(total, observation)``. The
    order does not matter. (A sum or mean is right too, apart from the rounding up that ``update`` describes.)

    Args:
      total: what was observed so far; ``no_observation(quant_state)`` is where to begin. Where it is packed, so is
        what is returned.
      observation: what the next backward pass observed.

    Raises:
      TypeError: one of them is not a mapping or packed state.
      ValueError: the two trees differ, in names or shapes.
    """
    return _in_pairs(total, observation, _combine, "the total", "what is added")


def no_observation(quant_state: Any) -> Any:
    """Make the observation of a step that used no tensor; ``update`` with it changes nothing."""
    return jax.tree.map(jnp.zeros_like, quant_state)


nothing_seen = no_observation
"""Alias of ``no_observation``."""


def hold_observation(quant_state: Tree, observation: Tree) -> dict[Any, Any]:
    """Return quant state whose bins are those of an observation, so that it keeps this until it advances.

    Args:
      quant_state: the state that the step used.
      observation: its "gradient".

    Raises:
      NotImplementedError: state without bins, of flax mode or sparsity.
      ValueError: the two trees differ, in names or shapes.
    """
    return _pairwise(quant_state, observation, _take_bins, "quant state", "its gradient")


def with_waiting(observation: Tree, quant_state: Tree) -> dict[Any, Any]:
    """Add to an observation what waits in the bins of a state (``hold_observation``); where none does, no bit changes.

    State without bins, of flax mode or sparsity, has nothing that waits.

    Args:
      observation: the "gradient" of the state.
      quant_state: the state.

    Raises:
      ValueError: the two trees differ, in names or shapes.
    """
    return _pairwise(observation, quant_state, _add_waiting, "the gradient", "quant state")


def _in_pairs(
    first: State, second: State, combine: Callable[[Tree, Tree], dict[Any, Any]], *names: str
) -> dict[Any, Any] | PackedState:
    """Do as ``_pairwise``, of packed state, too: a group is a module with one tensor."""
    for tree, name in zip((first, second), names, strict=True):
        require_tree(tree, name)
    if not isinstance(first, PackedState):
        return _pairwise(first, unpack(second), combine, *names)
    shapes = jax.tree.map(jnp.shape, (first, second))
    if not isinstance(second, PackedState) or shapes[0] != shapes[1]:  # by layers, whose names errors have
        return pack(_pairwise(unpack(first), unpack(second), combine, *names))
    pairs = zip(first.groups, second.groups, strict=True)
    groups = tuple(
        dataclasses.replace(one, fields=_pairwise(one.fields, other.fields, combine, *names)) for one, other in pairs
    )
    return PackedState(groups, _pairwise(first.rest, second.rest, combine, *names))


def _pairwise(
    first: Tree, second: Tree, combine: Callable[[Tree, Tree], dict[Any, Any]], *names: str, path: tuple[Any, ...] = ()
) -> dict[Any, Any]:
    """Apply ``combine`` to the variables of every module, pairing two trees of one structure.

    Args:
      first, second: the trees.
      combine: of one module's variables in each.
      names: what the trees are, for errors.
      path: of the module.
    """
    if difference := next(_differences(first, second, path), None):
        where, has, other = difference
        raise ValueError(
            f"{names[0]} has {has} at {where!r} and {names[1]} has {other}; they must be one tree, so differentiate "
            "with respect to the whole quant state, or combine just the part that both have"
        )
    inner = {name: value for name, value in first.items() if isinstance(value, Mapping)}
    new = {name: _pairwise(value, second[name], combine, *names, path=(*path, name)) for name, value in inner.items()}
    leaves = [{name: tree[name] for name in first if name not in inner} for tree in (first, second)]
    return new | (combine(*leaves) if leaves[0] else {})


def _differences(first: Tree, second: Tree, path: tuple[Any, ...]) -> Iterator[tuple[str, str, str]]:
    """Describe each name, of two modules' variables, that one lacks or that has another shape."""

    def describe(tree: Tree, name: Any) -> str:
        if name not in tree:
            alike = next((key for key in tree if str(key) == str(name)), None)
            text = f"the key {alike!r}, not {name!r}, as orbax restores without a template (use nnx.restore_int_paths)"
            return "nothing" if alike is None else text
        return "a module" if isinstance(tree[name], Mapping) else f"shape {jnp.shape(tree[name])}"

    for name in [*first, *(name for name in second if name not in first)]:
        has, other = (describe(tree, name) for tree in (first, second))
        if has != other:
            yield "/".join(map(str, (*path, name))), has, other


def _advance(old: Tree, observation: Tree) -> dict[str, Any]:
    new = dict(observation)
    for tensor in delayed_tensors(old):
        before, after = fields_of(old, tensor), fields_of(observation, tensor)
        if BINS in before:
            fields = delayed.advance(before, after)
        else:
            # A scale of 0 is no scale: it is the gradient of a tensor that was not used.
            used = after[SCALE] != 0
            fields = {name: jnp.where(used, after[name], before[name]) for name in before}
        new |= flat({tensor: fields})
    sparse = fields_of(old, SPARSITY)
    return new | (flat({SPARSITY: _update_sparsity(sparse, fields_of(observation, SPARSITY))}) if sparse else {})


def _take_bins(tree: Tree, source: Tree) -> dict[str, Any]:
    has_bins = all(BINS in fields_of(tree, tensor) for tensor in delayed_tensors(tree))
    if not has_bins or fields_of(tree, SPARSITY):
        raise NotImplementedError(
            "optax.MultiSteps on an NNX model with weight sparsity or amax_init 'flax': their state has no place for "
            "what micro-batches observed; add up the gradients of the micro-batches with jaxquant.state.accumulate"
        )
    return {name: source[name] if is_named(name, BINS) else value for name, value in tree.items()}


def _add_waiting(observation: Tree, state: Tree) -> dict[str, Any]:
    new = dict(observation)
    for tensor in delayed_tensors(observation):
        fields = fields_of(observation, tensor)
        if BINS in fields:
            waiting = no_observation(fields) | {BINS: fields_of(state, tensor)[BINS]}
            new |= flat({tensor: delayed.larger(fields, waiting)})
    return new


def _combine(total: Tree, observation: Tree) -> dict[str, Any]:
    # Sparsity: sums, divided by their uses in the update.
    new = {name: total[name] + observation[name] for name in total}
    for tensor in delayed_tensors(total):
        new |= flat({tensor: delayed.larger(fields_of(total, tensor), fields_of(observation, tensor))})
    return new


def _update_sparsity(old: Tree, observation: Tree) -> dict[str, jax.Array]:
    uses = observation[USES]
    used = uses > 0
    new: dict[str, jax.Array] = {USES: jnp.zeros_like(uses)}
    for name in (STEP, MASK):
        trailing = (1,) * (old[name].ndim - uses.ndim)
        shape = uses.shape + trailing
        mean = observation[name] / jnp.where(used, uses, 1.0).reshape(shape).astype(observation[name].dtype)
        new[name] = jnp.where(used.reshape(shape), jnp.round(mean), old[name])
    return new
